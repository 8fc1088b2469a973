#include "core/collective/vote.h"

#include <cstddef>
#include <cstdint>

#include "absl/strings/str_cat.h"

namespace chorus {

std::string PartText(const Participation& part) {
  return absl::StrCat(part.descriptor.ToString(), part.is_recv ? " (receiving)" : "");
}

std::vector<CallList> FindLists(const std::vector<Participation>& participations) {
  const auto size = static_cast<int32_t>(participations.size());
  std::vector<bool> may_join(participations.size());
  for (size_t i = 0; i < participations.size(); ++i) {
    const Participation& part = participations[i];
    may_join[i] = part.instance.kind == InstanceRef::Kind::kNext && !part.wants_grad &&
                  !HasPeer(part.descriptor.kind) && !part.descriptor.RowsDiffer() &&
                  !part.descriptor.runtime_counts;
    const int32_t forward = part.instance.node;
    if (part.instance.kind == InstanceRef::Kind::kGradient && forward >= 0 && forward < size) {
      may_join[static_cast<size_t>(forward)] = false;
    }
  }
  const auto follows = [&](int32_t i, int32_t before, int32_t part) {
    if (i >= size || !may_join[static_cast<size_t>(i)]) return false;
    const Participation& one = participations[static_cast<size_t>(i)];
    const Participation& other = participations[static_cast<size_t>(before)];
    return one.part == part && one.group_slot == other.group_slot && one.member == other.member;
  };
  std::vector<CallList> lists;
  for (int32_t i = 0; i < size; i += lists.back().count) {
    lists.push_back({i, 1, false});
    if (!may_join[static_cast<size_t>(i)]) continue;
    CallList& list = lists.back();
    const int32_t part = participations[static_cast<size_t>(i)].part;
    list.by_parts = follows(i + 1, i, part + 1);
    while (follows(i + list.count, i, list.by_parts ? part + list.count : 0)) {
      // A call of more parts than one is in no list of calls.
      if (!list.by_parts && follows(i + list.count + 1, i, 1)) break;
      ++list.count;
    }
  }
  return lists;
}

std::shared_ptr<const PartLabel> LabelOf(const Participation& part) {
  constexpr size_t kMostBytes = 256;
  auto label = std::make_shared<PartLabel>();
  label->op = std::string(CollectiveKindName(part.descriptor.kind));
  label->what = PartText(part).substr(0, kMostBytes);
  label->source = part.source.substr(0, kMostBytes);
  return label;
}

int64_t BytesOf(const PartLabel& label) {
  constexpr size_t kCounts = 16;  // of those that share it
  return static_cast<int64_t>(sizeof(label) + kCounts + label.op.capacity() +
                              label.what.capacity() + label.source.capacity() + 3);
}

}  // namespace chorus
