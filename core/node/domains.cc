#include "core/node/domains.h"

#include <algorithm>

namespace chorus::node {

Domains::Domains(const DevicesInfo& devices) {
  for (const int domain : devices.domains) {
    count_ += std::find(of_.begin(), of_.end(), domain) == of_.end();
    of_.push_back(domain);
  }
}

bool Domains::AllOne(absl::Span<const DeviceIndex> devices) const {
  return std::all_of(devices.begin(), devices.end(),
                     [&](DeviceIndex device) { return of(device) == of(devices.front()); });
}

}  // namespace chorus::node
