// fill on a GPU. A thread has elements.
//
// Threads: any. Ownership: a static table. Errors: the kernel never fails. What else kernels
// promise is said in core/ops/cuda_kernel.h.
#ifndef CHORUS_CORE_OPS_FILL_FILL_CUDA_H_
#define CHORUS_CORE_OPS_FILL_FILL_CUDA_H_

#include "absl/types/span.h"
#include "core/ops/cuda_kernel.h"

namespace chorus {

absl::Span<const CudaKernelEntry> FillCudaKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_FILL_FILL_CUDA_H_
