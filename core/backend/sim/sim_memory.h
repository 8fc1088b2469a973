// The address space of simulated devices.
//
// Threads: any.
// Ownership: it owns the memory that it gives out.
// Errors: RESOURCE_EXHAUSTED kOutOfMemory beyond the limit, INVALID_ARGUMENT kBadType for a size
//   below 0, INTERNAL where an address is no memory of its device's domain.
#ifndef CHORUS_CORE_BACKEND_SIM_SIM_MEMORY_H_
#define CHORUS_CORE_BACKEND_SIM_SIM_MEMORY_H_

#include <cstdint>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "core/backend/collective_work.h"
#include "core/base/mutex.h"

namespace chorus {

class SimMemory : public AddressSpace {
 public:
  // Every four bytes of fresh memory: a NaN as f32, and twice of it one as f64.
  static constexpr uint32_t kFresh = 0x7ffcbcbc;
  static constexpr uint8_t kFreed = 0xcb;

  SimMemory(int64_t limit_bytes, int devices_per_domain)
      : limit_(limit_bytes), devices_per_domain_(devices_per_domain) {}
  int domain(int device) const { return device / devices_per_domain_; }

  absl::StatusOr<DeviceAddress> Allocate(int device, int64_t bytes);
  // Overwrites the memory, which a device of this domain has got. Its bytes stay readable to work
  // that has begun, its address is never given out again there.
  void Free(int device, DeviceAddress address);
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

  // Where domains have several devices each has the same addresses, as GPUs may: whoever uses one
  // in the wrong domain finds what stands there. Where they have one device no two addresses are
  // the same, and Resolve refuses one of another domain.
  int SpaceOf(int device) const { return devices_per_domain_ > 1 ? domain(device) : 0; }

  using AddressInSpace = std::pair<int, DeviceAddress>;  // a space, and an address in it
  // Frees what begins there. Whether so much was forgotten that it is time to trim.
  bool Forget(const AddressInSpace& first) ABSL_LOCKS_EXCLUDED(mutex_);

  const int64_t limit_;
  const int devices_per_domain_;
  mutable Mutex mutex_;
  int64_t used_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int, DeviceAddress> next_ ABSL_GUARDED_BY(mutex_);       // by space, behind the first
  std::map<AddressInSpace, Block> blocks_ ABSL_GUARDED_BY(mutex_);  // by their first address
  // Freed blocks are forgotten, oldest first, when there are many of them or they are large.
  std::deque<AddressInSpace> freed_ ABSL_GUARDED_BY(mutex_);
  int64_t freed_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t untrimmed_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // that were forgotten
};

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_SIM_SIM_MEMORY_H_
