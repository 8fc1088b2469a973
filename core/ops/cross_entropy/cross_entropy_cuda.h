// cross_entropy and its gradient on a GPU. A thread has a row, of the gradient a part of one.
//
// Threads: any. Ownership: a static table. Errors: INVALID_ARGUMENT kBadType for a label that is no
// class and not ignored. What else kernels promise is said in core/ops/cuda_kernel.h.
#ifndef CHORUS_CORE_OPS_CROSS_ENTROPY_CROSS_ENTROPY_CUDA_H_
#define CHORUS_CORE_OPS_CROSS_ENTROPY_CROSS_ENTROPY_CUDA_H_

#include "absl/types/span.h"
#include "core/ops/cuda_kernel.h"

namespace chorus {

absl::Span<const CudaKernelEntry> CrossEntropyCudaKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_CROSS_ENTROPY_CROSS_ENTROPY_CUDA_H_
