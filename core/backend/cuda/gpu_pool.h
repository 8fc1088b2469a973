// What launches borrow of a GPU and is used again: events, and slabs, which are pinned memory with
// as much on the GPU.
//
// Threads: thread-compatible; each call in the GPU's context. Ownership: it has all that it gave;
// the GPU must outlive it. Errors: the driver's.
#ifndef CHORUS_CORE_BACKEND_CUDA_GPU_POOL_H_
#define CHORUS_CORE_BACKEND_CUDA_GPU_POOL_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "core/cuda/cuda_api.h"
#include "core/cuda/gpu.h"

namespace chorus {

class GpuPool {
 public:
  struct Slab {
    PinnedMemory host;
    cuda::DevicePtr device = 0;
    int64_t bytes = 0;
  };

  explicit GpuPool(const CudaGpu* gpu) : gpu_(gpu) {}
  ~GpuPool();
  GpuPool(const GpuPool&) = delete;
  GpuPool& operator=(const GpuPool&) = delete;

  // Of at least so many bytes; what stands there is anything.
  absl::StatusOr<Slab*> TakeSlab(int64_t bytes);
  // The GPU does not use it any more.
  void GiveBack(Slab* slab) { free_slabs_.push_back(slab); }

  absl::StatusOr<cuda::Event> TakeEvent();
  // Its record has passed, or it has none.
  void GiveBack(cuda::Event event) { free_events_.push_back(event); }

 private:
  static constexpr int64_t kSlabBytes = int64_t{64} << 10;

  const CudaGpu* const gpu_;
  std::vector<std::unique_ptr<Slab>> slabs_;  // all that there are
  std::vector<Slab*> free_slabs_;
  std::vector<cuda::Event> events_;  // so
  std::vector<cuda::Event> free_events_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_CUDA_GPU_POOL_H_
