#include "client/internal/origins.h"

#include <algorithm>
#include <iterator>

namespace chorus {
namespace internal {
namespace {

// What these wait for themselves, as runs before `index`, which is none of theirs or the last.
EarlierRuns WaitedForBy(const Origins& origins, int64_t index) {
  EarlierRuns earlier;
  for (const OriginPtr& origin : origins) {
    earlier |= origin->waits_for << static_cast<size_t>(index - origin->index);
  }
  return earlier;
}

// The bit of `origin` in the EarlierRuns of run `index`, which is after it; beyond their size where
// it is too far back.
size_t BitOf(const Origin& origin, int64_t index) {
  return static_cast<size_t>(index - origin.index - 1);
}

}  // namespace

OriginPtr OriginTable::Add(Sequence run, const MemberCore* member, const Origins& operands) {
  auto added = std::make_shared<Origin>();
  added->index = ++last_index_;
  added->run = run;
  added->member = member;
  if (operands.empty()) return added;
  added->waits_for = WaitedForBy(operands, added->index);
  for (const OriginPtr& origin : operands) {
    const size_t bit = BitOf(*origin, added->index);
    if (bit < added->waits_for.size()) added->waits_for.set(bit);
  }
  return added;
}

void OriginTable::Unite(Origins* both, const Origins& other,
                        absl::FunctionRef<Sequence()> oldest_run) {
  Origins united;
  std::set_union(both->begin(), both->end(), other.begin(), other.end(), std::back_inserter(united),
                 [](const OriginPtr& a, const OriginPtr& b) { return a->index < b->index; });
  const int64_t last = united.back()->index;
  const EarlierRuns waited_for = WaitedForBy(united, last);
  const auto is_waited_for = [&](const OriginPtr& origin) {
    if (origin->index == last) return false;
    const size_t bit = BitOf(*origin, last);
    return bit < waited_for.size() && waited_for.test(bit);
  };
  united.erase(std::remove_if(united.begin(), united.end(), is_waited_for), united.end());
  if (united.size() > kMost) {
    const Sequence oldest = oldest_run();
    united.erase(std::remove_if(united.begin(), united.end(),
                                [oldest](const OriginPtr& origin) { return origin->run < oldest; }),
                 united.end());
  }
  *both = std::move(united);
}

}  // namespace internal
}  // namespace chorus
