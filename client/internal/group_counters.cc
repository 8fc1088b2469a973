#include "client/internal/group_counters.h"

namespace chorus {
namespace internal {

void GroupCounters::Reset() {
  next_ = 0;
  absl::erase_if(ends_, [](const auto& end) { return end.second == 0; });
  for (auto& end : ends_) end.second = 0;
}

}  // namespace internal
}  // namespace chorus
