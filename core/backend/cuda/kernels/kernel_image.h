// The kernels of moves.cu, compiled for several GPUs, as the driver loads them; empty where there
// was no CUDA toolkit at build time.
//
// Threads: any. Ownership: part of the program. Errors: none.
#ifndef CHORUS_CORE_BACKEND_CUDA_KERNELS_KERNEL_IMAGE_H_
#define CHORUS_CORE_BACKEND_CUDA_KERNELS_KERNEL_IMAGE_H_

#include <cstddef>

extern "C" {
extern const unsigned char chorus_cuda_kernels_begin[];
extern const unsigned char chorus_cuda_kernels_end[];
}

namespace chorus {
namespace cuda {

inline const void* kernel_image() { return chorus_cuda_kernels_begin; }
inline size_t kernel_image_bytes() {
  return static_cast<size_t>(chorus_cuda_kernels_end - chorus_cuda_kernels_begin);
}

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_CUDA_KERNELS_KERNEL_IMAGE_H_
