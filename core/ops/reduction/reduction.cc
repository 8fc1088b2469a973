#include "core/ops/reduction/reduction.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace {

using Types = absl::StatusOr<std::vector<TensorType>>;
using Gradients = absl::StatusOr<InputGradients>;

absl::Status CheckFloating(const NodeView& node) {
  if (IsFloating(node.input(0).dtype)) return absl::OkStatus();
  return ShapeError(node, "floating point", node.input(0).ToString());
}

absl::Status CheckInput(const NodeView& node, int i, const TensorType& expected) {
  if (node.input(i) == expected) return absl::OkStatus();
  return ShapeError(node, absl::StrCat(expected.ToString(), " as input ", i),
                    node.input(i).ToString());
}

Types InferShare(const NodeView& node) {
  CHORUS_RETURN_IF_ERROR(CheckFloating(node));
  CHORUS_RETURN_IF_ERROR(CheckInput(node, 1, TensorType(DType::kF32, node.input(0).dims)));
  return std::vector<TensorType>{node.input(0)};
}

Types InferScale(const NodeView& node) {
  CHORUS_RETURN_IF_ERROR(CheckFloating(node));
  CHORUS_RETURN_IF_ERROR(CheckInput(node, 1, TensorType(FactorType(node.input(0).dtype), {})));
  return std::vector<TensorType>{node.input(0)};
}

Types InferProduct(const NodeView& node) {
  CHORUS_RETURN_IF_ERROR(CheckFloating(node));
  for (int i = 1; i < node.num_inputs(); ++i) {
    CHORUS_RETURN_IF_ERROR(CheckInput(node, i, node.input(0)));
  }
  return std::vector<TensorType>{node.input(0)};
}

Types InferHolds(const NodeView& node) {
  CHORUS_ASSIGN_OR_RETURN(TensorType type, StretchedType(node));
  CHORUS_RETURN_IF_ERROR(CheckFloating(node));
  type.dtype = DType::kF32;
  return std::vector<TensorType>{std::move(type)};
}

Gradients NoGradient(GradientContext& c) { return InputGradients(c.num_inputs()); }

// share and scale: the same again.
Gradients LinearGradient(GradientContext& c) {
  InputGradients result(2);
  if (c.needs(0)) {
    CHORUS_ASSIGN_OR_RETURN(result[0], c.Emit(c.node().op, {*c.grad(0), c.input(1)}));
  }
  return result;
}

// The product of all but one of `factors`, and `last`.
absl::StatusOr<ValueIndex> ProductOfOthers(GradientContext* c,
                                           const std::vector<ValueIndex>& factors, size_t but,
                                           ValueIndex last) {
  std::vector<ValueIndex> others = factors;
  others.erase(others.begin() + static_cast<std::ptrdiff_t>(but));
  if (others.empty()) return last;
  others.push_back(last);
  return c->Emit("product", std::move(others));
}

Gradients ProductGradient(GradientContext& c) {
  InputGradients result(c.num_inputs());
  for (int i = 0; i < c.num_inputs(); ++i) {
    if (!c.needs(i)) continue;
    CHORUS_ASSIGN_OR_RETURN(result[i], ProductOfOthers(&c, c.node().inputs, i, *c.grad(0)));
  }
  return result;
}

Saved SaveSecondInput(const NodeSpec&, int, int num_outputs) { return {1, num_outputs}; }

const OpDef* Make(absl::string_view name, absl::string_view doc, int max_inputs,
                  decltype(OpDef::infer_types) infer, decltype(OpDef::gradient) gradient,
                  decltype(OpDef::gradient_saves) gradient_saves) {
  auto* def = new OpDef;
  def->name = name;
  def->doc = doc;
  def->min_inputs = max_inputs < 0 ? 1 : max_inputs;
  def->max_inputs = max_inputs;
  def->infer_types = infer;
  def->gradient = gradient;
  def->gradient_saves = gradient_saves;
  def->elementwise = true;
  return def;
}

}  // namespace

absl::Span<const OpDef* const> ReductionOps() {
  static const auto* const ops = new std::vector<const OpDef*>{
      Make("holds", "1 where x == y or both are NaN, else 0.", 2, InferHolds, NoGradient, nullptr),
      Make("product", "The product of the inputs.", -1, InferProduct, ProductGradient, SaveInputs),
      Make("scale", "x * factor, a number.", 2, InferScale, LinearGradient, SaveSecondInput),
      Make("share", "holders == 0 ? 0 : x / holders.", 2, InferShare, LinearGradient,
           SaveSecondInput),
  };
  return *ops;
}

absl::StatusOr<InputGradients> GradientsFromSum(GradientContext* c,
                                                absl::Span<const ValueIndex> grads) {
  const Reduction reduction = c->collective().reduction;
  InputGradients result(c->num_inputs());
  ValueIndex factor = -1;
  if (reduction == Reduction::kPremulSum) factor = c->input(c->num_inputs() - 1);
  if (reduction == Reduction::kAvg) {
    const TensorType type(FactorType(c->input_type(0).dtype), {});
    CHORUS_ASSIGN_OR_RETURN(factor, c->EmitFill(type, 1.0 / c->group_size()));
  }
  for (int i = 0; i < c->num_pieces(); ++i) {
    if (!c->needs(i)) continue;
    if (factor >= 0) {
      CHORUS_ASSIGN_OR_RETURN(result[i], c->Emit("scale", {grads[i], factor}));
    } else if (reduction == Reduction::kMin || reduction == Reduction::kMax) {
      CHORUS_ASSIGN_OR_RETURN(result[i],
                              c->Emit("share", {grads[i], c->output(c->num_visible() + i)}));
    } else {
      result[i] = grads[i];
    }
    CHORUS_ASSIGN_OR_RETURN(result[i], c->EmitCast(*result[i], c->input_type(i).dtype));
  }
  return result;
}

// All members' factors, as numbers of that type.
absl::StatusOr<std::vector<ValueIndex>> FactorsAs(GradientContext* c, DType dtype) {
  std::vector<ValueIndex> factors;
  for (int i = c->num_visible(); i < c->num_outputs(); ++i) {
    CHORUS_ASSIGN_OR_RETURN(factors.emplace_back(), c->EmitCast(c->output(i), dtype));
  }
  return factors;
}

absl::StatusOr<ValueIndex> ProductOfOthers(GradientContext* c, int member, ValueIndex last) {
  CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> factors,
                          FactorsAs(c, c->TypeOf(last).dtype));
  return ProductOfOthers(c, factors, static_cast<size_t>(member), last);
}

absl::StatusOr<std::vector<ValueIndex>> FactorGradients(GradientContext* c) {
  const int visible = c->num_visible();
  std::vector<ValueIndex> grads;
  if (!c->grad(0).has_value()) {
    for (int output = visible; output < c->num_outputs(); ++output) {
      CHORUS_ASSIGN_OR_RETURN(grads.emplace_back(), c->GradOrZeros(output));
    }
    return grads;
  }
  // Where something is added to products of halves they are rounded behind that.
  bool is_added_to = false;
  for (int output = visible; output < c->num_outputs(); ++output) {
    is_added_to = is_added_to || c->grad(output).has_value();
  }
  ValueIndex of_result = *c->grad(0);
  if (is_added_to) {
    CHORUS_ASSIGN_OR_RETURN(of_result, c->EmitWide(of_result));
  }
  CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> factors,
                          FactorsAs(c, c->TypeOf(of_result).dtype));
  for (int output = visible; output < c->num_outputs(); ++output) {
    CHORUS_ASSIGN_OR_RETURN(
        ValueIndex g,
        ProductOfOthers(c, factors, static_cast<size_t>(output - visible), of_result));
    if (c->grad(output).has_value()) {
      CHORUS_ASSIGN_OR_RETURN(const ValueIndex added, c->EmitWide(*c->grad(output)));
      CHORUS_ASSIGN_OR_RETURN(g, c->Emit("add", {g, added}));
    }
    CHORUS_ASSIGN_OR_RETURN(grads.emplace_back(), c->EmitCast(g, c->output_type(output).dtype));
  }
  return grads;
}

}  // namespace chorus
