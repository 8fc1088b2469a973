// slice, pad, concat, pack_rows and unpack_rows on a GPU. A thread has elements of the result.
//
// Threads: any. Ownership: a static table. Errors: INVALID_ARGUMENT kBadType for a count out of
// range of pack_rows and unpack_rows; the others never fail. What else kernels promise is said in
// core/ops/cuda_kernel.h.
#ifndef CHORUS_CORE_OPS_SLICE_SLICE_CUDA_H_
#define CHORUS_CORE_OPS_SLICE_SLICE_CUDA_H_

#include "absl/types/span.h"
#include "core/ops/cuda_kernel.h"

namespace chorus {

absl::Span<const CudaKernelEntry> SliceCudaKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SLICE_SLICE_CUDA_H_
