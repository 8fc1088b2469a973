#include "core/ops/sort/sort.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/checked_attributes.h"

namespace chorus {
namespace {

absl::StatusOr<std::vector<TensorType>> InferArgSort(const NodeView& node) {
  TensorType type = node.input(0);
  CHORUS_ASSIGN_OR_RETURN(const size_t axis, CheckedAxis(node));
  CHORUS_RETURN_IF_ERROR(CheckedFlag(node, "descending").status());
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
