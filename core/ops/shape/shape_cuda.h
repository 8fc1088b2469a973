// copy, reshape and transpose on a GPU. The driver copies bytes where their order stays: copy may
// work in place, which does nothing.
//
// Threads: any. Ownership: a static table. Errors: these kernels never fail. What else kernels
// promise is said in core/ops/cuda_kernel.h.
#ifndef CHORUS_CORE_OPS_SHAPE_SHAPE_CUDA_H_
#define CHORUS_CORE_OPS_SHAPE_SHAPE_CUDA_H_

#include "absl/types/span.h"
#include "core/ops/cuda_kernel.h"

namespace chorus {

absl::Span<const CudaKernelEntry> ShapeCudaKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SHAPE_SHAPE_CUDA_H_
