#include "core/collective/instance.h"

#include <limits>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace chorus {

std::string InstanceKey::ToString() const {
  std::string text = absl::StrCat("group ", group.value(), " epoch ", epoch.value());
  if (is_pair()) {
    absl::StrAppend(&text, " from ", source.value(), " to ", destination.value(), " tag ", tag);
  }
  absl::StrAppend(&text, " index ", index);
  if (is_gradient()) {
    const auto step = [this](std::string* out, const Request& request) {
      absl::StrAppend(out, request.number);
      if (request.epoch != epoch) absl::StrAppend(out, "@", request.epoch.value());
    };
    absl::StrAppend(&text, ", gradient ", absl::StrJoin(path, ".", step));
  }
  return text;
}

bool operator<(const InstanceKey& a, const InstanceKey& b) {
  return std::tie(a.epoch, a.group, a.source, a.destination, a.tag, a.index, a.path) <
         std::tie(b.epoch, b.group, b.source, b.destination, b.tag, b.index, b.path);
}

void EncodeInstanceKey(const InstanceKey& key, ByteWriter* out) {
  out->PutSigned(key.group.value());
  out->PutSigned(key.epoch.value());
  out->PutSigned(key.index);
  out->PutSigned(key.source.value());
  if (key.is_pair()) {
    out->PutSigned(key.destination.value());
    out->PutSigned(key.tag);
  }
  out->PutVarint(key.path.size());
  for (const InstanceKey::Request& request : key.path) {
    out->PutSigned(request.epoch.value());
    out->PutSigned(request.number);
  }
}

InstanceKey DecodeInstanceKey(ByteReader* in) {
  const auto number = [in](int64_t minimum, int64_t maximum) {
    const int64_t value = in->GetSigned();
    if (value < minimum || value > maximum) in->Fail();
    return in->ok() ? value : 0;
  };
  constexpr int64_t kMax32 = std::numeric_limits<int32_t>::max();
  constexpr int64_t kMax64 = std::numeric_limits<int64_t>::max();
  InstanceKey key;
  key.group = GroupId(static_cast<int32_t>(number(0, kMax32)));
  key.epoch = Epoch(number(0, kMax64));
  key.index = number(0, kMax64);
  key.source = GroupRank(static_cast<int32_t>(number(-1, kMax32)));
  if (key.is_pair()) {
    key.destination = GroupRank(static_cast<int32_t>(number(0, kMax32)));
    key.tag = number(std::numeric_limits<int64_t>::min(), kMax64);
  }
  const size_t order = in->GetCount();
  if (order > kMaxGradientOrder) in->Fail();
  for (size_t i = 0; i < order && in->ok(); ++i) {
    const Epoch epoch(number(0, kMax64));
    key.path.push_back({epoch, static_cast<int32_t>(number(0, kMax32))});
  }
  return in->ok() ? key : InstanceKey();
}

std::string Descriptor::ToString() const {
  std::string text(CollectiveKindName(kind));
  if (reduction != Reduction::kNone) absl::StrAppend(&text, " ", ReductionName(reduction));
  if (root.value() >= 0) absl::StrAppend(&text, " root=", root.value());
  if (dtype != DType::kUnspecified) {
    absl::StrAppend(&text, " ", DTypeName(dtype), "[", absl::StrJoin(dims, ","), "]");
  }
  if (!counts.empty()) absl::StrAppend(&text, " counts=[", absl::StrJoin(counts, ","), "]");
  return text;
}

}  // namespace chorus
