#include "core/ops/fill/fill.h"

#include <vector>

#include "core/base/error.h"

namespace chorus {
namespace {

absl::StatusOr<std::vector<TensorType>> InferFill(const NodeView& node) {
  CHORUS_ASSIGN_OR_RETURN(TensorType type, TypeOfAttributes(node));
  const bool is_double = absl::holds_alternative<double>(*FindAttribute(node.attributes, "value"));
  if (is_double != IsFloating(type.dtype)) {
    return ShapeError(node, is_double ? "an integer as 'value'" : "a double as 'value'",
                      is_double ? "a double" : "an integer");
  }
  return std::vector<TensorType>{type};
}

absl::StatusOr<InputGradients> FillGradient(GradientContext&) { return InputGradients(); }

}  // namespace

absl::Span<const OpDef* const> FillOps() {
  static const auto* const ops = [] {
    auto* def = new OpDef;
    def->name = "fill";
    def->doc = "A tensor of one value.";
    def->attributes = {{"dims", AttributeSpec::Kind::kInts, true, "the shape"},
                       {"dtype", AttributeSpec::Kind::kString, true, "the dtype's name"},
                       {"value", AttributeSpec::Kind::kNumber, true, "every element"}};
    def->infer_types = InferFill;
    def->gradient = FillGradient;
    return new std::vector<const OpDef*>{def};
  }();
  return *ops;
}

}  // namespace chorus
