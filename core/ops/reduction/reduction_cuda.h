// holds, share, scale and product on a GPU. A thread has elements. In place is allowed.
//
// Threads: any. Ownership: a static table. Errors: these kernels never fail. What else kernels
// promise is said in core/ops/cuda_kernel.h.
#ifndef CHORUS_CORE_OPS_REDUCTION_REDUCTION_CUDA_H_
#define CHORUS_CORE_OPS_REDUCTION_REDUCTION_CUDA_H_

#include "absl/types/span.h"
#include "core/ops/cuda_kernel.h"

namespace chorus {

absl::Span<const CudaKernelEntry> ReductionCudaKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_REDUCTION_REDUCTION_CUDA_H_
