// The backend of NVIDIA GPUs: logical devices that share one GPU, its memory and its address space.
//
// Threads: as backend.h says. Ownership: the table must outlive the backend. Errors: backend.h's,
// and those of CreateCudaBackend.
#ifndef CHORUS_CORE_BACKEND_CUDA_CUDA_BACKEND_H_
#define CHORUS_CORE_BACKEND_CUDA_CUDA_BACKEND_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "core/backend/backend.h"
#include "core/cuda/cuda_api.h"
#include "core/cuda/gpu.h"
#include "core/ops/cuda_kernel.h"

namespace chorus {

struct CudaBackendOptions {
  const cuda::Api* api = nullptr;  // of a driver, or of a stand-in
  int gpu = 0;                     // the driver's ordinal
  int devices = 1;                 // logical ones
  // The kernels of collectives (cuda::kernel_image), and those that make_kernel wants.
  std::vector<KernelImage> images;
  CudaKernelFactory make_kernel = nullptr;
  CudaLibraries libraries;
  int64_t memory_bytes = 0;  // 0: nine tenths of what is free
  // What is taken of the GPU at a time.
  int64_t chunk_bytes = int64_t{256} << 20;
};

// FAILED_PRECONDITION kWrongState, in one line: no such GPU, or no kernels in this build.
// CheckDeviceCount's, and the driver's.
absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const CudaBackendOptions& options);

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_CUDA_CUDA_BACKEND_H_
