#include "core/ops/broadcast/broadcast.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace {

absl::StatusOr<std::vector<TensorType>> InferBroadcast(const NodeView& node) {
  const Collective& c = *node.collective;
  if (c.rank != c.root) {
    if (node.num_inputs() != 0) {
      return ShapeError(
          node,
          absl::StrCat("no input on rank ", c.rank.value(), ", as the root is ", c.root.value()),
          "one");
    }
    CHORUS_ASSIGN_OR_RETURN(TensorType type, TypeOfAttributes(node));
    return std::vector<TensorType>{type};
  }
  if (node.num_inputs() != 1) return ShapeError(node, "one input on the root", "none");
  if (!node.attributes.empty()) {
    return ShapeError(node, "no attributes on the root", "'dims' or 'dtype'");
  }
  return std::vector<TensorType>{node.input(0)};
}

absl::StatusOr<InputGradients> BroadcastGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.GradOrZeros(0));
  CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> result, c.EmitGradientCollective({g}));
  if (!c.is_root()) return InputGradients();
  return InputGradients{result[0]};
}

absl::StatusOr<std::vector<TensorType>> InferReduce(const NodeView& node) {
  if (node.collective->rank != node.collective->root) return std::vector<TensorType>();
  return std::vector<TensorType>{node.input(0)};
}

absl::StatusOr<InputGradients> ReduceGradient(GradientContext& c) {
  std::vector<ValueIndex> inputs;
  Attributes attributes;
  if (c.is_root()) {
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.GradOrZeros(0));
    inputs.push_back(g);
  } else {
    attributes = TypeAttributes(c.input_type(0));
  }
  CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> result,
                          c.EmitGradientCollective(inputs, attributes));
  return InputGradients{result[0]};
}

const OpDef* MakeBroadcast() {
  auto* def = new OpDef;
  def->name = "broadcast";
  def->effect = Effect::kCollective;
  def->kind = CollectiveKind::kBroadcast;
  def->doc = "The root's input, on every member.";
  def->attributes = {
      {"dims", AttributeSpec::Kind::kInts, false, "off the root: the shape of what comes"},
      {"dtype", AttributeSpec::Kind::kString, false, "off the root: the dtype of what comes"}};
  def->min_inputs = 0;
  def->max_inputs = 1;
  def->infer_types = InferBroadcast;
  def->gradient = BroadcastGradient;
  def->alias = OutputAlias::kMember;
  def->input_use = InputUse::kCopySource;
  def->equal_results = true;
  return def;
}

const OpDef* MakeReduce() {
  auto* def = new OpDef;
  def->name = "reduce";
  def->effect = Effect::kCollective;
  def->kind = CollectiveKind::kReduce;
  def->doc = "The reduction of all members' inputs, on the root alone.";
  def->min_inputs = def->max_inputs = 1;
  def->infer_types = InferReduce;
  def->gradient = ReduceGradient;
  def->input_use = InputUse::kReductionOperand;
  return def;
}

}  // namespace

absl::Span<const OpDef* const> BroadcastOps() {
  static const auto* const ops = new std::vector<const OpDef*>{MakeBroadcast(), MakeReduce()};
  return *ops;
}

}  // namespace chorus
