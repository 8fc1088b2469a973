#include "core/ops/checked_attributes.h"

#include <cstdint>

#include "absl/strings/str_cat.h"

namespace chorus {

absl::StatusOr<size_t> CheckedAxis(const NodeView& node) {
  const int64_t axis = IntAttribute(node.attributes, "axis");
  const TensorType& x = node.input(0);
  if (axis >= 0 && axis < static_cast<int64_t>(x.dims.size())) return static_cast<size_t>(axis);
  return ShapeError(
      node, absl::StrCat("an axis within the ", x.dims.size(), " dimensions of ", x.ToString()),
      absl::StrCat(axis));
}

absl::StatusOr<bool> CheckedFlag(const NodeView& node, absl::string_view name, bool otherwise) {
  const int64_t flag = IntAttribute(node.attributes, name, otherwise ? 1 : 0);
  if (flag == 0 || flag == 1) return flag == 1;
  return ShapeError(node, absl::StrCat("0 or 1 as '", name, "'"), absl::StrCat(flag));
}

}  // namespace chorus
