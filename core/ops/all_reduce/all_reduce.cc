#include "core/ops/all_reduce/all_reduce.h"

#include <vector>

#include "core/base/error.h"
#include "core/ops/reduction/reduction.h"

namespace chorus {
namespace {

absl::StatusOr<std::vector<TensorType>> InferAllReduce(const NodeView& node) {
  return std::vector<TensorType>{node.input(0)};
}

// The sum over all members of the result's gradient. A sum of halves goes on in f32: what is made
// of it may have room where it has not, and is rounded once.
absl::StatusOr<ValueIndex> WideGradOrZeros(GradientContext& c, int output) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.GradOrZeros(output));
  return c.EmitWide(g);
}

// The sum of the result's gradients times the other members' factors, and the sum of what each
// member has for this one's factor.
absl::StatusOr<InputGradients> ProductGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, WideGradOrZeros(c, 0));
  CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> sum,
                          c.EmitGradientCollective("all_reduce", {g}, {}, {}, Reduction::kSum,
                                                   CollectiveKind::kAllReduce));
  std::vector<ValueIndex> for_factors;
  ValueIndex zeros = -1;
  for (int i = c.num_visible(); i < c.num_outputs(); ++i) {
    ValueIndex of_factor = zeros;
    if (c.grad(i).has_value() || zeros < 0) {
      CHORUS_ASSIGN_OR_RETURN(of_factor, WideGradOrZeros(c, i));
    }
    if (!c.grad(i).has_value()) zeros = of_factor;
    for_factors.push_back(of_factor);
  }
  CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> factor_gradient,
                          c.EmitGradientCollective("reduce_scatter", for_factors));
  if (!c.needs(0)) return InputGradients(1);
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex product,
                          ProductOfOthers(&c, c.collective().rank.value(), sum[0]));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex both, c.Emit("add", {product, factor_gradient[0]}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex result, c.EmitCast(both, c.input_type(0).dtype));
  return InputGradients{result};
}

absl::StatusOr<InputGradients> AllReduceGradient(GradientContext& c) {
  const Reduction reduction = c.collective().reduction;
  if (reduction == Reduction::kProduct) return ProductGradient(c);
  if (reduction == Reduction::kSum || reduction == Reduction::kAvg) {
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.GradOrZeros(0));
    CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> result,
                            c.EmitGradientCollective("all_reduce", {g}, {}, {}, reduction));
    return InputGradients{result[0]};
  }
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, WideGradOrZeros(c, 0));
  CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> sum,
                          c.EmitGradientCollective("all_reduce", {g}));
  return GradientsFromSum(&c, sum);
}

}  // namespace

absl::Span<const OpDef* const> AllReduceOps() {
  static const auto* const ops = [] {
    auto* def = new OpDef;
    def->name = "all_reduce";
    def->effect = Effect::kCollective;
    def->kind = CollectiveKind::kAllReduce;
    def->doc = "The reduction of all members' inputs, on every member.";
    def->min_inputs = def->max_inputs = 1;
    def->infer_types = InferAllReduce;
    def->gradient = AllReduceGradient;
    def->gradient_saves = SaveForCollective;
    def->input_use = InputUse::kReductionOperand;
    return new std::vector<const OpDef*>{def};
  }();
  return *ops;
}

}  // namespace chorus
