#include "core/ops/broadcast/broadcast.h"

#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/ops/pieces.h"
#include "core/ops/reduction/reduction.h"

namespace chorus {
namespace {

absl::StatusOr<std::vector<TensorType>> InferBroadcast(const NodeView& node) {
  if (!IsRoot(node)) {
    CHORUS_ASSIGN_OR_RETURN(TensorType type, TypeOffRoot(node));
    return std::vector<TensorType>{std::move(type)};
  }
  CHORUS_RETURN_IF_ERROR(CheckOnRoot(node, 1));
  return std::vector<TensorType>{node.input(0)};
}

absl::StatusOr<InputGradients> BroadcastGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.GradOrZeros(0));
  CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> result,
                          c.EmitGradientCollective("reduce", {g}));
  return InputGradients(result.begin(), result.end());
}

absl::StatusOr<std::vector<TensorType>> InferReduce(const NodeView& node) {
  if (!IsRoot(node)) return std::vector<TensorType>();
  return std::vector<TensorType>{node.input(0)};
}

absl::StatusOr<InputGradients> ReduceGradient(GradientContext& c) {
  const bool product = c.collective().reduction == Reduction::kProduct;
  std::vector<ValueIndex> grads;
  Attributes attributes;
  if (!c.is_root()) {
    attributes = TypeAttributes(c.input_type(0));
  } else if (product) {
    CHORUS_ASSIGN_OR_RETURN(grads, FactorGradients(&c));
  } else {
    CHORUS_ASSIGN_OR_RETURN(grads, VisibleGradients(&c));
  }
  CHORUS_ASSIGN_OR_RETURN(
      const std::vector<ValueIndex> result,
      c.EmitGradientCollective(product ? "scatter" : "broadcast", grads, attributes));
  return GradientsFromSum(&c, result);
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
  def->gradient_saves = SaveForCollective;
  def->input_use = InputUse::kReductionOperand;
  return def;
}

}  // namespace

absl::Span<const OpDef* const> BroadcastOps() {
  static const auto* const ops = new std::vector<const OpDef*>{MakeBroadcast(), MakeReduce()};
  return *ops;
}

}  // namespace chorus
