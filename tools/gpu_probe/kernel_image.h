// The kernels of kernels.cu, compiled for several GPUs, as the driver loads them; empty where there
// was no CUDA toolkit at build time.
//
// Threads: any. Ownership: part of the program. Errors: none.
#ifndef CHORUS_TOOLS_GPU_PROBE_KERNEL_IMAGE_H_
#define CHORUS_TOOLS_GPU_PROBE_KERNEL_IMAGE_H_

#include <cstddef>

extern "C" {
extern const unsigned char chorus_probe_kernels_begin[];
extern const unsigned char chorus_probe_kernels_end[];
}

namespace chorus {
namespace probe {

inline const void* kernel_image() { return chorus_probe_kernels_begin; }
inline size_t kernel_image_bytes() {
  return static_cast<size_t>(chorus_probe_kernels_end - chorus_probe_kernels_begin);
}

}  // namespace probe
}  // namespace chorus

#endif  // CHORUS_TOOLS_GPU_PROBE_KERNEL_IMAGE_H_
