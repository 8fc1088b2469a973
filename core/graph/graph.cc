#include "core/graph/graph.h"

#include <xxhash.h>

#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "core/base/bytes.h"
#include "core/base/error.h"

namespace chorus {
namespace {

constexpr uint32_t kMagic = 0x47524843;  // "CHRG"
// Flags of a collective.
constexpr uint8_t kWantsGrad = 1;
constexpr uint8_t kLeadsToCollective = 2;
constexpr uint8_t kLeadsToLeaf = 4;
constexpr uint8_t kHasPart = 8;

// --- Encoding ---

void PutInts(absl::Span<const int64_t> values, ByteWriter* out) {
  out->PutVarint(values.size());
  for (const int64_t value : values) out->PutSigned(value);
}

void PutInts(absl::Span<const int32_t> values, ByteWriter* out) {
  out->PutVarint(values.size());
  for (const int32_t value : values) out->PutSigned(value);
}

void EncodeAttribute(const Attribute& attribute, ByteWriter* out) {
  out->PutString(attribute.name);
  out->Put(static_cast<uint8_t>(attribute.value.index()));
  if (const auto* i = absl::get_if<int64_t>(&attribute.value)) {
    out->PutSigned(*i);
  } else if (const auto* d = absl::get_if<double>(&attribute.value)) {
    out->Put(*d);
  } else if (const auto* v = absl::get_if<std::vector<int64_t>>(&attribute.value)) {
    PutInts(*v, out);
  } else {
    out->PutString(absl::get<std::string>(attribute.value));
  }
}

void EncodeCollective(const Collective& c, ByteWriter* out) {
  out->Put(static_cast<uint8_t>(c.kind));
  out->PutSigned(c.group_slot);
  out->PutSigned(c.rank.value());
  out->PutSigned(c.root.value());
  out->Put(static_cast<uint8_t>(c.reduction));
  // Most have no part, and bytes from before there were parts mean what they meant.
  out->Put(static_cast<uint8_t>(
      (c.wants_grad ? kWantsGrad : 0) | (c.leads_to_collective ? kLeadsToCollective : 0) |
      (c.leads_to_leaf ? kLeadsToLeaf : 0) | (c.part != 0 ? kHasPart : 0)));
  if (c.part != 0) out->PutSigned(c.part);
  out->PutSigned(c.peer.value());
  out->PutSigned(c.tag);
  out->Put(static_cast<uint8_t>(c.instance.kind));
  out->PutSigned(c.instance.node);
  out->PutSigned(c.instance.request);
  out->PutSigned(c.instance.slot);
  PutInts(c.counts, out);
  out->PutSigned(c.runtime_counts_input);
  out->PutSigned(c.runtime_count_maximum);
}

void EncodeNode(const Node& node, bool with_source, ByteWriter* out) {
  out->PutString(node.op);
  out->PutSigned(node.version);
  out->PutVarint(node.attributes.size());
  for (const Attribute& attribute : node.attributes) EncodeAttribute(attribute, out);
  PutInts(node.inputs, out);
  out->PutVarint(node.outputs.size());
  for (const TensorType& type : node.outputs) EncodeType(type, out);
  out->PutSigned(node.device_slot);
  out->Put(static_cast<uint8_t>(node.effect));
  out->Put(static_cast<uint8_t>(node.collective.has_value()));
  if (node.collective.has_value()) EncodeCollective(*node.collective, out);
  out->PutString(with_source ? absl::string_view(node.source) : absl::string_view());
}

void EncodeSizeRule(const SizeRule& rule, ByteWriter* out) {
  out->PutSigned(rule.node);
  out->Put(static_cast<uint8_t>(rule.place));
  out->PutSigned(rule.attribute);
  out->PutSigned(rule.element);
  out->PutSigned(rule.symbol);
  out->PutSigned(rule.scale);
  out->PutSigned(rule.offset);
}

std::string Encode(const Graph& graph, bool with_sources) {
  ByteWriter out;
  out.Put(kMagic);
  out.PutSigned(graph.ir_version);
  out.PutSigned(graph.num_device_slots);
  out.PutSigned(graph.num_instance_slots);
  out.PutVarint(graph.group_slots.size());
  for (const GroupSlot& slot : graph.group_slots) {
    out.PutSigned(slot.size);
    out.PutVarint(slot.held.size());
    for (const GroupRank rank : slot.held) out.PutSigned(rank.value());
    PutInts(slot.device_slots, &out);
  }
  out.PutVarint(graph.inputs.size());
  for (const GraphInput& input : graph.inputs) {
    EncodeType(input.type, &out);
    out.Put(static_cast<uint8_t>(input.role));
    out.Put(static_cast<uint8_t>(input.donatable));
    out.PutSigned(input.device_slot);
  }
  out.PutVarint(graph.nodes.size());
  for (const Node& node : graph.nodes) EncodeNode(node, with_sources, &out);
  out.PutVarint(graph.outputs.size());
  for (const GraphOutput& output : graph.outputs) {
    out.PutSigned(output.value);
    out.Put(static_cast<uint8_t>(output.role));
    out.PutSigned(output.may_alias);
  }
  // Most graphs have none, and end here.
  if (!graph.sizes.empty()) {
    out.PutVarint(graph.sizes.size());
    for (const SizeRule& rule : graph.sizes) EncodeSizeRule(rule, &out);
  }
  return out.Take();
}

// --- Decoding ---

int32_t GetInt32(ByteReader* in) {
  const int64_t value = in->GetSigned();
  if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max()) {
    in->Fail();
    return 0;
  }
  return static_cast<int32_t>(value);
}

template <typename E>
E GetEnum(ByteReader* in, E last) {
  const uint8_t value = in->Get<uint8_t>();
  if (value > static_cast<uint8_t>(last)) {
    in->Fail();
    return E{};
  }
  return static_cast<E>(value);
}

bool GetBool(ByteReader* in) {
  const uint8_t value = in->Get<uint8_t>();
  if (value > 1) in->Fail();
  return value == 1;
}

std::string GetText(ByteReader* in) {
  const absl::string_view text = in->GetString();
  return std::string(text.data(), text.size());
}

std::vector<int64_t> GetInts64(ByteReader* in) {
  std::vector<int64_t> values(in->GetCount());
  for (int64_t& value : values) value = in->GetSigned();
  return values;
}

std::vector<int32_t> GetInts32(ByteReader* in) {
  std::vector<int32_t> values(in->GetCount());
  for (int32_t& value : values) value = GetInt32(in);
  return values;
}

Attribute DecodeAttribute(ByteReader* in) {
  Attribute attribute;
  attribute.name = GetText(in);
  switch (in->Get<uint8_t>()) {
    case 0:
      attribute.value = in->GetSigned();
      break;
    case 1:
      attribute.value = in->Get<double>();
      break;
    case 2:
      attribute.value = GetInts64(in);
      break;
    case 3:
      attribute.value = GetText(in);
      break;
    default:
      in->Fail();
  }
  return attribute;
}

Collective DecodeCollective(ByteReader* in) {
  Collective c;
  c.kind = GetEnum(in, kLastCollectiveKind);
  c.group_slot = GetInt32(in);
  c.rank = GroupRank(GetInt32(in));
  c.root = GroupRank(GetInt32(in));
  c.reduction = GetEnum(in, kLastReduction);
  const uint8_t flags = in->Get<uint8_t>();
  if (flags > (kWantsGrad | kLeadsToCollective | kLeadsToLeaf | kHasPart)) in->Fail();
  c.wants_grad = (flags & kWantsGrad) != 0;
  c.leads_to_collective = (flags & kLeadsToCollective) != 0;
  c.leads_to_leaf = (flags & kLeadsToLeaf) != 0;
  if ((flags & kHasPart) != 0) {
    c.part = GetInt32(in);
    if (c.part == 0) in->Fail();
  }
  c.peer = GroupRank(GetInt32(in));
  c.tag = in->GetSigned();
  c.instance.kind = GetEnum(in, InstanceRef::Kind::kBound);
  c.instance.node = GetInt32(in);
  c.instance.request = GetInt32(in);
  c.instance.slot = GetInt32(in);
  c.counts = GetInts64(in);
  c.runtime_counts_input = GetInt32(in);
  c.runtime_count_maximum = in->GetSigned();
  return c;
}

Node DecodeNode(ByteReader* in) {
  Node node;
  node.op = GetText(in);
  node.version = GetInt32(in);
  const size_t num_attributes = in->GetCount(3);
  for (size_t i = 0; i < num_attributes && in->ok(); ++i) {
    node.attributes.push_back(DecodeAttribute(in));
  }
  node.inputs = GetInts32(in);
  const size_t num_outputs = in->GetCount(3);
  for (size_t i = 0; i < num_outputs && in->ok(); ++i) node.outputs.push_back(DecodeType(in));
  node.device_slot = GetInt32(in);
  node.effect = GetEnum(in, Effect::kRandom);
  if (GetBool(in)) node.collective = DecodeCollective(in);
  node.source = GetText(in);
  return node;
}

GroupSlot DecodeGroupSlot(ByteReader* in) {
  GroupSlot slot;
  slot.size = GetInt32(in);
  const std::vector<int32_t> held = GetInts32(in);
  slot.held.reserve(held.size());
  for (const int32_t rank : held) slot.held.emplace_back(rank);
  slot.device_slots = GetInts32(in);
  return slot;
}

GraphInput DecodeInput(ByteReader* in) {
  GraphInput input;
  input.type = DecodeType(in);
  input.role = GetEnum(in, InputRole::kSeed);
  input.donatable = GetBool(in);
  input.device_slot = GetInt32(in);
  return input;
}

GraphOutput DecodeOutput(ByteReader* in) {
  GraphOutput output;
  output.value = GetInt32(in);
  output.role = GetEnum(in, InputRole::kSeed);
  output.may_alias = GetInt32(in);
  return output;
}

SizeRule DecodeSizeRule(ByteReader* in) {
  SizeRule rule;
  rule.node = GetInt32(in);
  rule.place = GetEnum(in, SizeRule::Place::kRuntimeCountMaximum);
  rule.attribute = GetInt32(in);
  rule.element = GetInt32(in);
  rule.symbol = GetInt32(in);
  rule.scale = in->GetSigned();
  rule.offset = in->GetSigned();
  return rule;
}

// A counted list. The error says which element does not decode and where it starts.
template <typename T>
absl::Status DecodeList(absl::string_view what, size_t min_bytes_each, size_t total,
                        T (*decode)(ByteReader*), ByteReader* in, std::vector<T>* out) {
  const size_t start = total - in->remaining();
  const size_t count = in->GetCount(min_bytes_each);
  if (!in->ok()) {
    return Malformed(absl::StrCat("graph: the number of ", what, "s at byte ", start, " of ", total,
                                  " is more than the bytes that follow can hold"));
  }
  for (size_t i = 0; i < count; ++i) {
    const size_t element_start = total - in->remaining();
    out->push_back(decode(in));
    if (!in->ok()) {
      return Malformed(absl::StrCat("graph: ", what, " ", i, " of ", count,
                                    ", which starts at byte ", element_start, " of ", total,
                                    ", does not decode"));
    }
  }
  return absl::OkStatus();
}

std::string AttributeText(const AttributeValue& value) {
  if (const auto* i = absl::get_if<int64_t>(&value)) return absl::StrCat(*i);
  if (const auto* d = absl::get_if<double>(&value)) return absl::StrCat(*d);
  if (const auto* v = absl::get_if<std::vector<int64_t>>(&value)) {
    return absl::StrCat("[", absl::StrJoin(*v, ","), "]");
  }
  return absl::StrCat("'", absl::get<std::string>(value), "'");
}

std::string CollectiveText(const Collective& c) {
  std::string text = absl::StrCat(" group=", c.group_slot, " rank=", c.rank.value());
  if (c.root.value() >= 0) absl::StrAppend(&text, " root=", c.root.value());
  if (c.reduction != Reduction::kNone) absl::StrAppend(&text, " ", ReductionName(c.reduction));
  if (c.peer.value() >= 0) absl::StrAppend(&text, " peer=", c.peer.value(), " tag=", c.tag);
  if (c.part != 0) absl::StrAppend(&text, " part=", c.part);
  if (c.wants_grad) text += " grad";
  if (c.leads_to_collective) text += " from_collective";
  if (c.leads_to_leaf) text += " from_leaf";
  switch (c.instance.kind) {
    case InstanceRef::Kind::kNext:
      break;
    case InstanceRef::Kind::kGradient:
      absl::StrAppend(&text, " gradient_of=", c.instance.node, ".", c.instance.request);
      break;
    case InstanceRef::Kind::kBound:
      absl::StrAppend(&text, " instance_slot=", c.instance.slot);
      break;
  }
  return text;
}

}  // namespace

bool operator==(const Collective& a, const Collective& b) {
  return a.kind == b.kind && a.group_slot == b.group_slot && a.rank == b.rank && a.root == b.root &&
         a.reduction == b.reduction && a.wants_grad == b.wants_grad &&
         a.leads_to_collective == b.leads_to_collective && a.leads_to_leaf == b.leads_to_leaf &&
         a.peer == b.peer && a.tag == b.tag && a.instance == b.instance && a.part == b.part &&
         a.counts == b.counts && a.runtime_counts_input == b.runtime_counts_input &&
         a.runtime_count_maximum == b.runtime_count_maximum;
}

bool operator==(const Node& a, const Node& b) {
  return a.op == b.op && a.version == b.version && a.attributes == b.attributes &&
         a.inputs == b.inputs && a.outputs == b.outputs && a.device_slot == b.device_slot &&
         a.effect == b.effect && a.collective == b.collective && a.source == b.source;
}

bool operator==(const Graph& a, const Graph& b) {
  return a.ir_version == b.ir_version && a.inputs == b.inputs && a.nodes == b.nodes &&
         a.outputs == b.outputs && a.num_device_slots == b.num_device_slots &&
         a.group_slots == b.group_slots && a.num_instance_slots == b.num_instance_slots &&
         a.sizes == b.sizes;
}

int32_t Graph::num_values() const {
  size_t count = inputs.size();
  for (const Node& node : nodes) count += node.outputs.size();
  return static_cast<int32_t>(count);
}

ValueIndex Graph::ValueOf(int32_t node, int32_t output) const {
  size_t value = inputs.size();
  for (int32_t i = 0; i < node; ++i) value += nodes[i].outputs.size();
  return static_cast<ValueIndex>(value) + output;
}

ValueTable::ValueTable(const Graph& graph) {
  const int32_t count = graph.num_values();
  types_.reserve(count);
  producer_.reserve(count);
  device_slot_.reserve(count);
  first_output_.reserve(graph.nodes.size());
  for (const GraphInput& input : graph.inputs) {
    types_.push_back(&input.type);
    producer_.push_back(-1);
    device_slot_.push_back(input.device_slot);
  }
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    first_output_.push_back(static_cast<ValueIndex>(types_.size()));
    for (const TensorType& type : graph.nodes[n].outputs) {
      types_.push_back(&type);
      producer_.push_back(static_cast<int32_t>(n));
      device_slot_.push_back(graph.nodes[n].device_slot);
    }
  }
}

std::string Hash128::ToString() const { return absl::StrFormat("%016x%016x", hi, lo); }

std::string EncodeGraph(const Graph& graph) { return Encode(graph, /*with_sources=*/true); }

absl::StatusOr<Graph> DecodeGraph(absl::string_view bytes) {
  ByteReader in(bytes);
  if (in.Get<uint32_t>() != kMagic) {
    return Malformed(
        absl::StrCat("graph: these ", bytes.size(), " bytes are not an encoded graph"));
  }
  Graph graph;
  graph.ir_version = GetInt32(&in);
  if (in.ok() && graph.ir_version != Graph::kIrVersion) {
    return MakeError(Reason::kVersion, absl::StrCat("graph: IR version ", graph.ir_version,
                                                    ", this build reads ", Graph::kIrVersion));
  }
  graph.num_device_slots = GetInt32(&in);
  graph.num_instance_slots = GetInt32(&in);
  if (!in.ok()) {
    return Malformed(absl::StrCat("graph: ", bytes.size(), " bytes end within the graph's head"));
  }
  const size_t total = bytes.size();
  CHORUS_RETURN_IF_ERROR(
      DecodeList("group slot", 3, total, DecodeGroupSlot, &in, &graph.group_slots));
  CHORUS_RETURN_IF_ERROR(DecodeList("input", 6, total, DecodeInput, &in, &graph.inputs));
  CHORUS_RETURN_IF_ERROR(DecodeList("node", 9, total, DecodeNode, &in, &graph.nodes));
  CHORUS_RETURN_IF_ERROR(DecodeList("output", 3, total, DecodeOutput, &in, &graph.outputs));
  if (in.remaining() > 0) {
    CHORUS_RETURN_IF_ERROR(DecodeList("size rule", 7, total, DecodeSizeRule, &in, &graph.sizes));
    if (graph.sizes.empty()) return Malformed("graph: a list of no size rules");
  }
  if (!in.Done()) {
    return Malformed(absl::StrCat("graph: ", in.remaining(), " of ", total,
                                  " bytes are left over after the graph's end"));
  }
  return graph;
}

Hash128 HashGraph(const Graph& graph) {
  const std::string bytes = Encode(graph, /*with_sources=*/false);
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return Hash128{hash.high64, hash.low64};
}

std::string DebugString(const Graph& graph) {
  std::string text = absl::StrCat("graph devices=", graph.num_device_slots,
                                  " instances=", graph.num_instance_slots, "\n");
  for (size_t i = 0; i < graph.group_slots.size(); ++i) {
    const GroupSlot& slot = graph.group_slots[i];
    absl::StrAppend(
        &text, "group ", i, ": size=", slot.size, " held=[",
        absl::StrJoin(slot.held, ",",
                      [](std::string* out, GroupRank rank) { absl::StrAppend(out, rank.value()); }),
        "] devices=[", absl::StrJoin(slot.device_slots, ","), "]\n");
  }
  ValueIndex value = 0;
  for (const GraphInput& input : graph.inputs) {
    absl::StrAppend(&text, "%", value++, ": ", input.type.ToString(), " = input");
    if (input.role != InputRole::kData) {
      absl::StrAppend(&text, " role=", static_cast<int>(input.role));
    }
    if (input.donatable) text += " donatable";
    if (input.device_slot != 0) absl::StrAppend(&text, " device=", input.device_slot);
    text += "\n";
  }
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    absl::StrAppend(&text, "#", n, " ");
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      absl::StrAppend(&text, i == 0 ? "" : ", ", "%", value++, ": ", node.outputs[i].ToString());
    }
    absl::StrAppend(&text, node.outputs.empty() ? "" : " = ", node.op, "(");
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      absl::StrAppend(&text, i == 0 ? "" : ", ", "%", node.inputs[i]);
    }
    text += ")";
    for (const Attribute& attribute : node.attributes) {
      absl::StrAppend(&text, " ", attribute.name, "=", AttributeText(attribute.value));
    }
    if (node.collective.has_value()) text += CollectiveText(*node.collective);
    if (node.device_slot != 0) absl::StrAppend(&text, " device=", node.device_slot);
    if (!node.source.empty()) absl::StrAppend(&text, " @", node.source);
    text += "\n";
  }
  for (const GraphOutput& output : graph.outputs) {
    absl::StrAppend(&text, "output %", output.value);
    if (output.may_alias >= 0) absl::StrAppend(&text, " may_alias=", output.may_alias);
    text += "\n";
  }
  return text;
}

}  // namespace chorus
