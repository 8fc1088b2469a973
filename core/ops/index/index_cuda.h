// one_hot, take, scatter_add, their forms along an axis, arg_max and arg_min on a GPU. A thread has
// a part of a row of the result, for arg_max of the operand, or in a sort of indices one of them.
//
// Threads: any. Ownership: a static table. Errors: INVALID_ARGUMENT kBadType for an index out of
// range; arg_max and arg_min never fail. What else kernels promise is said in
// core/ops/cuda_kernel.h.
#ifndef CHORUS_CORE_OPS_INDEX_INDEX_CUDA_H_
#define CHORUS_CORE_OPS_INDEX_INDEX_CUDA_H_

#include "absl/types/span.h"
#include "core/ops/cuda_kernel.h"

namespace chorus {

absl::Span<const CudaKernelEntry> IndexCudaKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_INDEX_INDEX_CUDA_H_
