#include "core/ops/all_reduce/all_reduce.h"

#include <vector>

#include "core/base/error.h"

namespace chorus {
namespace {

absl::StatusOr<std::vector<TensorType>> InferAllReduce(const NodeView& node) {
  return std::vector<TensorType>{node.input(0)};
}

absl::StatusOr<InputGradients> AllReduceGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.GradOrZeros(0));
  CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> result, c.EmitGradientCollective({g}));
  return InputGradients{result[0]};
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
    def->input_use = InputUse::kReductionOperand;
    def->equal_results = true;
    return new std::vector<const OpDef*>{def};
  }();
  return *ops;
}

}  // namespace chorus
