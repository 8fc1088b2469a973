#include "core/ops/all_gather/all_gather.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace {

absl::StatusOr<std::vector<TensorType>> InferAllGather(const NodeView& node) {
  return std::vector<TensorType>(node.group_size, node.input(0));
}

absl::StatusOr<InputGradients> AllGatherGradient(GradientContext& c) {
  std::vector<ValueIndex> grads;
  for (int i = 0; i < c.num_outputs(); ++i) {
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.GradOrZeros(i));
    grads.push_back(g);
  }
  CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> result, c.EmitGradientCollective(grads));
  return InputGradients{result[0]};
}

absl::StatusOr<std::vector<TensorType>> InferReduceScatter(const NodeView& node) {
  if (node.num_inputs() != node.group_size) {
    return ShapeError(node, absl::StrCat("one input for each of ", node.group_size, " members"),
                      absl::StrCat(node.num_inputs()));
  }
  for (int i = 1; i < node.num_inputs(); ++i) {
    if (node.input(i) != node.input(0)) {
      return ShapeError(node, absl::StrCat("inputs of one type, ", node.input(0).ToString()),
                        absl::StrCat(node.input(i).ToString(), " as input ", i));
    }
  }
  return std::vector<TensorType>{node.input(0)};
}

absl::StatusOr<InputGradients> ReduceScatterGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.GradOrZeros(0));
  CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> result, c.EmitGradientCollective({g}));
  return InputGradients(result.begin(), result.end());
}

const OpDef* MakeAllGather() {
  auto* def = new OpDef;
  def->name = "all_gather";
  def->effect = Effect::kCollective;
  def->kind = CollectiveKind::kAllGather;
  def->doc = "Every member's input, as a list, on every member.";
  def->min_inputs = def->max_inputs = 1;
  def->infer_types = InferAllGather;
  def->gradient = AllGatherGradient;
  def->alias = OutputAlias::kMember;
  def->input_use = InputUse::kCopySource;
  def->equal_results = true;
  return def;
}

const OpDef* MakeReduceScatter() {
  auto* def = new OpDef;
  def->name = "reduce_scatter";
  def->effect = Effect::kCollective;
  def->kind = CollectiveKind::kReduceScatter;
  def->doc = "Member r gets the reduction of all members' input r.";
  def->min_inputs = 1;
  def->max_inputs = -1;
  def->infer_types = InferReduceScatter;
  def->gradient = ReduceScatterGradient;
  def->input_use = InputUse::kReductionOperand;
  return def;
}

}  // namespace

absl::Span<const OpDef* const> AllGatherOps() {
  static const auto* const ops =
      new std::vector<const OpDef*>{MakeAllGather(), MakeReduceScatter()};
  return *ops;
}

}  // namespace chorus
