#include "core/ops/gradient.h"

#include <string>
#include <utility>

#include "core/base/error.h"

namespace chorus {

absl::StatusOr<ValueIndex> GradientContext::GradOrZeros(int i) {
  if (grads_[i].has_value()) return *grads_[i];
  return EmitFill(output_type(i), 0);
}

absl::StatusOr<ValueIndex> GradientContext::Emit(absl::string_view op,
                                                 std::vector<ValueIndex> inputs,
                                                 Attributes attributes) {
  return EmitOn(node().device_slot, op, std::move(inputs), std::move(attributes));
}

absl::StatusOr<ValueIndex> GradientContext::EmitOn(int32_t device_slot, absl::string_view op,
                                                   std::vector<ValueIndex> inputs,
                                                   Attributes attributes) {
  NodeSpec spec;
  spec.op.assign(op.data(), op.size());
  spec.attributes = std::move(attributes);
  spec.inputs = std::move(inputs);
  spec.device_slot = device_slot;
  spec.source = node().source;
  CHORUS_ASSIGN_OR_RETURN(std::vector<ValueIndex> outputs, emitter_->Emit(std::move(spec)));
  return outputs[0];
}

absl::StatusOr<ValueIndex> GradientContext::EmitFill(const TensorType& type, double value) {
  Attributes attributes = TypeAttributes(type);
  if (IsFloating(type.dtype)) {
    attributes.push_back({"value", value});
  } else {
    attributes.push_back({"value", static_cast<int64_t>(value)});
  }
  return Emit("fill", {}, std::move(attributes));
}

absl::StatusOr<ValueIndex> GradientContext::EmitCast(ValueIndex x, DType dtype) {
  if (TypeOf(x).dtype == dtype) return x;
  const absl::string_view name = DTypeName(dtype);
  return Emit("cast", {x}, {{"dtype", std::string(name.data(), name.size())}});
}

absl::StatusOr<ValueIndex> GradientContext::EmitWide(ValueIndex x) {
  const DType dtype = TypeOf(x).dtype;
  const bool is_half = dtype == DType::kF16 || dtype == DType::kBF16;
  return is_half ? EmitCast(x, DType::kF32) : absl::StatusOr<ValueIndex>(x);
}

absl::StatusOr<ValueIndex> GradientContext::SumToInput(ValueIndex g, int i) {
  if (!input_type(i).dims.empty() || TypeOf(g).dims.empty()) return g;
  return Emit("sum", {g});
}

Collective GradientContext::GradientCollective(CollectiveKind kind) const {
  const Collective& forward = collective();
  Collective gradient;
  gradient.kind =
      kind == CollectiveKind::kUnspecified ? GradientKind(forward.kind, forward.reduction) : kind;
  gradient.group_slot = forward.group_slot;
  gradient.rank = forward.rank;
  gradient.root = forward.root;
  gradient.peer = forward.peer;
  gradient.tag = forward.tag;
  if (IsReducing(gradient.kind)) gradient.reduction = Reduction::kSum;
  return gradient;
}

absl::StatusOr<std::vector<ValueIndex>> GradientContext::EmitCollective(
    absl::string_view op, Collective gradient, std::vector<ValueIndex> inputs,
    Attributes attributes) {
  emitter_->BindGradient(forward_, &gradient);
  NodeSpec spec;
  spec.op.assign(op.data(), op.size());
  spec.attributes = std::move(attributes);
  spec.inputs = std::move(inputs);
  spec.device_slot = node().device_slot;
  spec.collective = std::move(gradient);
  spec.source = node().source;
  return emitter_->Emit(std::move(spec));
}

absl::StatusOr<std::vector<ValueIndex>> GradientContext::EmitGradientCollective(
    absl::string_view op, std::vector<ValueIndex> inputs, Attributes attributes,
    std::vector<int64_t> counts, Reduction reduction, CollectiveKind kind) {
  Collective gradient = GradientCollective(kind);
  gradient.counts = std::move(counts);
  if (IsReducing(gradient.kind)) gradient.reduction = reduction;
  return EmitCollective(op, std::move(gradient), std::move(inputs), std::move(attributes));
}

absl::StatusOr<absl::optional<ValueIndex>> GradientContext::EmitRuntimeGradient(
    absl::string_view op) {
  if (num_outputs() == 0) return EmitRuntimeCollective(op, {}, TypeAttributes(input_type(0)));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, GradOrZeros(0));
  return EmitRuntimeCollective(op, {g, output(1)}, {});  // what came is what goes back
}

absl::StatusOr<ValueIndex> GradientContext::EmitRuntimeGradient(absl::string_view op,
                                                                ValueIndex pieces,
                                                                ValueIndex sends) {
  CHORUS_ASSIGN_OR_RETURN(const auto result, EmitRuntimeCollective(op, {pieces, sends}, {}));
  return *result;
}

// `sent`: what this member sends, and the rows for each; or nothing.
absl::StatusOr<absl::optional<ValueIndex>> GradientContext::EmitRuntimeCollective(
    absl::string_view op, std::vector<ValueIndex> sent, Attributes attributes) {
  const Collective& forward = collective();
  Collective gradient = GradientCollective(CollectiveKind::kUnspecified);
  const bool has_x = num_pieces() > 0;
  gradient.runtime_counts_input = sent.empty() ? 0 : 1;
  if (has_x) {
    sent.push_back(input(forward.runtime_counts_input));
    gradient.runtime_count_maximum = input_type(0).dims[0].size;
  }
  CHORUS_ASSIGN_OR_RETURN(
      const std::vector<ValueIndex> result,
      EmitCollective(op, std::move(gradient), std::move(sent), std::move(attributes)));
  if (!has_x) return absl::optional<ValueIndex>();
  return absl::optional<ValueIndex>(result[0]);
}

}  // namespace chorus
