// softmax, log_softmax and what their gradients are made of on a GPU. A thread has a part of a row.
//
// Threads: any. Ownership: a static table. Errors: these kernels never fail. What else kernels
// promise is said in core/ops/cuda_kernel.h.
#ifndef CHORUS_CORE_OPS_SOFTMAX_SOFTMAX_CUDA_H_
#define CHORUS_CORE_OPS_SOFTMAX_SOFTMAX_CUDA_H_

#include "absl/types/span.h"
#include "core/ops/cuda_kernel.h"

namespace chorus {

absl::Span<const CudaKernelEntry> SoftmaxCudaKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SOFTMAX_SOFTMAX_CUDA_H_
