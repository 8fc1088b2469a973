#include "core/ops/sort/sort.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace {

absl::StatusOr<std::vector<TensorType>> InferArgSort(const NodeView& node) {
  TensorType type = node.input(0);
  const int64_t axis = IntAttribute(node.attributes, "axis");
  if (axis < 0 || axis >= static_cast<int64_t>(type.dims.size())) {
    return ShapeError(
        node,
        absl::StrCat("an axis within the ", type.dims.size(), " dimensions of ", type.ToString()),
        absl::StrCat(axis));
  }
  const int64_t descending = IntAttribute(node.attributes, "descending");
  if (descending != 0 && descending != 1) {
    return ShapeError(node, "0 or 1 as 'descending'", absl::StrCat(descending));
  }
  if (FindAttribute(node.attributes, "k") != nullptr) {
    const int64_t k = IntAttribute(node.attributes, "k");
    if (k < 0 || k > type.dims[axis].size) {
      return ShapeError(node,
                        absl::StrCat("'k' from 0 to ", type.dims[axis].size,
                                     ", the elements along axis ", axis, " of ", type.ToString()),
                        absl::StrCat(k));
    }
    type.dims[axis] = Dim(k);
  }
  type.dtype = DType::kI64;
  return std::vector<TensorType>{type};
}

const OpDef* MakeArgSort() {
  auto* def = new OpDef;
  def->name = "arg_sort";
  def->doc = "The indices of the elements along an axis, in the order of the elements.";
  def->attributes = {
      {"axis", AttributeSpec::Kind::kInt, true, "a dimension's number"},
      {"descending", AttributeSpec::Kind::kInt, false, "1: from the largest on"},
      {"k", AttributeSpec::Kind::kInt, false, "how many; absent: all"},
  };
  def->min_inputs = def->max_inputs = 1;
  def->infer_types = InferArgSort;
  return def;
}

}  // namespace

absl::Span<const OpDef* const> SortOps() {
  static const auto* const ops = new std::vector<const OpDef*>{MakeArgSort()};
  return *ops;
}

}  // namespace chorus
