#include "core/base/address_ranges.h"

#include <iterator>

namespace chorus {

int64_t AddressRanges::Rounded(int64_t bytes) const {
  return (bytes + alignment_ - 1) / alignment_ * alignment_;
}

void AddressRanges::Add(uint64_t begin, int64_t bytes) {
  if (bytes == 0) return;
  auto next = holes_.lower_bound(begin);
  if (next != holes_.end() && begin + static_cast<uint64_t>(bytes) == next->first) {
    bytes += next->second;
    RemoveHole(next++);
  }
  if (next != holes_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + static_cast<uint64_t>(previous->second) == begin) {
      begin = previous->first;
      bytes += previous->second;
      RemoveHole(previous);
    }
  }
  holes_[begin] = bytes;
  holes_by_size_.emplace(bytes, begin);
}

void AddressRanges::RemoveHole(std::map<uint64_t, int64_t>::iterator hole) {
  holes_by_size_.erase({hole->second, hole->first});
  holes_.erase(hole);
}

absl::optional<uint64_t> AddressRanges::Take(int64_t bytes) {
  const int64_t rounded = Rounded(bytes);
  const auto best = holes_by_size_.lower_bound({rounded, 0});
  if (best == holes_by_size_.end()) return absl::nullopt;
  const auto [hole_bytes, address] = *best;
  RemoveHole(holes_.find(address));
  Add(address + static_cast<uint64_t>(rounded), hole_bytes - rounded);
  pieces_[address] = bytes;
  taken_bytes_ += bytes;
  return address;
}

int64_t AddressRanges::GiveBack(uint64_t address) {
  const auto it = pieces_.find(address);
  if (it == pieces_.end()) return 0;
  const int64_t bytes = it->second;
  taken_bytes_ -= bytes;
  Add(address, Rounded(bytes));
  pieces_.erase(it);
  return bytes;
}

bool AddressRanges::InOnePiece(uint64_t address, int64_t bytes) const {
  auto it = pieces_.upper_bound(address);
  if (it == pieces_.begin()) return false;
  --it;
  const uint64_t offset = address - it->first;
  return offset <= static_cast<uint64_t>(it->second) &&
         bytes <= it->second - static_cast<int64_t>(offset);
}

int64_t AddressRanges::HoleBefore(uint64_t end) const {
  auto it = holes_.lower_bound(end);
  if (it == holes_.begin()) return 0;
  --it;
  return it->first + static_cast<uint64_t>(it->second) == end ? it->second : 0;
}

}  // namespace chorus
