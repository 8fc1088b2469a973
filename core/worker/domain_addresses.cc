#include "core/worker/domain_addresses.h"

#include <algorithm>

namespace chorus::worker {

MapMemory DomainAddresses::Grow(int64_t bytes) {
  constexpr int64_t kLeast = int64_t{1} << 20;
  constexpr int64_t kMostAhead = int64_t{256} << 20;
  MapMemory range;
  range.domain = domain_;
  range.begin = next_;
  // As large as all before it together, within bounds.
  range.bytes = std::max({ranges_.Rounded(bytes), std::min(mapped_bytes_, kMostAhead), kLeast});
  // A gap, so that no piece ever lies in two ranges.
  next_ += static_cast<DeviceAddress>(range.bytes + kAlignment);
  mapped_bytes_ += range.bytes;
  mapped_[range.begin] = range.bytes;
  ranges_.Add(range.begin, range.bytes);
  return range;
}

void DomainAddresses::Refuse(DeviceAddress begin) {
  const auto range = mapped_.find(begin);
  if (range == mapped_.end()) return;
  ranges_.Retire(begin, range->second);
  mapped_bytes_ -= range->second;
  mapped_.erase(range);
}

void DomainAddresses::Lose() {
  ranges_ = AddressRanges(kAlignment);
  mapped_bytes_ = 0;
  mapped_.clear();
}

}  // namespace chorus::worker
