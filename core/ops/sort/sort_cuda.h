// arg_sort on a GPU: a merge sort, each step of which is a launch (sort_kernels.h). Entries of 8
// bytes stand by turns in two arrays: the last launch reads the workspace, and the one before it
// the result's own memory, if that is large enough, else the workspace, too. So that takes 8 bytes
// for each element of x where all are asked for; else at most 16, or k where that is less.
//
// Threads: any. Ownership: a static table. Errors: these kernels never fail. What else kernels
// promise is said in core/ops/cuda_kernel.h.
#ifndef CHORUS_CORE_OPS_SORT_SORT_CUDA_H_
#define CHORUS_CORE_OPS_SORT_SORT_CUDA_H_

#include "absl/types/span.h"
#include "core/ops/cuda_kernel.h"

namespace chorus {

absl::Span<const CudaKernelEntry> SortCudaKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SORT_SORT_CUDA_H_
