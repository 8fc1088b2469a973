// The memory of one GPU, which all of its logical devices share.
//
// One range of addresses is reserved for all of it; chunks of memory are mapped there one behind
// the other as they are wanted, and pieces of them are given out. A chunk can be shared by a
// descriptor, as NVIDIA's virtual memory management does it.
//
// Threads: any. Ownership: it has all of the memory, also what has not been freed when it ends; the
// GPU must outlive it. Errors: said at each function.
#ifndef CHORUS_CORE_BACKEND_CUDA_GPU_MEMORY_H_
#define CHORUS_CORE_BACKEND_CUDA_GPU_MEMORY_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/backend/backend.h"
#include "core/base/address_ranges.h"
#include "core/base/mutex.h"
#include "core/cuda/gpu.h"

namespace chorus {

class GpuMemory {
 public:
  // At most `limit_bytes`, in chunks of `chunk_bytes` or more. The driver's error: no range of
  // addresses of that size.
  static absl::StatusOr<std::unique_ptr<GpuMemory>> Create(const CudaGpu* gpu, int64_t limit_bytes,
                                                           int64_t chunk_bytes);
  ~GpuMemory();
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;

  // Aligned to kAlignment; 0 for no bytes. RESOURCE_EXHAUSTED kOutOfMemory: the limit would be
  // exceeded, or the GPU has no more; INVALID_ARGUMENT kBadType: less than no bytes.
  absl::StatusOr<DeviceAddress> Allocate(int64_t bytes);
  // Nothing may still use it.
  void Free(DeviceAddress address);
  // INTERNAL kInternal: [address, address + bytes) is not inside one piece that was given out.
  absl::Status Check(DeviceAddress address, int64_t bytes) const;

  static constexpr int64_t kAlignment = 256;

 private:
  GpuMemory(const CudaGpu* gpu, int64_t limit_bytes) : gpu_(gpu), limit_(limit_bytes) {}
  // Maps at least so many bytes more behind what there is.
  absl::Status Grow(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  struct Chunk {
    cuda::AllocationHandle handle = 0;
    DeviceAddress address = 0;
    int64_t bytes = 0;
  };

  const CudaGpu* const gpu_;
  const int64_t limit_;
  int64_t chunk_bytes_ = 0;     // multiples of what the driver maps
  int64_t reserved_bytes_ = 0;  // as many as all chunks may have
  DeviceAddress begin_ = 0;
  mutable Mutex mutex_;
  std::vector<Chunk> chunks_ ABSL_GUARDED_BY(mutex_);
  int64_t mapped_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  AddressRanges ranges_ ABSL_GUARDED_BY(mutex_){kAlignment};
};

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_CUDA_GPU_MEMORY_H_
