#include "core/ops/node_spec.h"

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {

NodeView ViewOf(const Node& node, absl::Span<const TensorType* const> inputs) {
  NodeView view;
  view.op = node.op;
  view.version = node.version;
  view.attributes = node.attributes;
  view.inputs = inputs;
  if (node.collective.has_value()) view.collective = &*node.collective;
  view.source = node.source;
  return view;
}

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

namespace {

// Lists that clients send may have millions of numbers; what is wrong is seen at their start.
std::string Start(absl::string_view text) {
  constexpr size_t kMostBytes = 512;
  if (text.size() <= kMostBytes) return std::string(text.data(), text.size());
  return absl::StrCat(text.substr(0, kMostBytes), "...");
}

}  // namespace

absl::Status ShapeError(const NodeView& node, absl::string_view expected, absl::string_view got) {
  Error error(Reason::kBadType);
  error.op.assign(node.op.data(), node.op.size());
  error.expected = Start(expected);
  error.got = Start(got);
  error.message = absl::StrCat(node.op, ": expected ", error.expected, ", got ", error.got);
  return ToStatus(error);
}

}  // namespace chorus
