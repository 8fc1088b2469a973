#include "core/ops/cum_sum/cum_sum.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace {

absl::StatusOr<std::vector<TensorType>> InferCumSum(const NodeView& node) {
  const TensorType& x = node.input(0);
  const int64_t axis = IntAttribute(node.attributes, "axis");
  if (axis < 0 || axis >= static_cast<int64_t>(x.dims.size())) {
    return ShapeError(
        node, absl::StrCat("an axis within the ", x.dims.size(), " dimensions of ", x.ToString()),
        absl::StrCat(axis));
  }
  const int64_t reverse = IntAttribute(node.attributes, "reverse");
  if (reverse != 0 && reverse != 1) {
    return ShapeError(node, "0 or 1 as 'reverse'", absl::StrCat(reverse));
  }
  return std::vector<TensorType>{x};
}

absl::StatusOr<InputGradients> CumSumGradient(GradientContext& c) {
  Attributes attributes = {{"axis", IntAttribute(c.node().attributes, "axis")}};
  if (IntAttribute(c.node().attributes, "reverse") == 0) {
    attributes.push_back({"reverse", int64_t{1}});
  }
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g,
                          c.Emit("cum_sum", {*c.grad(0)}, std::move(attributes)));
  return InputGradients{g};
}

const OpDef* MakeCumSum() {
  auto* def = new OpDef;
  def->name = "cum_sum";
  def->doc = "The sum of the elements up to each one, along an axis.";
  def->attributes = {
      {"axis", AttributeSpec::Kind::kInt, true, "a dimension's number"},
      {"reverse", AttributeSpec::Kind::kInt, false, "1: from the last element on"},
  };
  def->min_inputs = def->max_inputs = 1;
  def->dtypes = kNumberDTypes;
  def->infer_types = InferCumSum;
  def->gradient = CumSumGradient;
  return def;
}

}  // namespace

absl::Span<const OpDef* const> CumSumOps() {
  static const auto* const ops = new std::vector<const OpDef*>{MakeCumSum()};
  return *ops;
}

}  // namespace chorus
