// The addresses of one domain of a worker's devices. They are given out on the daemon's side, which
// then waits for nobody, and never name anything else again, in this worker or the next: so an
// address tells whether what stood there is lost.
//
// Threads: thread-compatible. Ownership: numbers only. Errors: none.
#ifndef CHORUS_CORE_WORKER_DOMAIN_ADDRESSES_H_
#define CHORUS_CORE_WORKER_DOMAIN_ADDRESSES_H_

#include <cstdint>

#include "absl/container/flat_hash_map.h"
#include "absl/types/optional.h"
#include "core/base/address_ranges.h"
#include "core/worker/protocol.h"

namespace chorus::worker {

class DomainAddresses {
 public:
  explicit DomainAddresses(int domain) : domain_(domain), next_(FirstAddressOf(domain)) {}

  // None: Grow() first.
  absl::optional<DeviceAddress> Take(int64_t bytes) { return ranges_.Take(bytes); }
  // One from before Lose() is ignored.
  void GiveBack(DeviceAddress address) { ranges_.GiveBack(address); }
  // A range with room for `bytes`, which the worker has to be told of. Ranges grow with what there
  // is already.
  MapMemory Grow(int64_t bytes);
  // There is no memory for the range that begins there: nothing of it is given out any more.
  void Refuse(DeviceAddress begin);
  // The memory of all ranges is gone.
  void Lose();

 private:
  static constexpr int64_t kAlignment = 256;

  const int domain_;
  DeviceAddress next_;
  AddressRanges ranges_{kAlignment};
  int64_t mapped_bytes_ = 0;
  absl::flat_hash_map<DeviceAddress, int64_t> mapped_;
};

}  // namespace chorus::worker

#endif  // CHORUS_CORE_WORKER_DOMAIN_ADDRESSES_H_
