#include "core/collective/vote.h"

#include <cstddef>

#include "absl/strings/str_cat.h"

namespace chorus {

std::string PartText(const Participation& part) {
  return absl::StrCat(part.descriptor.ToString(), part.is_recv ? " (receiving)" : "");
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
