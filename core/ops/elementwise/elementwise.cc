#include "core/ops/elementwise/elementwise.h"

#include <utility>
#include <vector>

#include "core/base/error.h"

namespace chorus {
namespace {

using Types = absl::StatusOr<std::vector<TensorType>>;
using Gradients = absl::StatusOr<InputGradients>;

Types SameTypes(const NodeView& node) {
  CHORUS_ASSIGN_OR_RETURN(TensorType type, StretchedType(node));
  return std::vector<TensorType>{std::move(type)};
}

Types SameFloatingTypes(const NodeView& node) {
  if (!IsFloating(node.input(0).dtype)) {
    return ShapeError(node, "floating point", node.input(0).ToString());
  }
  return SameTypes(node);
}

Gradients AddGradient(GradientContext& c) {
  InputGradients result(2);
  for (int i = 0; i < 2; ++i) {
    if (!c.needs(i)) continue;
    CHORUS_ASSIGN_OR_RETURN(result[i], c.SumToInput(*c.grad(0), i));
  }
  return result;
}

Gradients SubGradient(GradientContext& c) {
  InputGradients result(2);
  if (c.needs(0)) {
    CHORUS_ASSIGN_OR_RETURN(result[0], c.SumToInput(*c.grad(0), 0));
  }
  if (c.needs(1)) {
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.SumToInput(*c.grad(0), 1));
    CHORUS_ASSIGN_OR_RETURN(result[1], c.Emit("neg", {g}));
  }
  return result;
}

Gradients MulGradient(GradientContext& c) {
  InputGradients result(2);
  for (int i = 0; i < 2; ++i) {
    if (!c.needs(i)) continue;
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("mul", {*c.grad(0), c.input(1 - i)}));
    CHORUS_ASSIGN_OR_RETURN(result[i], c.SumToInput(g, i));
  }
  return result;
}

Gradients NegGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("neg", {*c.grad(0)}));
  return InputGradients{g};
}

Gradients ReluGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("relu_grad", {c.input(0), *c.grad(0)}));
  return InputGradients{g};
}

Gradients ReluGradGradient(GradientContext& c) {
  InputGradients result(2);
  if (c.needs(1)) {
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("relu_grad", {c.input(0), *c.grad(0)}));
    CHORUS_ASSIGN_OR_RETURN(result[1], c.SumToInput(g, 1));
  }
  return result;
}

Gradients SinGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex cos, c.Emit("cos", {c.input(0)}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("mul", {*c.grad(0), cos}));
  return InputGradients{g};
}

Gradients CosGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex sin, c.Emit("sin", {c.input(0)}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex product, c.Emit("mul", {*c.grad(0), sin}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("neg", {product}));
  return InputGradients{g};
}

const OpDef* Make(absl::string_view name, int inputs, absl::string_view doc,
                  decltype(OpDef::infer_types) infer, decltype(OpDef::gradient) gradient,
                  decltype(OpDef::gradient_saves) gradient_saves = nullptr) {
  auto* def = new OpDef;
  def->name = name;
  def->doc = doc;
  def->min_inputs = def->max_inputs = inputs;
  def->dtypes = kNumberDTypes;
  def->infer_types = infer;
  def->gradient = gradient;
  def->gradient_saves = gradient_saves;
  def->elementwise = true;
  return def;
}

}  // namespace

absl::Span<const OpDef* const> ElementwiseOps() {
  static const auto* const ops = new std::vector<const OpDef*>{
      Make("add", 2, "a + b", SameTypes, AddGradient),
      Make("cos", 1, "Cosine of radians.", SameFloatingTypes, CosGradient, SaveInputs),
      Make("mul", 2, "a * b", SameTypes, MulGradient, SaveInputs),
      Make("neg", 1, "-a", SameTypes, NegGradient),
      Make("relu", 1, "x > 0 ? x : 0", SameTypes, ReluGradient, SaveInputs),
      Make("relu_grad", 2, "x > 0 ? g : 0", SameFloatingTypes, ReluGradGradient, SaveInputs),
      Make("sin", 1, "Sine of radians.", SameFloatingTypes, SinGradient, SaveInputs),
      Make("sub", 2, "a - b", SameTypes, SubGradient),
  };
  return *ops;
}

}  // namespace chorus
