// convolution and its gradients on a GPU, directly: nothing is unfolded in memory.
//
// Of a convolution and of its adjoint in x a thread has some channels of the result at some places.
// The adjoint in the weights has few results and long sums: a thread has a part of the places for
// some pairs of channels, and a second launch adds the parts up. They are as many as the sizes say.
//
// Threads: any. Ownership: a static table. Errors: the kernels never fail. What else kernels
// promise is said in core/ops/cuda_kernel.h.
#ifndef CHORUS_CORE_OPS_CONVOLUTION_CONVOLUTION_CUDA_H_
#define CHORUS_CORE_OPS_CONVOLUTION_CONVOLUTION_CUDA_H_

#include "absl/types/span.h"
#include "core/ops/cuda_kernel.h"

namespace chorus {

absl::Span<const CudaKernelEntry> ConvolutionCudaKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_CONVOLUTION_CONVOLUTION_CUDA_H_
