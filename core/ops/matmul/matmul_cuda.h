// matmul on a GPU: of floats by cuBLASLt, where it can be had and does the product
// (core/cuda/blas.h); else each thread has a tile of a product, and adds up in the order
// of k.
//
// Threads: any. Ownership: a static table. Errors: the kernel never fails for what inputs hold.
// What else kernels promise is said in core/ops/cuda_kernel.h.
#ifndef CHORUS_CORE_OPS_MATMUL_MATMUL_CUDA_H_
#define CHORUS_CORE_OPS_MATMUL_MATMUL_CUDA_H_

#include "absl/types/span.h"
#include "core/ops/cuda_kernel.h"

namespace chorus {

absl::Span<const CudaKernelEntry> MatmulCudaKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_MATMUL_MATMUL_CUDA_H_
