// Which devices share an address space.
//
// Threads: any; it does not change. Ownership: plain values. Errors: none.
#ifndef CHORUS_CORE_NODE_DOMAINS_H_
#define CHORUS_CORE_NODE_DOMAINS_H_

#include <cstddef>
#include <vector>

#include "absl/types/span.h"
#include "core/base/ids.h"
#include "core/runtime/devices.h"

namespace chorus::node {

class Domains {
 public:
  explicit Domains(const DevicesInfo& devices);

  // DevicesInfo::domains.
  int of(DeviceIndex device) const { return of_[static_cast<size_t>(device.value())]; }
  // What ranks have in common may be there once: two devices are of one domain, or there is only
  // one device.
  bool any_shared() const { return count_ < static_cast<int>(of_.size()) || of_.size() == 1; }
  // Of some devices that is so, of others not.
  bool mixed() const { return any_shared() && count_ > 1; }
  bool AllOne(absl::Span<const DeviceIndex> devices) const;

 private:
  std::vector<int> of_;
  int count_ = 0;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_DOMAINS_H_
