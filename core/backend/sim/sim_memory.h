// The address space of simulated devices.
//
// Threads: any.
// Ownership: it owns the memory that it gives out.
// Errors: RESOURCE_EXHAUSTED kOutOfMemory beyond the limit, INVALID_ARGUMENT kBadType for a size
//   below 0, INTERNAL where an address is no memory of its device.
#ifndef CHORUS_CORE_BACKEND_SIM_SIM_MEMORY_H_
#define CHORUS_CORE_BACKEND_SIM_SIM_MEMORY_H_

#include <cstdint>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>

#include "absl/status/statusor.h"
#include "core/backend/collective_work.h"
#include "core/base/mutex.h"

namespace chorus {

class SimMemory : public AddressSpace {
 public:
  // Every four bytes of fresh memory: a NaN as f32, and twice of it one as f64.
  static constexpr uint32_t kFresh = 0x7ffcbcbc;
  static constexpr uint8_t kFreed = 0xcb;

  explicit SimMemory(int64_t limit_bytes) : limit_(limit_bytes) {}

  absl::StatusOr<DeviceAddress> Allocate(int device, int64_t bytes);
  // Overwrites the memory. Its bytes stay readable to work that has begun, its address is never
  // given out again.
  void Free(DeviceAddress address);
  absl::Status Resolve(int device, DeviceAddress address, int64_t bytes,
                       void** pointer) const override;

 private:
  struct Deleter {
    void operator()(char* memory) const { std::free(memory); }
  };
  struct Block {
    int device = 0;
    int64_t bytes = 0;
    bool freed = false;
    std::unique_ptr<char, Deleter> memory;
  };

  const int64_t limit_;
  mutable Mutex mutex_;
  int64_t used_ ABSL_GUARDED_BY(mutex_) = 0;
  DeviceAddress next_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<DeviceAddress, Block> blocks_ ABSL_GUARDED_BY(mutex_);  // by their first address
  // Freed blocks are forgotten, oldest first, when there are many of them or they are large.
  std::deque<DeviceAddress> freed_ ABSL_GUARDED_BY(mutex_);
  int64_t freed_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_SIM_SIM_MEMORY_H_
