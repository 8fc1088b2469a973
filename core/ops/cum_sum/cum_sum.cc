#include "core/ops/cum_sum/cum_sum.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/checked_attributes.h"

namespace chorus {
namespace {

absl::StatusOr<std::vector<TensorType>> InferCumSum(const NodeView& node) {
  CHORUS_RETURN_IF_ERROR(CheckedAxis(node).status());
  CHORUS_RETURN_IF_ERROR(CheckedFlag(node, "reverse").status());
  return std::vector<TensorType>{node.input(0)};
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
