#include "core/collective/known_orders.h"

#include <cstdint>
#include <utility>
#include <vector>

namespace chorus {
namespace {

size_t BytesOf(const std::string& signature, const GangOrder& order) {
  // A table is at least 7/16 full once it has grown, and a byte goes to each slot.
  constexpr size_t kPerSlot = (sizeof(std::pair<std::string, GangOrder>) + 1) * 16 / 7;
  size_t numbers = order.instances.size() + order.runs.size();
  for (const std::vector<int32_t>& of_run : order.reordered) numbers += of_run.size();
  return kPerSlot + signature.size() + 1 + numbers * sizeof(int32_t) +
         order.reordered.size() * sizeof(std::vector<int32_t>);
}

}  // namespace

const GangOrder* KnownOrders::Find(const std::string& signature) const {
  const auto it = orders_.find(signature);
  return it == orders_.end() ? nullptr : &it->second;
}

const GangOrder* KnownOrders::Keep(const std::string& signature, GangOrder order) {
  not_kept_ = {};
  not_kept_bytes_ = 0;
  const size_t bytes = BytesOf(signature, order);
  if (bytes > kMostBytes / 2) {
    not_kept_ = std::move(order);
    not_kept_bytes_ = bytes;
    return &not_kept_;
  }
  if (bytes_ + bytes > kMostBytes) {
    orders_ = {};
    bytes_ = 0;
  }
  bytes_ += bytes;
  return &orders_.emplace(signature, std::move(order)).first->second;
}

}  // namespace chorus
