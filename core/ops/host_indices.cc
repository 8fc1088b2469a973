#include "core/ops/host_indices.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/error.h"

namespace chorus {

HostIndices::HostIndices(const NodeView& node, int input, int64_t limit)
    : op_(node.op.data(), node.op.size()), input_(input), type_(node.input(input)), limit_(limit) {
  const AttributeValue* const ignored = FindAttribute(node.attributes, "ignore_index");
  if (ignored != nullptr) ignored_ = absl::get<int64_t>(*ignored);
}

absl::Status HostIndices::OutOfRange(int64_t i, int64_t index) const {
  return Refusal(i, absl::StrCat(index));
}

absl::Status HostIndices::OutOfRange(int64_t i) const {
  return Refusal(i, "an integer out of range");
}

absl::Status HostIndices::Refusal(int64_t i, absl::string_view text) const {
  std::vector<int64_t> location;
  for (size_t d = type_.dims.size(); d-- > 0;) {
    location.push_back(i % type_.dims[d].size);
    i /= type_.dims[d].size;
  }
  std::reverse(location.begin(), location.end());
  const std::string range = limit_ == 0 ? "none, for there is nothing to choose from"
                                        : absl::StrCat("from 0 to ", limit_ - 1);
  Error error(Reason::kBadType);
  error.op = op_;
  error.expected = absl::StrCat(
      range, ignored_.has_value() ? absl::StrCat(", or ", *ignored_, ", which is ignored") : "");
  error.got = std::string(text);
  error.message =
      absl::StrCat(op_, ": input ", input_, ", ", type_.ToString(), ", holds ", text, " at [",
                   absl::StrJoin(location, ","), "], expected ", error.expected);
  return ToStatus(error);
}

}  // namespace chorus
