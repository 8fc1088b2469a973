#include "core/ops/softmax/softmax.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/checked_attributes.h"

namespace chorus {
namespace {

absl::StatusOr<std::vector<TensorType>> InferSoftmax(const NodeView& node) {
  CHORUS_RETURN_IF_ERROR(CheckedAxis(node).status());
  return std::vector<TensorType>{node.input(0)};
}

absl::StatusOr<std::vector<TensorType>> InferCenter(const NodeView& node) {
  if (node.input(1) != node.input(0)) {
    return ShapeError(node, absl::StrCat(node.input(0).ToString(), " as input 1"),
                      node.input(1).ToString());
  }
  return InferSoftmax(node);
}

absl::StatusOr<ValueIndex> EmitAlong(GradientContext* c, absl::string_view op,
                                     std::vector<ValueIndex> inputs) {
  return c->Emit(op, std::move(inputs), c->node().attributes);
}

absl::StatusOr<InputGradients> SoftmaxGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g,
                          EmitAlong(&c, "softmax_grad", {c.output(0), *c.grad(0)}));
  return InputGradients{g};
}

absl::StatusOr<InputGradients> SoftmaxGradGradient(GradientContext& c) {
  const ValueIndex y = c.input(0);
  const ValueIndex h = *c.grad(0);
  InputGradients result(2);
  if (c.needs(0)) {
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex d, EmitAlong(&c, "center", {y, h}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex centered, EmitAlong(&c, "center", {y, c.input(1)}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex direct, c.Emit("mul", {d, centered}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex weights, c.Emit("mul", {d, y}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex others,
                            EmitAlong(&c, "center", {weights, c.input(1)}));
    CHORUS_ASSIGN_OR_RETURN(result[0], c.Emit("sub", {direct, others}));
  }
  if (c.needs(1)) {
    CHORUS_ASSIGN_OR_RETURN(result[1], EmitAlong(&c, "softmax_grad", {y, h}));
  }
  return result;
}

// Of half types in f32: weights that are rounded one by one have another sum than 1.
absl::StatusOr<InputGradients> LogSoftmaxGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex x, c.EmitWide(c.input(0)));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex of_y, c.EmitWide(*c.grad(0)));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex softmax, EmitAlong(&c, "softmax", {x}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex of_x, EmitAlong(&c, "center_grad", {softmax, of_y}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.EmitCast(of_x, c.input_type(0).dtype));
  return InputGradients{g};
}

// Of both: -center(a, b) for the weights, `adjoint` of the weights and h for the other input.
absl::StatusOr<InputGradients> CenterGradients(GradientContext* c, ValueIndex a, ValueIndex b,
                                               absl::string_view adjoint) {
  InputGradients result(2);
  if (c->needs(0)) {
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex centered, EmitAlong(c, "center", {a, b}));
    CHORUS_ASSIGN_OR_RETURN(result[0], c->Emit("neg", {centered}));
  }
  if (c->needs(1)) {
    CHORUS_ASSIGN_OR_RETURN(result[1], EmitAlong(c, adjoint, {c->input(0), *c->grad(0)}));
  }
  return result;
}

absl::StatusOr<InputGradients> CenterGradient(GradientContext& c) {
  return CenterGradients(&c, *c.grad(0), c.input(1), "center_grad");
}

absl::StatusOr<InputGradients> CenterGradGradient(GradientContext& c) {
  return CenterGradients(&c, c.input(1), *c.grad(0), "center");
}

Saved SaveOutput(const NodeSpec&, int num_inputs, int) { return {num_inputs, 0}; }

const OpDef* Make(absl::string_view name, int inputs, absl::string_view doc,
                  decltype(OpDef::infer_types) infer, decltype(OpDef::gradient) gradient,
                  decltype(OpDef::gradient_saves) gradient_saves) {
  auto* def = new OpDef;
  def->name = name;
  def->doc = doc;
  def->attributes = {{"axis", AttributeSpec::Kind::kInt, true, "a dimension's number"}};
  def->min_inputs = def->max_inputs = inputs;
  def->dtypes = kFloatingDTypes;
  def->infer_types = infer;
  def->gradient = gradient;
  def->gradient_saves = gradient_saves;
  return def;
}

}  // namespace

absl::Span<const OpDef* const> SoftmaxOps() {
  static const auto* const ops = new std::vector<const OpDef*>{
      Make("center", 2, "x less its mean along an axis, weighted by w.", InferCenter,
           CenterGradient, SaveInputs),
      Make("center_grad", 2, "The adjoint of center: g sum(w) - w sum(g).", InferCenter,
           CenterGradGradient, SaveInputs),
      Make("log_softmax", 1, "The logarithm of softmax.", InferSoftmax, LogSoftmaxGradient,
           SaveInputs),
      Make("softmax", 1, "exp(x), divided by its sum along an axis.", InferSoftmax, SoftmaxGradient,
           SaveOutput),
      Make("softmax_grad", 2, "g times the derivative of a softmax that is y.", InferCenter,
           SoftmaxGradGradient, SaveInputs),
  };
  return *ops;
}

}  // namespace chorus
