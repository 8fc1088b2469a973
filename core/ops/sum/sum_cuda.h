// Reductions over axes, expand and spread on a GPU. What has many terms is reduced in parts, whose
// results lie in the workspace and are reduced in turn; how many depends on the input's shape
// alone, and so does the order of operations.
//
// Threads: any. Ownership: a static table. Errors: these kernels never fail. What else kernels
// promise is said in core/ops/cuda_kernel.h.
#ifndef CHORUS_CORE_OPS_SUM_SUM_CUDA_H_
#define CHORUS_CORE_OPS_SUM_SUM_CUDA_H_

#include "absl/types/span.h"
#include "core/ops/cuda_kernel.h"

namespace chorus {

absl::Span<const CudaKernelEntry> SumCudaKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SUM_SUM_CUDA_H_
