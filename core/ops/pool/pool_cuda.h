// Pooling on a GPU. A thread has an element of the result; where these are few and windows are
// large, a part of a window. In the workspace stand then the parts' sums, or where each has its
// largest element.
//
// Threads: any. Ownership: a static table. Errors: these kernels never fail. What else kernels
// promise is said in core/ops/cuda_kernel.h.
#ifndef CHORUS_CORE_OPS_POOL_POOL_CUDA_H_
#define CHORUS_CORE_OPS_POOL_POOL_CUDA_H_

#include "absl/types/span.h"
#include "core/ops/cuda_kernel.h"

namespace chorus {

absl::Span<const CudaKernelEntry> PoolCudaKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_POOL_POOL_CUDA_H_
