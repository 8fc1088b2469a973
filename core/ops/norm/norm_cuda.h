// Normalisation on a GPU. normalize: a thread has elements. What is added up in rows, or for a
// weight, is added up in parts, as far as each thread has some elements (norm_kernels.h): the
// results of at least 16 elements each, and those of 32 such, stand in the workspace, and of
// normalize_grad three numbers for each row.
//
// Sums are in the elements' type within a part, of at most some thousand of them, and in f64 beyond
// it.
//
// Threads: any. Ownership: a static table. Errors: no operand makes the kernels fail. What else
// kernels promise is said in core/ops/cuda_kernel.h.
#ifndef CHORUS_CORE_OPS_NORM_NORM_CUDA_H_
#define CHORUS_CORE_OPS_NORM_NORM_CUDA_H_

#include "absl/types/span.h"
#include "core/ops/cuda_kernel.h"

namespace chorus {

absl::Span<const CudaKernelEntry> NormCudaKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_NORM_NORM_CUDA_H_
