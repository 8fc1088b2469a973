#include "core/ops/softmax/softmax.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace {

absl::StatusOr<std::vector<TensorType>> InferSoftmax(const NodeView& node) {
  const TensorType& x = node.input(0);
  const int64_t axis = IntAttribute(node.attributes, "axis");
  if (axis < 0 || axis >= static_cast<int64_t>(x.dims.size())) {
    return ShapeError(
        node, absl::StrCat("an axis within the ", x.dims.size(), " dimensions of ", x.ToString()),
        absl::StrCat(axis));
  }
  return std::vector<TensorType>{x};
}

// The sum of `x` along the axis, as often as there are elements.
absl::StatusOr<ValueIndex> SumAndExpand(GradientContext* c, ValueIndex x) {
  const int64_t axis = IntAttribute(c->node().attributes, "axis");
  CHORUS_ASSIGN_OR_RETURN(
      const ValueIndex sum,
      c->Emit("sum", {x}, {{"axes", std::vector<int64_t>{axis}}, {"keep_dims", int64_t{1}}}));
  return c->Emit("expand", {sum}, {{"dims", c->input_type(0).sizes()}});
}

absl::StatusOr<InputGradients> SoftmaxGradient(GradientContext& c) {
  const ValueIndex y = c.output(0);
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex product, c.Emit("mul", {*c.grad(0), y}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex sum, SumAndExpand(&c, product));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex difference, c.Emit("sub", {*c.grad(0), sum}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("mul", {y, difference}));
  return InputGradients{g};
}

absl::StatusOr<InputGradients> LogSoftmaxGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex sum, SumAndExpand(&c, *c.grad(0)));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex softmax,
                          c.Emit("softmax", {c.input(0)}, c.node().attributes));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex product, c.Emit("mul", {softmax, sum}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("sub", {*c.grad(0), product}));
  return InputGradients{g};
}

Saved SaveOutput(const NodeSpec&, int num_inputs, int) { return {num_inputs, 0}; }

const OpDef* Make(absl::string_view name, absl::string_view doc, decltype(OpDef::gradient) gradient,
                  decltype(OpDef::gradient_saves) gradient_saves) {
  auto* def = new OpDef;
  def->name = name;
  def->doc = doc;
  def->attributes = {{"axis", AttributeSpec::Kind::kInt, true, "a dimension's number"}};
  def->min_inputs = def->max_inputs = 1;
  def->dtypes = kFloatingDTypes;
  def->infer_types = InferSoftmax;
  def->gradient = gradient;
  def->gradient_saves = gradient_saves;
  return def;
}

}  // namespace

absl::Span<const OpDef* const> SoftmaxOps() {
  static const auto* const ops = new std::vector<const OpDef*>{
      Make("log_softmax", "The logarithm of softmax.", LogSoftmaxGradient, SaveInputs),
      Make("softmax", "exp(x), divided by its sum along an axis.", SoftmaxGradient, SaveOutput),
  };
  return *ops;
}

}  // namespace chorus
