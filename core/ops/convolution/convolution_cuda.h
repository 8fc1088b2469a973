// convolution and its gradients on a GPU.
//
// By NVIDIA's libraries, where the machine has them: what is a product of matrices as they lie (one
// tap, no stride, no padding) by cuBLASLt (core/cuda/blas.h), all else by cuDNN (core/cuda/dnn.h).
//
// Where there is no cuDNN, or it refuses one, it is matrix products by cuBLASLt of what the taps
// are over, unfolded into the workspace a slab of samples after the other: about 32 MiB, or a
// sample where that is larger. With neither, and small ones, those of groups, of one channel on a
// side and of samples that are very large, they are done directly: nothing is unfolded in memory.
// Of a convolution and of its adjoint in x a thread has some channels of the result at some places.
// The adjoint in the weights has few results and long sums: a thread has a part of the places for
// some pairs of channels, and a second launch adds the parts up. They are as many as the sizes say.
//
// To the libraries padding is zeros like any others, which a NaN or an infinity in the weights, or
// in y for the weights' adjoint, makes NaN; directly it is nothing.
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
