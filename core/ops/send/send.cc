#include "core/ops/send/send.h"

#include <vector>

#include "core/base/error.h"

namespace chorus {
namespace {

absl::StatusOr<std::vector<TensorType>> InferSend(const NodeView&) {
  return std::vector<TensorType>();
}

absl::StatusOr<InputGradients> SendGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> result,
                          c.EmitGradientCollective("recv", {}, TypeAttributes(c.input_type(0))));
  return InputGradients{result[0]};
}

absl::StatusOr<std::vector<TensorType>> InferRecv(const NodeView& node) {
  CHORUS_ASSIGN_OR_RETURN(TensorType type, TypeOfAttributes(node));
  return std::vector<TensorType>{type};
}

absl::StatusOr<InputGradients> RecvGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.GradOrZeros(0));
  CHORUS_RETURN_IF_ERROR(c.EmitGradientCollective("send", {g}).status());
  return InputGradients();
}

const OpDef* MakeSend() {
  auto* def = new OpDef;
  def->name = "send";
  def->effect = Effect::kCollective;
  def->kind = CollectiveKind::kSend;
  def->doc = "To one member.";
  def->min_inputs = def->max_inputs = 1;
  def->infer_types = InferSend;
  def->gradient = SendGradient;
  def->input_use = InputUse::kCopySource;
  return def;
}

const OpDef* MakeRecv() {
  auto* def = new OpDef;
  def->name = "recv";
  def->effect = Effect::kCollective;
  def->kind = CollectiveKind::kRecv;
  def->doc = "From one member.";
  def->attributes = {{"dims", AttributeSpec::Kind::kInts, true, "the shape of what comes"},
                     {"dtype", AttributeSpec::Kind::kString, true, "the dtype of what comes"}};
  def->infer_types = InferRecv;
  def->gradient = RecvGradient;
  def->alias = OutputAlias::kMember;
  return def;
}

}  // namespace

absl::Span<const OpDef* const> SendOps() {
  static const auto* const ops = new std::vector<const OpDef*>{MakeRecv(), MakeSend()};
  return *ops;
}

}  // namespace chorus
