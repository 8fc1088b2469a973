#include "client/internal/origins.h"

#include <algorithm>
#include <iterator>

namespace chorus {
namespace internal {
namespace {

// What these wait for themselves, as runs before `number`, which is none of theirs or the last.
EarlierRuns WaitedForBy(const Origins& origins, int64_t number) {
  EarlierRuns earlier;
  for (const OriginPtr& origin : origins) {
    earlier |= origin->waits_for << static_cast<size_t>(number - origin->number);
  }
  return earlier;
}

// Where a run before `number` is in its EarlierRuns; beyond their size where it is too far back.
size_t IndexBefore(int64_t number, const Origin& origin) {
  return static_cast<size_t>(number - origin.number - 1);
}

}  // namespace

OriginPtr OriginTable::Add(Sequence run, const MemberCore* member, const Origins& operands) {
  auto added = std::make_shared<Origin>();
  added->number = ++last_number_;
  added->run = run;
  added->member = member;
  if (operands.empty()) return added;
  added->waits_for = WaitedForBy(operands, added->number);
  for (const OriginPtr& origin : operands) {
    const size_t index = IndexBefore(added->number, *origin);
    if (index < added->waits_for.size()) added->waits_for.set(index);
  }
  return added;
}

void OriginTable::Unite(Origins* both, const Origins& other,
                        absl::FunctionRef<Sequence()> oldest_run) {
  Origins united;
  std::set_union(both->begin(), both->end(), other.begin(), other.end(), std::back_inserter(united),
                 [](const OriginPtr& a, const OriginPtr& b) { return a->number < b->number; });
  const int64_t last = united.back()->number;
  const EarlierRuns waited_for = WaitedForBy(united, last);
  const auto is_waited_for = [&](const OriginPtr& origin) {
    if (origin->number == last) return false;
    const size_t index = IndexBefore(last, *origin);
    return index < waited_for.size() && waited_for.test(index);
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
