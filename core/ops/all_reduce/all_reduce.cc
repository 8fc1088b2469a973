#include "core/ops/all_reduce/all_reduce.h"

#include <vector>

#include "core/base/error.h"
#include "core/ops/reduction/reduction.h"

namespace chorus {
namespace {

absl::StatusOr<std::vector<TensorType>> InferAllReduce(const NodeView& node) {
  return std::vector<TensorType>{node.input(0)};
}

absl::StatusOr<InputGradients> AllReduceGradient(GradientContext& c) {
  const Reduction reduction = c.collective().reduction;
  if (reduction == Reduction::kProduct) {
    // Member k's gradient is the sum of what each member has for factor k.
    CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> factors, FactorGradients(&c));
    CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> result,
                            c.EmitGradientCollective("reduce_scatter", factors));
    return InputGradients{result[0]};
  }
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.GradOrZeros(0));
  const bool average = reduction == Reduction::kAvg;
  CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> result,
                          c.EmitGradientCollective("all_reduce", {g}, {}, {},
                                                   average ? Reduction::kAvg : Reduction::kSum));
  if (average) return InputGradients{result[0]};
  return GradientsFromSum(&c, result);
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
    def->gradient_saves = SaveForReduction;
    def->input_use = InputUse::kReductionOperand;
    def->equal_results = true;
    return new std::vector<const OpDef*>{def};
  }();
  return *ops;
}

}  // namespace chorus
