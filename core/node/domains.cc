#include "core/node/domains.h"

#include <algorithm>

namespace chorus::node {

Domains::Domains(const Backend& backend) {
  for (int device = 0; device < backend.device_count(); ++device) {
    const int domain = backend.domain(device);
    count_ += std::find(of_.begin(), of_.end(), domain) == of_.end();
    of_.push_back(domain);
  }
}

bool Domains::AllOne(absl::Span<const DeviceIndex> devices) const {
  return std::all_of(devices.begin(), devices.end(),
                     [&](DeviceIndex device) { return of(device) == of(devices.front()); });
}

}  // namespace chorus::node
