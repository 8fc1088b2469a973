#include "core/graph/encoding.h"

#include <xxhash.h>

#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "core/base/bytes.h"
#include "core/base/error.h"
#include "core/base/memory_account.h"
#include "core/base/source_line.h"

namespace chorus {
namespace {

constexpr uint32_t kMagic = 0x47524843;  // "CHRG"
// Flags of a collective.
constexpr uint8_t kWantsGrad = 1;
constexpr uint8_t kLeadsToCollective = 2;
constexpr uint8_t kLeadsToLeaf = 4;
constexpr uint8_t kHasPart = 8;

// Bytes that an element of a list has at least where it is encoded.
template <typename T>
constexpr size_t kMinBytes = 1;
template <>
constexpr size_t kMinBytes<GroupSlot> = 3;
template <>
constexpr size_t kMinBytes<GraphInput> = 6;
template <>
constexpr size_t kMinBytes<Node> = 9;
template <>
constexpr size_t kMinBytes<Attribute> = 3;
template <>
constexpr size_t kMinBytes<TensorType> = 3;
template <>
constexpr size_t kMinBytes<Dim> = 2;
template <>
constexpr size_t kMinBytes<GraphOutput> = 3;
template <>
constexpr size_t kMinBytes<SizeRule> = 7;

// In memory a byte is this much at most: the only element of its list, or a text that is not short.
constexpr int64_t kMaxMemoryOfByte = 32;
template <typename T>
constexpr bool kIsWithin = ListBytes<T>(1) <= kMaxMemoryOfByte* static_cast<int64_t>(kMinBytes<T>);
static_assert(kIsWithin<GroupSlot> && kIsWithin<GroupRank> && kIsWithin<int32_t>);
static_assert(kIsWithin<GraphInput> && kIsWithin<GraphOutput> && kIsWithin<SizeRule>);
static_assert(kIsWithin<Node> && kIsWithin<Attribute> && kIsWithin<int64_t>);
static_assert(kIsWithin<TensorType> && kIsWithin<Dim>);
static_assert(TextBytes(kInlineTextBytes + 1) <=
              kMaxMemoryOfByte * static_cast<int64_t>(kInlineTextBytes + 1));

// --- Encoding ---

template <typename Int>
void PutInts(const std::vector<Int>& values, ByteWriter* out) {
  out->PutVarint(values.size());
  for (const Int value : values) out->PutSigned(value);
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
  out->Put(static_cast<uint8_t>(rule.field));
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

// Reads the parts of a graph. Whatever is made is counted before, so that a graph that would be too
// large ends here while it is small.
class Decoder {
 public:
  Decoder(absl::string_view bytes, const DecodeLimits& limits)
      : total_(bytes.size()), limits_(limits), in_(bytes) {}

  absl::StatusOr<Graph> Decode() {
    if (in_.Get<uint32_t>() != kMagic) {
      return Malformed(absl::StrCat("graph: these ", total_, " bytes are not an encoded graph"));
    }
    Graph graph;
    graph.ir_version = GetInt32();
    if (in_.ok() && graph.ir_version != Graph::kIrVersion) {
      return MakeError(Reason::kVersion, absl::StrCat("graph: IR version ", graph.ir_version,
                                                      ", this build reads ", Graph::kIrVersion));
    }
    graph.num_device_slots = GetInt32();
    graph.num_instance_slots = GetInt32();
    if (!in_.ok()) {
      return Malformed(absl::StrCat("graph: ", total_, " bytes end within the graph's head"));
    }
    if (!Take(static_cast<int64_t>(sizeof(Graph)))) return refused_;
    CHORUS_RETURN_IF_ERROR(
        GetList("group slot", &Decoder::GetGroupSlot, kAnyCount, &graph.group_slots));
    CHORUS_RETURN_IF_ERROR(GetList("input", &Decoder::GetInput, kAnyCount, &graph.inputs));
    CHORUS_RETURN_IF_ERROR(GetList("node", &Decoder::GetNode, limits_.max_nodes, &graph.nodes));
    CHORUS_RETURN_IF_ERROR(GetList("output", &Decoder::GetOutput, kAnyCount, &graph.outputs));
    if (in_.remaining() > 0) {
      CHORUS_RETURN_IF_ERROR(GetList("size rule", &Decoder::GetSizeRule, kAnyCount, &graph.sizes));
      if (graph.sizes.empty()) return Malformed("graph: a list of no size rules");
    }
    if (!in_.Done()) {
      return Malformed(absl::StrCat("graph: ", in_.remaining(), " of ", total_,
                                    " bytes are left over after the graph's end"));
    }
    return graph;
  }

 private:
  static constexpr int64_t kAnyCount = std::numeric_limits<int64_t>::max();

  // Counts what is about to be made. False: it must not be, and nothing is read any more.
  bool Take(int64_t bytes) {
    taken_ += bytes;
    if (taken_ > limits_.max_bytes) Refuse(TooMuchMemory("graph", limits_.max_bytes, taken_));
    return in_.ok();
  }

  void Refuse(absl::Status status) {
    if (in_.ok()) refused_ = std::move(status);
    in_.Fail();
  }

  // Room in `list` for as many as are counted here; the elements follow. 0 where something is
  // wrong.
  template <typename T>
  size_t GetRoom(std::vector<T>* list) {
    const size_t count = in_.GetCount(kMinBytes<T>);
    if (!Take(ListBytes<T>(count))) return 0;
    list->reserve(count);
    return count;
  }

  int32_t GetInt32() {
    const int64_t value = in_.GetSigned();
    if (value < std::numeric_limits<int32_t>::min() ||
        value > std::numeric_limits<int32_t>::max()) {
      in_.Fail();
      return 0;
    }
    return static_cast<int32_t>(value);
  }

  template <typename E>
  E GetEnum(E last) {
    const uint8_t value = in_.Get<uint8_t>();
    if (value > static_cast<uint8_t>(last)) {
      in_.Fail();
      return E{};
    }
    return static_cast<E>(value);
  }

  bool GetBool() {
    const uint8_t value = in_.Get<uint8_t>();
    if (value > 1) in_.Fail();
    return value == 1;
  }

  std::string GetText() {
    const absl::string_view text = in_.GetString();
    if (!Take(TextBytes(text.size()))) return std::string();
    return std::string(text.data(), text.size());
  }

  std::string GetSource() {
    const absl::string_view source = in_.GetString();
    if (source.size() > kMaxSourceLineBytes) {
      Refuse(Malformed(absl::StrCat("expected a source of at most ", kMaxSourceLineBytes,
                                    " bytes, got ", source.size())));
    }
    if (!Take(TextBytes(source.size()))) return std::string();
    return std::string(source.data(), source.size());
  }

  std::vector<int64_t> GetInts64() {
    std::vector<int64_t> values;
    const size_t count = GetRoom(&values);
    for (size_t i = 0; i < count && in_.ok(); ++i) values.push_back(in_.GetSigned());
    return values;
  }

  template <typename Int>
  std::vector<Int> GetInts32() {
    std::vector<Int> values;
    const size_t count = GetRoom(&values);
    for (size_t i = 0; i < count && in_.ok(); ++i) values.push_back(GetInt32());
    return values;
  }

  // Sixteen dims at most: counted behind, as no more than a few hundred bytes too many are made.
  TensorType GetType() {
    TensorType type = DecodeType(&in_);
    return Take(MemoryBehind(type)) ? type : TensorType();
  }

  Attribute GetAttribute() {
    Attribute attribute;
    attribute.name = GetText();
    switch (in_.Get<uint8_t>()) {
      case 0:
        attribute.value = in_.GetSigned();
        break;
      case 1:
        attribute.value = in_.Get<double>();
        break;
      case 2:
        attribute.value = GetInts64();
        break;
      case 3:
        attribute.value = GetText();
        break;
      default:
        in_.Fail();
    }
    return attribute;
  }

  Collective GetCollective() {
    Collective c;
    c.kind = GetEnum(kLastCollectiveKind);
    c.group_slot = GetInt32();
    c.rank = GroupRank(GetInt32());
    c.root = GroupRank(GetInt32());
    c.reduction = GetEnum(kLastReduction);
    const uint8_t flags = in_.Get<uint8_t>();
    if (flags > (kWantsGrad | kLeadsToCollective | kLeadsToLeaf | kHasPart)) in_.Fail();
    c.wants_grad = (flags & kWantsGrad) != 0;
    c.leads_to_collective = (flags & kLeadsToCollective) != 0;
    c.leads_to_leaf = (flags & kLeadsToLeaf) != 0;
    if ((flags & kHasPart) != 0) {
      c.part = GetInt32();
      if (c.part == 0) in_.Fail();
    }
    c.peer = GroupRank(GetInt32());
    c.tag = in_.GetSigned();
    c.instance.kind = GetEnum(InstanceRef::Kind::kBound);
    c.instance.node = GetInt32();
    c.instance.request = GetInt32();
    c.instance.slot = GetInt32();
    c.counts = GetInts64();
    c.runtime_counts_input = GetInt32();
    c.runtime_count_maximum = in_.GetSigned();
    return c;
  }

  Node GetNode() {
    Node node;
    node.op = GetText();
    node.version = GetInt32();
    const size_t attributes = GetRoom(&node.attributes);
    for (size_t i = 0; i < attributes && in_.ok(); ++i) node.attributes.push_back(GetAttribute());
    node.inputs = GetInts32<ValueIndex>();
    const size_t outputs = GetRoom(&node.outputs);
    for (size_t i = 0; i < outputs && in_.ok(); ++i) node.outputs.push_back(GetType());
    node.device_slot = GetInt32();
    node.effect = GetEnum(Effect::kRandom);
    if (GetBool()) node.collective = GetCollective();
    node.source = GetSource();
    return node;
  }

  GroupSlot GetGroupSlot() {
    GroupSlot slot;
    slot.size = GetInt32();
    const size_t count = GetRoom(&slot.held);
    for (size_t i = 0; i < count && in_.ok(); ++i) slot.held.emplace_back(GetInt32());
    slot.device_slots = GetInts32<int32_t>();
    return slot;
  }

  GraphInput GetInput() {
    GraphInput input;
    input.type = GetType();
    input.role = GetEnum(InputRole::kSeed);
    input.donatable = GetBool();
    input.device_slot = GetInt32();
    return input;
  }

  GraphOutput GetOutput() {
    GraphOutput output;
    output.value = GetInt32();
    output.role = GetEnum(InputRole::kSeed);
    output.may_alias = GetInt32();
    return output;
  }

  SizeRule GetSizeRule() {
    SizeRule rule;
    rule.node = GetInt32();
    rule.field = GetEnum(SizeRule::Field::kRuntimeCountMaximum);
    rule.attribute = GetInt32();
    rule.element = GetInt32();
    rule.symbol = GetInt32();
    rule.scale = in_.GetSigned();
    rule.offset = in_.GetSigned();
    return rule;
  }

  // A counted list. The error says which element does not decode and where it starts.
  template <typename T>
  absl::Status GetList(absl::string_view what, T (Decoder::*get)(), int64_t most,
                       std::vector<T>* list) {
    const size_t start = total_ - in_.remaining();
    const size_t count = in_.GetCount(kMinBytes<T>);
    if (!in_.ok()) {
      return Malformed(absl::StrCat("graph: the number of ", what, "s at byte ", start, " of ",
                                    total_, " is more than the bytes that follow can hold"));
    }
    if (static_cast<int64_t>(count) > most) {
      return Malformed(
          absl::StrCat("graph: number of ", what, "s: expected from 0 to ", most, ", got ", count));
    }
    if (!Take(ListBytes<T>(count))) return refused_;
    list->reserve(count);
    for (size_t i = 0; i < count; ++i) {
      const size_t element_start = total_ - in_.remaining();
      list->push_back((this->*get)());
      if (in_.ok()) continue;
      const Error why = ErrorOf(refused_);
      if (why.reason == Reason::kQuota) return refused_;
      return Malformed(absl::StrCat("graph: ", what, " ", i, " of ", count,
                                    ", which starts at byte ", element_start, " of ", total_,
                                    refused_.ok() ? ", does not decode" : ": ", why.message));
    }
    return absl::OkStatus();
  }

  const size_t total_;
  const DecodeLimits limits_;
  ByteReader in_;
  int64_t taken_ = 0;
  absl::Status refused_;  // why nothing is read any more, where it is not the bytes' form
};

}  // namespace

std::string EncodeGraph(const Graph& graph) { return Encode(graph, /*with_sources=*/true); }

absl::StatusOr<Graph> DecodeGraph(absl::string_view bytes, const DecodeLimits& limits) {
  return Decoder(bytes, limits).Decode();
}

Hash128 HashGraph(const Graph& graph) {
  const std::string bytes = Encode(graph, /*with_sources=*/false);
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return Hash128{hash.high64, hash.low64};
}

int64_t MemoryBehind(const TensorType& type) { return ListBytes(type.dims); }

int64_t MemoryBehind(const Node& node) {
  int64_t bytes = TextBytes(node.op.size()) + ListBytes(node.attributes) + ListBytes(node.inputs) +
                  ListBytes(node.outputs) + TextBytes(node.source.size());
  for (const Attribute& attribute : node.attributes) {
    bytes += TextBytes(attribute.name.size());
    if (const auto* list = absl::get_if<std::vector<int64_t>>(&attribute.value)) {
      bytes += ListBytes(*list);
    } else if (const auto* text = absl::get_if<std::string>(&attribute.value)) {
      bytes += TextBytes(text->size());
    }
  }
  for (const TensorType& type : node.outputs) bytes += MemoryBehind(type);
  if (node.collective.has_value()) bytes += ListBytes(node.collective->counts);
  return bytes;
}

int64_t MemoryOf(const Graph& graph) {
  int64_t bytes = static_cast<int64_t>(sizeof(Graph)) + ListBytes(graph.group_slots) +
                  ListBytes(graph.inputs) + ListBytes(graph.nodes) + ListBytes(graph.outputs) +
                  ListBytes(graph.sizes);
  for (const GroupSlot& slot : graph.group_slots) {
    bytes += ListBytes(slot.held) + ListBytes(slot.device_slots);
  }
  for (const GraphInput& input : graph.inputs) bytes += MemoryBehind(input.type);
  for (const Node& node : graph.nodes) bytes += MemoryBehind(node);
  return bytes;
}

int64_t MaxMemoryOf(absl::string_view bytes) {
  return static_cast<int64_t>(sizeof(Graph)) +
         kMaxMemoryOfByte * static_cast<int64_t>(bytes.size());
}

absl::Status TooMuchMemory(absl::string_view what, int64_t most, int64_t got) {
  return MakeError(Reason::kQuota,
                   absl::StrCat(what, ": expected one that takes at most ", most,
                                " bytes of memory, got one that takes ", got, " or more"));
}

}  // namespace chorus
