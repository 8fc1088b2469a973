// cum_sum on a GPU. A thread has rows, what one index of all dimensions but the axis selects, and
// of floating point all of a row: its sums are added up in order. Of integers it has parts of rows,
// if there are few rows.
//
// Threads: any. Ownership: a static table. Errors: these kernels never fail. What else kernels
// promise is said in core/ops/cuda_kernel.h.
#ifndef CHORUS_CORE_OPS_CUM_SUM_CUM_SUM_CUDA_H_
#define CHORUS_CORE_OPS_CUM_SUM_CUM_SUM_CUDA_H_

#include "absl/types/span.h"
#include "core/ops/cuda_kernel.h"

namespace chorus {

absl::Span<const CudaKernelEntry> CumSumCudaKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_CUM_SUM_CUM_SUM_CUDA_H_
