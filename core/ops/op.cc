#include "core/ops/op.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {

const AttributeValue* FindAttribute(absl::Span<const Attribute> attributes,
                                    absl::string_view name) {
  for (const Attribute& attribute : attributes) {
    if (attribute.name == name) return &attribute.value;
  }
  return nullptr;
}

int64_t IntAttribute(absl::Span<const Attribute> attributes, absl::string_view name,
                     int64_t otherwise) {
  const AttributeValue* value = FindAttribute(attributes, name);
  return value == nullptr ? otherwise : absl::get<int64_t>(*value);
}

std::vector<int64_t> IntsAttribute(absl::Span<const Attribute> attributes, absl::string_view name) {
  const AttributeValue* value = FindAttribute(attributes, name);
  if (value == nullptr) return {};
  return absl::get<std::vector<int64_t>>(*value);
}

Attributes TypeAttributes(const TensorType& type) {
  const absl::string_view name = DTypeName(type.dtype);
  return {{"dims", type.sizes()}, {"dtype", std::string(name.data(), name.size())}};
}

absl::StatusOr<TensorType> TypeOfAttributes(const NodeView& node) {
  const AttributeValue* dims = FindAttribute(node.attributes, "dims");
  const AttributeValue* name = FindAttribute(node.attributes, "dtype");
  if (dims == nullptr || name == nullptr) {
    return ShapeError(node, "attributes 'dims' and 'dtype', for want of an input",
                      dims == nullptr ? "no 'dims'" : "no 'dtype'");
  }
  TensorType type;
  type.dtype = DTypeFromName(absl::get<std::string>(*name));
  if (type.dtype == DType::kUnspecified) {
    return ShapeError(node, "the name of a dtype as 'dtype'", "another text");
  }
  for (const int64_t size : absl::get<std::vector<int64_t>>(*dims)) type.dims.emplace_back(size);
  return type;
}

absl::Status ShapeError(const NodeView& node, absl::string_view expected, absl::string_view got) {
  Error error(Reason::kBadType);
  error.op.assign(node.op.data(), node.op.size());
  error.expected.assign(expected.data(), expected.size());
  error.got.assign(got.data(), got.size());
  error.message = absl::StrCat(node.op, ": expected ", expected, ", got ", got);
  return ToStatus(error);
}

absl::StatusOr<TensorType> StretchedType(const NodeView& node, int first) {
  const TensorType* type = &node.input(first);
  for (int i = node.num_inputs() - 1; i >= first; --i) {
    if (!node.input(i).dims.empty()) type = &node.input(i);
  }
  for (int i = first; i < node.num_inputs(); ++i) {
    const TensorType& input = node.input(i);
    if (input.dtype == type->dtype && (input.dims.empty() || input.dims == type->dims)) continue;
    const TensorType scalar(type->dtype, {});
    return ShapeError(
        node,
        absl::StrCat("inputs of one type, ", type->ToString(),
                     type->dims.empty() ? "" : absl::StrCat(" or ", scalar.ToString())),
        absl::StrCat(input.ToString(), " as input ", i));
  }
  return *type;
}

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

Saved SaveInputs(const NodeSpec&, int, int num_outputs) { return {0, num_outputs}; }

Saved SaveForCollective(const NodeSpec& spec, int num_inputs, int num_outputs) {
  const Collective& c = *spec.collective;
  const int outputs_from = HasRuntimeCounts(c) ? 1 : NumVisibleOutputs(c, num_outputs);
  return {NumPieces(c, num_inputs), std::min(outputs_from, num_outputs)};
}

}  // namespace chorus
