#include "proto/convert/convert.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/types/variant.h"
#include "core/base/source_line.h"
#include "core/base/utf8.h"
#include "core/transport/frame_format.h"

namespace chorus {
namespace {

// A node is encoded in 9 bytes at least (proto/chorus/v1/graph_encoding.md).
constexpr int kMaxNodesOfFrame = static_cast<int>(kMaxFrameBytes / 9);
// And a bound instance in 7.
constexpr int kMaxInstancesOfFrame = static_cast<int>(kMaxFrameBytes / 7);
constexpr int kLastCode = static_cast<int>(absl::StatusCode::kUnauthenticated);

// Puts `field` before the text of a failure. Called on failure only: the path costs nothing else.
absl::Status Within(absl::string_view field, const absl::Status& status) {
  Error error = ErrorOf(status);
  const char next = error.message.empty() ? ':' : error.message[0];
  error.message = absl::StrCat(field, next == '[' || next == ':' ? "" : ".", error.message);
  return ToStatus(error);
}

// As CHORUS_ASSIGN_OR_RETURN; a failure names `field`.
#define CHORUS_ASSIGN_FIELD_IMPL(result, field, lhs, expression) \
  auto result = (expression);                                    \
  if (!result.ok()) return Within((field), result.status());     \
  lhs = *std::move(result)
#define CHORUS_ASSIGN_FIELD(field, lhs, expression) \
  CHORUS_ASSIGN_FIELD_IMPL(CHORUS_CONCAT(chorus_field_, __LINE__), field, lhs, expression)

std::string Indexed(absl::string_view field, int index) {
  return absl::StrCat(field, "[", index, "]");
}

absl::Status Missing(absl::string_view what) {
  return Malformed(absl::StrCat(": expected ", what));
}

absl::StatusOr<int32_t> Natural(int32_t value, absl::string_view field) {
  if (value < 0) {
    return Malformed(absl::StrCat(field, ": expected a number >= 0, got ", value));
  }
  return value;
}

// A CallPosition, or a message with its fields.
template <typename Message>
absl::StatusOr<CallPosition> PositionFrom(const Message& message) {
  CallPosition at;
  CHORUS_ASSIGN_OR_RETURN(at.step, CallNumber(message.step(), "step"));
  CHORUS_ASSIGN_OR_RETURN(at.call, CallNumber(message.call(), "call"));
  CHORUS_ASSIGN_OR_RETURN(at.part, Natural(message.part(), "part"));
  return at;
}

template <typename Message>
void PositionTo(const CallPosition& at, Message* message) {
  message->set_step(at.step);
  message->set_call(at.call);
  message->set_part(at.part);
}

// The two ends of a message that may be of a pair, as in InstanceKey.
template <typename Message, typename Key>
absl::Status PairFrom(const Message& message, Key* key) {
  if (message.has_source() != message.has_destination()) {
    return Malformed("source, destination: expected both or none, got one");
  }
  if (message.has_source()) {
    CHORUS_ASSIGN_OR_RETURN(const int32_t source, Natural(message.source(), "source"));
    CHORUS_ASSIGN_OR_RETURN(const int32_t destination,
                            Natural(message.destination(), "destination"));
    key->source = GroupRank(source);
    key->destination = GroupRank(destination);
  }
  key->tag = message.tag();
  return absl::OkStatus();
}

// An enum of the proto as one of the core: equal numbers, `shift` apart.
template <typename E>
absl::StatusOr<E> EnumFrom(int value, int first, int last, int shift, absl::string_view what) {
  if (value < first || value > last) {
    return Malformed(
        absl::StrCat(": ", value, " is no ", what, " (expected ", first, " to ", last, ")"));
  }
  return static_cast<E>(value - shift);
}

absl::StatusOr<CollectiveKind> KindFrom(int value) {
  return EnumFrom<CollectiveKind>(value, v1::COLLECTIVE_KIND_UNSPECIFIED + 1,
                                  static_cast<int>(kLastCollectiveKind), 0, "CollectiveKind");
}

absl::StatusOr<Reduction> ReductionFrom(int value) {
  return EnumFrom<Reduction>(value, v1::REDUCTION_UNSPECIFIED, static_cast<int>(kLastReduction), 0,
                             "Reduction");
}

absl::StatusOr<InputRole> RoleFrom(int value) {
  if (value == v1::VALUE_ROLE_UNSPECIFIED) return InputRole::kData;
  return EnumFrom<InputRole>(value, v1::VALUE_ROLE_DATA, v1::VALUE_ROLE_SEED, 1, "ValueRole");
}

template <typename Id, typename Message>
absl::StatusOr<Id> SlotIdFrom(const Message& message) {
  Id id;
  CHORUS_ASSIGN_OR_RETURN(id.slot, Natural(message.slot(), "slot"));
  if (message.generation() < 1 ||
      message.generation() > int64_t{std::numeric_limits<uint32_t>::max()}) {
    return Malformed(
        absl::StrCat("generation: expected 1 to 4294967295, got ", message.generation()));
  }
  id.generation = static_cast<uint32_t>(message.generation());
  return id;
}

template <typename Id, typename Message>
void SlotIdTo(Id id, Message* message) {
  message->set_slot(id.slot);
  message->set_generation(id.generation);
}

absl::StatusOr<Attribute> AttributeFrom(const v1::Attribute& message) {
  Attribute attribute;
  attribute.name = message.name();
  switch (message.value_case()) {
    case v1::Attribute::kIntValue:
      attribute.value = message.int_value();
      return attribute;
    case v1::Attribute::kFloatValue:
      attribute.value = message.float_value();
      return attribute;
    case v1::Attribute::kIntList:
      attribute.value = std::vector<int64_t>(message.int_list().values().begin(),
                                             message.int_list().values().end());
      return attribute;
    case v1::Attribute::kStringValue:
      attribute.value = message.string_value();
      return attribute;
    case v1::Attribute::VALUE_NOT_SET:
      break;
  }
  return Missing("int_value, float_value, int_list or string_value");
}

struct AttributeTo {
  v1::Attribute* message;
  void operator()(int64_t value) const { message->set_int_value(value); }
  void operator()(double value) const { message->set_float_value(value); }
  void operator()(const std::vector<int64_t>& values) const {
    message->mutable_int_list()->mutable_values()->Add(values.begin(), values.end());
  }
  void operator()(const std::string& value) const { message->set_string_value(value); }
};

absl::StatusOr<SizeRule> SizeRuleFrom(const v1::SizeRule& message) {
  SizeRule rule;
  CHORUS_ASSIGN_OR_RETURN(rule.node, Natural(message.node(), "node"));
  switch (message.place_case()) {
    case v1::SizeRule::kAttribute: {
      CHORUS_ASSIGN_OR_RETURN(rule.attribute, Natural(message.attribute(), "attribute"));
      break;
    }
    case v1::SizeRule::kCount:
      rule.field = SizeRule::Field::kCount;
      break;
    case v1::SizeRule::kRuntimeCountMaximum:
      rule.field = SizeRule::Field::kRuntimeCountMaximum;
      break;
    case v1::SizeRule::PLACE_NOT_SET:
      return Missing("attribute, count or runtime_count_maximum");
  }
  CHORUS_ASSIGN_OR_RETURN(rule.element, Natural(message.element(), "element"));
  CHORUS_ASSIGN_OR_RETURN(rule.symbol, Natural(message.symbol(), "symbol"));
  rule.scale = message.scale();
  rule.offset = message.offset();
  return rule;
}

absl::StatusOr<InstanceRef> InstanceRefFrom(const v1::InstanceRef& message) {
  InstanceRef ref;
  switch (message.kind_case()) {
    case v1::InstanceRef::kGradient: {
      ref.kind = InstanceRef::Kind::kGradient;
      CHORUS_ASSIGN_OR_RETURN(ref.node, Natural(message.gradient().node(), "gradient.node"));
      CHORUS_ASSIGN_OR_RETURN(ref.request,
                              Natural(message.gradient().request(), "gradient.request"));
      break;
    }
    case v1::InstanceRef::kBound: {
      ref.kind = InstanceRef::Kind::kBound;
      CHORUS_ASSIGN_OR_RETURN(ref.slot, Natural(message.bound().slot(), "bound.slot"));
      break;
    }
    case v1::InstanceRef::KIND_NOT_SET:
      ref.kind = InstanceRef::Kind::kNext;
      break;
  }
  return ref;
}

void InstanceRefTo(const InstanceRef& ref, v1::Collective* message) {
  switch (ref.kind) {
    case InstanceRef::Kind::kNext:
      return;
    case InstanceRef::Kind::kGradient:
      message->mutable_instance()->mutable_gradient()->set_node(ref.node);
      message->mutable_instance()->mutable_gradient()->set_request(ref.request);
      return;
    case InstanceRef::Kind::kBound:
      message->mutable_instance()->mutable_bound()->set_slot(ref.slot);
      return;
  }
}

absl::StatusOr<Collective> CollectiveFrom(const v1::Collective& message) {
  Collective c;
  CHORUS_ASSIGN_FIELD("kind", c.kind, KindFrom(message.kind()));
  CHORUS_ASSIGN_OR_RETURN(c.group_slot, Natural(message.group_slot(), "group_slot"));
  CHORUS_ASSIGN_OR_RETURN(const int32_t rank, Natural(message.rank(), "rank"));
  c.rank = GroupRank(rank);
  if (message.has_root()) {
    CHORUS_ASSIGN_OR_RETURN(const int32_t root, Natural(message.root(), "root"));
    c.root = GroupRank(root);
  }
  CHORUS_ASSIGN_FIELD("reduction", c.reduction, ReductionFrom(message.reduction()));
  c.wants_grad = message.wants_grad();
  c.leads_to_collective = message.leads_to_collective();
  c.leads_to_leaf = message.leads_to_leaf();
  if (message.has_peer()) {
    CHORUS_ASSIGN_OR_RETURN(const int32_t peer, Natural(message.peer(), "peer"));
    c.peer = GroupRank(peer);
  }
  c.tag = message.tag();
  CHORUS_ASSIGN_OR_RETURN(c.part, Natural(message.part(), "part"));
  CHORUS_ASSIGN_FIELD("instance", c.instance, InstanceRefFrom(message.instance()));
  for (int i = 0; i < message.counts_size(); ++i) {
    CHORUS_ASSIGN_OR_RETURN(const int64_t count,
                            NonNegative(message.counts(i), Indexed("counts", i)));
    c.counts.push_back(count);
  }
  if (message.has_runtime_counts()) {
    CHORUS_ASSIGN_OR_RETURN(c.runtime_counts_input,
                            Natural(message.runtime_counts().input(), "runtime_counts.input"));
    CHORUS_ASSIGN_OR_RETURN(c.runtime_count_maximum, NonNegative(message.runtime_counts().maximum(),
                                                                 "runtime_counts.maximum"));
  }
  return c;
}

void CollectiveTo(const Collective& c, v1::Collective* message) {
  message->set_kind(ToProto(c.kind));
  message->set_group_slot(c.group_slot);
  message->set_rank(c.rank.value());
  if (c.root.value() >= 0) message->set_root(c.root.value());
  message->set_reduction(ToProto(c.reduction));
  message->set_wants_grad(c.wants_grad);
  message->set_leads_to_collective(c.leads_to_collective);
  message->set_leads_to_leaf(c.leads_to_leaf);
  if (c.peer.value() >= 0) message->set_peer(c.peer.value());
  message->set_tag(c.tag);
  message->set_part(c.part);
  InstanceRefTo(c.instance, message);
  message->mutable_counts()->Add(c.counts.begin(), c.counts.end());
  if (c.runtime_counts_input >= 0) {
    message->mutable_runtime_counts()->set_input(c.runtime_counts_input);
    message->mutable_runtime_counts()->set_maximum(c.runtime_count_maximum);
  }
}

absl::StatusOr<Effect> EffectFrom(const v1::Node& message) {
  if (message.effect() == v1::EFFECT_UNSPECIFIED) {
    return message.has_collective() ? Effect::kCollective : Effect::kPure;
  }
  return EnumFrom<Effect>(message.effect(), v1::EFFECT_PURE, v1::EFFECT_RANDOM, 1, "Effect");
}

absl::StatusOr<Node> NodeFrom(const v1::Node& message) {
  Node node;
  node.op = message.op();
  CHORUS_ASSIGN_OR_RETURN(node.version, Natural(message.version(), "version"));
  if (node.version == 0) node.version = 1;
  for (int i = 0; i < message.attributes_size(); ++i) {
    CHORUS_ASSIGN_FIELD(Indexed("attributes", i), Attribute attribute,
                        AttributeFrom(message.attributes(i)));
    node.attributes.push_back(std::move(attribute));
  }
  std::sort(node.attributes.begin(), node.attributes.end(),
            [](const Attribute& a, const Attribute& b) { return a.name < b.name; });
  for (size_t i = 1; i < node.attributes.size(); ++i) {
    if (node.attributes[i].name == node.attributes[i - 1].name) {
      return Malformed(absl::StrCat("attributes: expected each name once, got \"",
                                    node.attributes[i].name, "\" twice"));
    }
  }
  for (int i = 0; i < message.inputs_size(); ++i) {
    CHORUS_ASSIGN_OR_RETURN(const int32_t input, Natural(message.inputs(i), Indexed("inputs", i)));
    node.inputs.push_back(input);
  }
  for (int i = 0; i < message.outputs_size(); ++i) {
    CHORUS_ASSIGN_FIELD(Indexed("outputs", i), TensorType type, FromProto(message.outputs(i)));
    node.outputs.push_back(std::move(type));
  }
  CHORUS_ASSIGN_OR_RETURN(node.device_slot, Natural(message.device_slot(), "device_slot"));
  CHORUS_ASSIGN_FIELD("effect", node.effect, EffectFrom(message));
  if (message.has_collective()) {
    CHORUS_ASSIGN_FIELD("collective", node.collective, CollectiveFrom(message.collective()));
  }
  if (message.source().size() > kMaxSourceLineBytes) {
    return Malformed(absl::StrCat("source: expected at most ", kMaxSourceLineBytes, " bytes, got ",
                                  message.source().size()));
  }
  node.source = message.source();
  return node;
}

void NodeTo(const Node& node, v1::Node* message) {
  message->set_op(node.op);
  message->set_version(node.version);
  for (const Attribute& attribute : node.attributes) {
    v1::Attribute* to = message->add_attributes();
    to->set_name(attribute.name);
    // A list may be empty: the field must be there all the same.
    if (absl::holds_alternative<std::vector<int64_t>>(attribute.value)) to->mutable_int_list();
    absl::visit(AttributeTo{to}, attribute.value);
  }
  message->mutable_inputs()->Add(node.inputs.begin(), node.inputs.end());
  for (const TensorType& type : node.outputs) ToProto(type, message->add_outputs());
  message->set_device_slot(node.device_slot);
  message->set_effect(static_cast<v1::Effect>(static_cast<int>(node.effect) + 1));
  if (node.collective.has_value()) CollectiveTo(*node.collective, message->mutable_collective());
  message->set_source(Utf8(node.source));
}

absl::StatusOr<GraphInput> GraphInputFrom(const v1::GraphInput& message) {
  GraphInput input;
  CHORUS_ASSIGN_FIELD("type", input.type, FromProto(message.type()));
  CHORUS_ASSIGN_FIELD("role", input.role, RoleFrom(message.role()));
  input.donatable = message.donatable();
  CHORUS_ASSIGN_OR_RETURN(input.device_slot, Natural(message.device_slot(), "device_slot"));
  return input;
}

absl::StatusOr<GraphOutput> GraphOutputFrom(const v1::GraphOutput& message) {
  GraphOutput output;
  CHORUS_ASSIGN_OR_RETURN(output.value, Natural(message.value(), "value"));
  CHORUS_ASSIGN_FIELD("role", output.role, RoleFrom(message.role()));
  if (message.has_may_alias()) {
    CHORUS_ASSIGN_OR_RETURN(output.may_alias, Natural(message.may_alias(), "may_alias"));
  }
  return output;
}

absl::StatusOr<GroupSlot> GroupSlotFrom(const v1::GroupSlot& message) {
  GroupSlot slot;
  CHORUS_ASSIGN_OR_RETURN(slot.size, Natural(message.size(), "size"));
  for (int i = 0; i < message.held_ranks_size(); ++i) {
    CHORUS_ASSIGN_OR_RETURN(const int32_t rank,
                            Natural(message.held_ranks(i), Indexed("held_ranks", i)));
    slot.held.push_back(GroupRank(rank));
  }
  for (int i = 0; i < message.device_slots_size(); ++i) {
    CHORUS_ASSIGN_OR_RETURN(const int32_t device,
                            Natural(message.device_slots(i), Indexed("device_slots", i)));
    slot.device_slots.push_back(device);
  }
  if (slot.device_slots.empty()) slot.device_slots.resize(slot.held.size(), 0);
  return slot;
}

v1::ValueRole RoleTo(InputRole role) {
  return static_cast<v1::ValueRole>(static_cast<int>(role) + 1);
}

absl::StatusOr<ExternalRange> RangeFrom(const v1::ExternalRange& message) {
  ExternalRange range;
  CHORUS_ASSIGN_OR_RETURN(const int32_t arena, Natural(message.arena(), "arena"));
  range.arena = ArenaId(arena);
  CHORUS_ASSIGN_OR_RETURN(range.offset, NonNegative(message.offset_bytes(), "offset_bytes"));
  if (message.strides_size() > TensorType::kMaxRank) {
    return Malformed(absl::StrCat("strides: expected at most ", TensorType::kMaxRank, ", got ",
                                  message.strides_size()));
  }
  range.strides.assign(message.strides().begin(), message.strides().end());
  return range;
}

void RangeTo(const ExternalRange& range, v1::ExternalRange* message) {
  message->set_arena(range.arena.value());
  message->set_offset_bytes(range.offset);
  message->mutable_strides()->Add(range.strides.begin(), range.strides.end());
}

absl::StatusOr<Binding> BindingFrom(const v1::Binding& message) {
  switch (message.source_case()) {
    case v1::Binding::kTensor: {
      CHORUS_ASSIGN_FIELD("tensor", const TensorId id, FromProto(message.tensor()));
      return Binding(id);
    }
    case v1::Binding::kInline: {
      const std::string& bytes = message.inline_();
      if (bytes.size() > InlineData::kMaxBytes) {
        return Malformed(absl::StrCat("inline: expected at most ", InlineData::kMaxBytes,
                                      " bytes, got ", bytes.size()));
      }
      InlineData data;
      data.bytes.assign(bytes.begin(), bytes.end());
      return Binding(std::move(data));
    }
    case v1::Binding::kExternal: {
      CHORUS_ASSIGN_FIELD("external", ExternalRange range, RangeFrom(message.external()));
      return Binding(std::move(range));
    }
    case v1::Binding::SOURCE_NOT_SET:
      break;
  }
  return Missing("tensor, inline or external");
}

struct BindingTo {
  v1::Binding* message;
  void operator()(const TensorId& id) const { ToProto(id, message->mutable_tensor()); }
  void operator()(const InlineData& data) const {
    message->set_inline_(data.bytes.data(), data.bytes.size());
  }
  void operator()(const ExternalRange& range) const { RangeTo(range, message->mutable_external()); }
};

absl::StatusOr<OutBinding> OutBindingFrom(const v1::OutBinding& message) {
  OutBinding out;
  switch (message.kind_case()) {
    case v1::OutBinding::kFresh: {
      out.kind = OutBinding::Kind::kFresh;
      CHORUS_ASSIGN_FIELD("fresh", out.id, FromProto(message.fresh()));
      break;
    }
    case v1::OutBinding::kInto: {
      out.kind = OutBinding::Kind::kInto;
      CHORUS_ASSIGN_FIELD("into", out.into, RangeFrom(message.into()));
      break;
    }
    case v1::OutBinding::KIND_NOT_SET:
      out.kind = OutBinding::Kind::kDiscard;
      break;
  }
  return out;
}

absl::StatusOr<RunGroup> RunGroupFrom(const v1::RunGroup& message) {
  RunGroup group;
  CHORUS_ASSIGN_OR_RETURN(const int64_t world, NonNegative(message.world(), "world"));
  group.world = WorldId(world);
  CHORUS_ASSIGN_OR_RETURN(const int32_t id, Natural(message.group(), "group"));
  group.group = GroupId(id);
  CHORUS_ASSIGN_OR_RETURN(const int64_t epoch, NonNegative(message.epoch(), "epoch"));
  group.epoch = Epoch(epoch);
  for (int i = 0; i < message.base_size(); ++i) {
    CHORUS_ASSIGN_FIELD(Indexed("base", i), const CallPosition base, PositionFrom(message.base(i)));
    group.base.push_back(base);
  }
  return group;
}

// Names of one kind: `messages` is a repeated TensorId or GraphId.
template <typename Messages, typename Id>
absl::Status NamesFrom(const Messages& messages, absl::string_view field, std::vector<Id>* ids) {
  ids->reserve(messages.size());
  for (int i = 0; i < messages.size(); ++i) {
    CHORUS_ASSIGN_FIELD(Indexed(field, i), const Id id, FromProto(messages.Get(i)));
    ids->push_back(id);
  }
  return absl::OkStatus();
}

absl::StatusOr<CommandBody> DropTapeFrom(const v1::DropTape& message) {
  DropTape drop;
  if (static_cast<size_t>(message.entries_size()) > DropTape::kMaxEntries) {
    return Malformed(absl::StrCat("entries: expected at most ", DropTape::kMaxEntries, ", got ",
                                  message.entries_size()));
  }
  for (int i = 0; i < message.entries_size(); ++i) {
    const v1::DropTape::Entry& from = message.entries(i);
    const auto entry_from = [&from]() -> absl::StatusOr<DropTape::Entry> {
      DropTape::Entry entry;
      CHORUS_ASSIGN_OR_RETURN(const int64_t world, NonNegative(from.world(), "world"));
      CHORUS_ASSIGN_OR_RETURN(const int32_t member, Natural(from.member(), "member"));
      CHORUS_ASSIGN_FIELD("key", entry.key, FromProto(from.key()));
      entry.world = WorldId(world);
      entry.member = GroupRank(member);
      entry.consumed = from.consumed();
      return entry;
    };
    CHORUS_ASSIGN_FIELD(Indexed("entries", i), DropTape::Entry entry, entry_from());
    drop.entries.push_back(std::move(entry));
  }
  return CommandBody(std::move(drop));
}

absl::StatusOr<CommandBody> CancelFrom(const v1::Cancel& message) {
  if (message.run_sequence() < 1) {
    return Malformed(
        absl::StrCat("run_sequence: expected a number >= 1, got ", message.run_sequence()));
  }
  return CommandBody(Cancel{Sequence(message.run_sequence())});
}

absl::StatusOr<CommandBody> EnterEpochFrom(const v1::EnterEpoch& message) {
  CHORUS_ASSIGN_OR_RETURN(const int64_t world, NonNegative(message.world(), "world"));
  CHORUS_ASSIGN_OR_RETURN(const int64_t epoch, NonNegative(message.epoch(), "epoch"));
  return CommandBody(EnterEpoch{WorldId(world), Epoch(epoch)});
}

absl::StatusOr<RefusedCalls> RefusedCallsFrom(const v1::Refuse::Calls& message) {
  RefusedCalls calls;
  CHORUS_ASSIGN_OR_RETURN(const int32_t group, Natural(message.group(), "group"));
  calls.group = GroupId(group);
  CHORUS_RETURN_IF_ERROR(PairFrom(message, &calls));
  if (!message.has_source() && (message.tag() != 0 || message.is_recv())) {
    return Malformed("tag, is_recv: expected none without source and destination, got one");
  }
  calls.is_recv = message.is_recv();
  CHORUS_ASSIGN_OR_RETURN(calls.first, CallNumber(message.first(), "first"));
  CHORUS_ASSIGN_OR_RETURN(calls.next, CallNumber(message.next(), "next"));
  if (calls.next < calls.first) {
    return Malformed(absl::StrCat("next: expected a number from ", calls.first,
                                  ", which is first, got ", calls.next));
  }
  return calls;
}

absl::StatusOr<RefusedMember> RefusedMemberFrom(const v1::Refuse::Member& message) {
  RefusedMember member;
  CHORUS_ASSIGN_OR_RETURN(const int32_t rank, Natural(message.rank(), "rank"));
  member.rank = Rank(rank);
  CHORUS_ASSIGN_OR_RETURN(member.step, CallNumber(message.step(), "step"));
  member.rest_of_step = message.rest_of_step();
  member.drops_tapes = message.drops_tapes();
  member.calls.reserve(message.calls_size());
  for (int i = 0; i < message.calls_size(); ++i) {
    CHORUS_ASSIGN_FIELD(Indexed("calls", i), const RefusedCalls calls,
                        RefusedCallsFrom(message.calls(i)));
    member.calls.push_back(calls);
  }
  for (int i = 0; i < message.gradients_size(); ++i) {
    CHORUS_ASSIGN_FIELD(Indexed("gradients", i), InstanceKey key, FromProto(message.gradients(i)));
    if (!key.is_gradient()) {
      return Malformed(absl::StrCat(Indexed("gradients", i),
                                    ".gradient_path: expected at least one ", "request, got none"));
    }
    member.gradients.push_back(std::move(key));
  }
  return member;
}

absl::StatusOr<Error> WhyFrom(const v1::Refuse::Why& message) {
  Error why;
  if (message.code() < 1 || message.code() > kLastCode) {
    return Malformed(absl::StrCat("code: expected a status code from 1 to ", kLastCode, ", got ",
                                  message.code()));
  }
  why.code = static_cast<absl::StatusCode>(message.code());
  why.reason = ReasonFromName(message.reason());
  if (!message.reason().empty() && ReasonName(why.reason) != message.reason()) {
    return Malformed(absl::StrCat("reason: expected one of docs/errors.md, got '",
                                  absl::CHexEscape(message.reason().substr(0, 64)), "'"));
  }
  const auto check = [](const std::string& text, absl::string_view field) {
    return text.size() <= Error::kMaxBytes
               ? absl::OkStatus()
               : Malformed(absl::StrCat(field, ": expected at most ", Error::kMaxBytes,
                                        " bytes, got ", text.size()));
  };
  CHORUS_RETURN_IF_ERROR(check(message.message(), "message"));
  CHORUS_RETURN_IF_ERROR(check(message.source(), "source"));
  why.message = message.message();
  why.source = message.source();
  why.alone = message.alone();
  return why;
}

absl::StatusOr<CommandBody> RefuseFrom(const v1::Refuse& message) {
  Refuse refuse;
  CHORUS_ASSIGN_OR_RETURN(const int64_t world, NonNegative(message.world(), "world"));
  refuse.world = WorldId(world);
  CHORUS_ASSIGN_OR_RETURN(const int64_t epoch, NonNegative(message.epoch(), "epoch"));
  refuse.epoch = Epoch(epoch);
  refuse.by_hand = message.by_hand();
  if (message.members_size() < 1 ||
      static_cast<size_t>(message.members_size()) > Refuse::kMaxMembers) {
    return Malformed(absl::StrCat("members: expected 1 to ", Refuse::kMaxMembers, ", got ",
                                  message.members_size()));
  }
  refuse.members.reserve(message.members_size());
  for (int i = 0; i < message.members_size(); ++i) {
    CHORUS_ASSIGN_FIELD(Indexed("members", i), RefusedMember member,
                        RefusedMemberFrom(message.members(i)));
    refuse.members.push_back(std::move(member));
  }
  CHORUS_ASSIGN_FIELD("why", refuse.why, WhyFrom(message.why()));
  return CommandBody(std::move(refuse));
}

struct BodyTo {
  v1::Command* message;

  absl::Status operator()(const RegisterGraph& command) const {
    v1::RegisterGraph* to = message->mutable_register_graph();
    ToProto(command.graph, to->mutable_id());
    if (command.encoded.empty()) {
      RangeTo(command.staged, to->mutable_staged()->mutable_range());
      to->mutable_staged()->set_size_bytes(command.staged_bytes);
      return absl::OkStatus();
    }
    absl::StatusOr<Graph> graph = DecodeGraph(command.encoded);
    if (!graph.ok()) {
      return MakeError(Reason::kInternal, ErrorOf(graph.status()).message);
    }
    ToProto(*graph, to->mutable_graph());
    return absl::OkStatus();
  }
  absl::Status operator()(const Run& run) const {
    v1::Run* to = message->mutable_run();
    ToProto(run.graph, to->mutable_graph());
    for (const Binding& binding : run.inputs) absl::visit(BindingTo{to->add_inputs()}, binding);
    for (const OutBinding& out : run.outputs) {
      v1::OutBinding* binding = to->add_outputs();
      if (out.kind == OutBinding::Kind::kFresh) ToProto(out.id, binding->mutable_fresh());
      if (out.kind == OutBinding::Kind::kInto) RangeTo(out.into, binding->mutable_into());
    }
    for (const RunGroup& group : run.groups) {
      v1::RunGroup* binding = to->add_groups();
      binding->set_world(group.world.value());
      binding->set_group(group.group.value());
      binding->set_epoch(group.epoch.value());
      for (const CallPosition& base : group.base) ToProto(base, binding->add_base());
    }
    to->mutable_pair_calls()->Add(run.pair_calls.begin(), run.pair_calls.end());
    to->set_call_goes_on(run.call_goes_on);
    for (const InstanceKey& key : run.instances) ToProto(key, to->add_instances());
    to->mutable_donate()->Add(run.donate.begin(), run.donate.end());
    for (DeviceIndex device : run.devices) to->add_devices(device.value());
    to->set_gang_id(static_cast<int64_t>(run.gang));
    return absl::OkStatus();
  }
  absl::Status operator()(const CreateTensor& create) const {
    v1::CreateTensor* to = message->mutable_create_tensor();
    ToProto(create.tensor, to->mutable_id());
    ToProto(create.type, to->mutable_type());
    to->set_device(create.device.value());
    absl::visit(BindingTo{to->mutable_source()}, create.source);
    to->set_call_site(Utf8(create.call_site));
    return absl::OkStatus();
  }
  absl::Status operator()(const MakeReadable& command) const {
    v1::MakeReadable* to = message->mutable_make_readable();
    for (TensorId id : command.tensors) ToProto(id, to->add_tensors());
    return absl::OkStatus();
  }
  absl::Status operator()(const Release& release) const {
    v1::Release* to = message->mutable_release();
    for (TensorId id : release.tensors) ToProto(id, to->add_tensors());
    for (GraphId id : release.graphs) ToProto(id, to->add_graphs());
    for (ArenaId arena : release.arenas) to->add_arenas(arena.value());
    return absl::OkStatus();
  }
  absl::Status operator()(const DropTape& drop) const {
    v1::DropTape* to = message->mutable_drop_tape();
    for (const DropTape::Entry& entry : drop.entries) {
      v1::DropTape::Entry* added = to->add_entries();
      added->set_world(entry.world.value());
      added->set_member(entry.member.value());
      ToProto(entry.key, added->mutable_key());
      added->set_consumed(entry.consumed);
    }
    return absl::OkStatus();
  }
  absl::Status operator()(const Cancel& cancel) const {
    message->mutable_cancel()->set_run_sequence(cancel.run.value());
    return absl::OkStatus();
  }
  absl::Status operator()(const EnterEpoch& enter) const {
    message->mutable_enter_epoch()->set_world(enter.world.value());
    message->mutable_enter_epoch()->set_epoch(enter.epoch.value());
    return absl::OkStatus();
  }
  absl::Status operator()(const Refuse& refuse) const {
    v1::Refuse* to = message->mutable_refuse();
    to->set_world(refuse.world.value());
    to->set_epoch(refuse.epoch.value());
    to->set_by_hand(refuse.by_hand);
    for (const RefusedMember& member : refuse.members) {
      v1::Refuse::Member* added = to->add_members();
      added->set_rank(member.rank.value());
      added->set_step(member.step);
      added->set_rest_of_step(member.rest_of_step);
      added->set_drops_tapes(member.drops_tapes);
      for (const RefusedCalls& calls : member.calls) {
        v1::Refuse::Calls* refused = added->add_calls();
        refused->set_group(calls.group.value());
        if (calls.source.value() >= 0) {
          refused->set_source(calls.source.value());
          refused->set_destination(calls.destination.value());
          refused->set_tag(calls.tag);
          refused->set_is_recv(calls.is_recv);
        }
        refused->set_first(calls.first);
        refused->set_next(calls.next);
      }
      for (const InstanceKey& key : member.gradients) ToProto(key, added->add_gradients());
    }
    v1::Refuse::Why* why = to->mutable_why();
    why->set_code(static_cast<int32_t>(refuse.why.code));
    why->set_reason(std::string(ReasonName(refuse.why.reason)));
    why->set_message(Utf8(refuse.why.message));
    why->set_source(Utf8(refuse.why.source));
    why->set_alone(refuse.why.alone);
    return absl::OkStatus();
  }
};

absl::StatusOr<CommandBody> BodyFrom(const v1::Command& message) {
  switch (message.body_case()) {
    case v1::Command::kRegisterGraph:
      return FromProto(message.register_graph());
    case v1::Command::kRun:
      return FromProto(message.run());
    case v1::Command::kCreateTensor:
      return FromProto(message.create_tensor());
    case v1::Command::kMakeReadable:
      return FromProto(message.make_readable());
    case v1::Command::kRelease:
      return FromProto(message.release());
    case v1::Command::kDropTape:
      return DropTapeFrom(message.drop_tape());
    case v1::Command::kCancel:
      return CancelFrom(message.cancel());
    case v1::Command::kEnterEpoch:
      return EnterEpochFrom(message.enter_epoch());
    case v1::Command::kRefuse:
      return RefuseFrom(message.refuse());
    case v1::Command::BODY_NOT_SET:
      break;
  }
  return Malformed("command: expected one of the commands, got none that this daemon knows");
}

}  // namespace

std::string Utf8(absl::string_view text) {
  std::string result(text);
  if (IsUtf8(text)) return result;
  for (char& c : result) {
    if (static_cast<unsigned char>(c) >= 0x80) c = '?';
  }
  return result;
}

absl::StatusOr<int64_t> NonNegative(int64_t value, absl::string_view field) {
  if (value < 0) {
    return Malformed(absl::StrCat(field, ": expected a number >= 0, got ", value));
  }
  return value;
}

absl::StatusOr<int64_t> CallNumber(int64_t value, absl::string_view field) {
  if (value < 0 || value >= kMaxCallNumber) {
    return Malformed(absl::StrCat(field, ": expected a number from 0 to 2^48 - 1, got ", value));
  }
  return value;
}

void ToProto(const CallPosition& position, v1::CallPosition* message) {
  PositionTo(position, message);
}

absl::StatusOr<DType> FromProto(v1::DType dtype) {
  return EnumFrom<DType>(dtype, v1::DTYPE_F16, v1::DTYPE_COMPLEX128, 0, "DType");
}

v1::DType ToProto(DType dtype) { return static_cast<v1::DType>(static_cast<int>(dtype)); }

v1::CollectiveKind ToProto(CollectiveKind kind) {
  return static_cast<v1::CollectiveKind>(static_cast<int>(kind));
}

v1::Reduction ToProto(Reduction reduction) {
  return static_cast<v1::Reduction>(static_cast<int>(reduction));
}

absl::StatusOr<TensorType> FromProto(const v1::TensorType& message) {
  TensorType type;
  CHORUS_ASSIGN_FIELD("dtype", type.dtype, FromProto(message.dtype()));
  if (message.dims_size() > TensorType::kMaxRank) {
    return Malformed(absl::StrCat("dims: expected at most ", TensorType::kMaxRank, ", got ",
                                  message.dims_size()));
  }
  for (int i = 0; i < message.dims_size(); ++i) {
    CHORUS_ASSIGN_OR_RETURN(const int64_t size, NonNegative(message.dims(i), Indexed("dims", i)));
    type.dims.push_back(Dim(size));
  }
  if (message.layout() != v1::LAYOUT_UNSPECIFIED && message.layout() != v1::LAYOUT_ROW_MAJOR) {
    return Malformed(absl::StrCat("layout: ", message.layout(), " is no Layout (expected 0 or 1)"));
  }
  int previous = -1;
  for (const v1::TensorType::SymbolicDim& symbolic : message.symbolic_dims()) {
    if (symbolic.dim() <= previous || symbolic.dim() >= message.dims_size()) {
      return Malformed(absl::StrCat("symbolic_dims: expected ascending positions below ",
                                    message.dims_size(), ", got ", symbolic.dim()));
    }
    CHORUS_ASSIGN_OR_RETURN(type.dims[symbolic.dim()].symbol,
                            Natural(symbolic.symbol(), "symbolic_dims.symbol"));
    previous = symbolic.dim();
  }
  return type;
}

void ToProto(const TensorType& type, v1::TensorType* message) {
  message->set_dtype(ToProto(type.dtype));
  for (size_t i = 0; i < type.dims.size(); ++i) {
    message->add_dims(type.dims[i].size);
    if (!type.dims[i].is_symbolic()) continue;
    v1::TensorType::SymbolicDim* symbolic = message->add_symbolic_dims();
    symbolic->set_dim(static_cast<int32_t>(i));
    symbolic->set_symbol(type.dims[i].symbol);
  }
  message->set_layout(v1::LAYOUT_ROW_MAJOR);
}

absl::StatusOr<TensorId> FromProto(const v1::TensorId& message) {
  return SlotIdFrom<TensorId>(message);
}
void ToProto(TensorId id, v1::TensorId* message) { SlotIdTo(id, message); }
absl::StatusOr<GraphId> FromProto(const v1::GraphId& message) {
  return SlotIdFrom<GraphId>(message);
}
void ToProto(GraphId id, v1::GraphId* message) { SlotIdTo(id, message); }

absl::StatusOr<InstanceKey> FromProto(const v1::InstanceKey& message) {
  InstanceKey key;
  CHORUS_ASSIGN_OR_RETURN(const int32_t group, Natural(message.group(), "group"));
  key.group = GroupId(group);
  CHORUS_ASSIGN_OR_RETURN(const int64_t since, NonNegative(message.since(), "since"));
  key.since = Epoch(since == 0 ? 1 : since);
  CHORUS_ASSIGN_OR_RETURN(key.at, PositionFrom(message));
  CHORUS_RETURN_IF_ERROR(PairFrom(message, &key));
  if (static_cast<size_t>(message.gradient_path_size()) > kMaxGradientOrder) {
    return Malformed(absl::StrCat("gradient_path: expected at most ", kMaxGradientOrder,
                                  " requests, got ", message.gradient_path_size()));
  }
  for (int i = 0; i < message.gradient_path_size(); ++i) {
    const auto request_from =
        [&from = message.gradient_path(i)]() -> absl::StatusOr<InstanceKey::Request> {
      InstanceKey::Request request;
      CHORUS_ASSIGN_OR_RETURN(request.step, CallNumber(from.step(), "step"));
      CHORUS_ASSIGN_OR_RETURN(request.number, CallNumber(from.number(), "number"));
      return request;
    };
    CHORUS_ASSIGN_FIELD(Indexed("gradient_path", i), const InstanceKey::Request request,
                        request_from());
    key.path.push_back(request);
  }
  return key;
}

void ToProto(const InstanceKey& key, v1::InstanceKey* message) {
  message->set_group(key.group.value());
  message->set_since(key.since.value());
  PositionTo(key.at, message);
  if (key.is_pair()) {
    message->set_source(key.source.value());
    message->set_destination(key.destination.value());
  }
  message->set_tag(key.tag);
  for (const InstanceKey::Request& request : key.path) {
    v1::InstanceKey::Request* to = message->add_gradient_path();
    to->set_step(request.step);
    to->set_number(request.number);
  }
}

absl::StatusOr<Graph> FromProto(const v1::Graph& message, const DecodeLimits& limits) {
  Graph graph;
  CHORUS_ASSIGN_OR_RETURN(graph.ir_version, Natural(message.ir_version(), "ir_version"));
  if (graph.ir_version == 0) graph.ir_version = 1;
  if (graph.ir_version != Graph::kIrVersion) {
    return MakeError(Reason::kVersion, absl::StrCat(": IR version ", graph.ir_version,
                                                    ", this build reads ", Graph::kIrVersion));
  }
  // A message of few bytes may be a graph of many: what the daemon would refuse is not made here.
  if (message.nodes_size() > limits.max_nodes) {
    return Malformed(
        absl::StrCat("nodes: expected at most ", limits.max_nodes, ", got ", message.nodes_size()));
  }
  int64_t memory = static_cast<int64_t>(sizeof(Graph)) +
                   message.inputs_size() * static_cast<int64_t>(sizeof(GraphInput)) +
                   message.nodes_size() * static_cast<int64_t>(sizeof(Node));
  if (memory > limits.max_bytes) return TooMuchMemory("", limits.max_bytes, memory);
  graph.inputs.reserve(message.inputs_size());
  for (int i = 0; i < message.inputs_size(); ++i) {
    CHORUS_ASSIGN_FIELD(Indexed("inputs", i), GraphInput input, GraphInputFrom(message.inputs(i)));
    graph.inputs.push_back(std::move(input));
  }
  graph.nodes.reserve(message.nodes_size());
  for (int i = 0; i < message.nodes_size(); ++i) {
    CHORUS_ASSIGN_FIELD(Indexed("nodes", i), Node node, NodeFrom(message.nodes(i)));
    memory += MemoryBehind(node);
    if (memory > limits.max_bytes) return TooMuchMemory("", limits.max_bytes, memory);
    graph.nodes.push_back(std::move(node));
  }
  for (int i = 0; i < message.outputs_size(); ++i) {
    CHORUS_ASSIGN_FIELD(Indexed("outputs", i), const GraphOutput output,
                        GraphOutputFrom(message.outputs(i)));
    graph.outputs.push_back(output);
  }
  CHORUS_ASSIGN_OR_RETURN(graph.num_device_slots,
                          Natural(message.device_slot_count(), "device_slot_count"));
  if (graph.num_device_slots == 0) graph.num_device_slots = 1;
  for (int i = 0; i < message.group_slots_size(); ++i) {
    CHORUS_ASSIGN_FIELD(Indexed("group_slots", i), GroupSlot slot,
                        GroupSlotFrom(message.group_slots(i)));
    graph.group_slots.push_back(std::move(slot));
  }
  CHORUS_ASSIGN_OR_RETURN(graph.num_instance_slots,
                          Natural(message.instance_slot_count(), "instance_slot_count"));
  for (int i = 0; i < message.size_rules_size(); ++i) {
    CHORUS_ASSIGN_FIELD(Indexed("size_rules", i), SizeRule rule,
                        SizeRuleFrom(message.size_rules(i)));
    graph.sizes.push_back(rule);
  }
  memory = MemoryOf(graph);
  if (memory > limits.max_bytes) return TooMuchMemory("", limits.max_bytes, memory);
  return graph;
}

void ToProto(const Graph& graph, v1::Graph* message) {
  message->set_ir_version(graph.ir_version);
  for (const GraphInput& input : graph.inputs) {
    v1::GraphInput* to = message->add_inputs();
    ToProto(input.type, to->mutable_type());
    to->set_role(RoleTo(input.role));
    to->set_donatable(input.donatable);
    to->set_device_slot(input.device_slot);
  }
  for (const Node& node : graph.nodes) NodeTo(node, message->add_nodes());
  for (const GraphOutput& output : graph.outputs) {
    v1::GraphOutput* to = message->add_outputs();
    to->set_value(output.value);
    to->set_role(RoleTo(output.role));
    if (output.may_alias >= 0) to->set_may_alias(output.may_alias);
  }
  message->set_device_slot_count(graph.num_device_slots);
  for (const GroupSlot& slot : graph.group_slots) {
    v1::GroupSlot* to = message->add_group_slots();
    to->set_size(slot.size);
    for (GroupRank rank : slot.held) to->add_held_ranks(rank.value());
    to->mutable_device_slots()->Add(slot.device_slots.begin(), slot.device_slots.end());
  }
  message->set_instance_slot_count(graph.num_instance_slots);
  for (const SizeRule& rule : graph.sizes) {
    v1::SizeRule* to = message->add_size_rules();
    to->set_node(rule.node);
    switch (rule.field) {
      case SizeRule::Field::kAttribute:
        to->set_attribute(rule.attribute);
        break;
      case SizeRule::Field::kCount:
        to->set_count(true);
        break;
      case SizeRule::Field::kRuntimeCountMaximum:
        to->set_runtime_count_maximum(true);
        break;
    }
    to->set_element(rule.element);
    to->set_symbol(rule.symbol);
    to->set_scale(rule.scale);
    to->set_offset(rule.offset);
  }
}

absl::StatusOr<CommandBody> FromProto(const v1::RegisterGraph& message) {
  RegisterGraph command;
  CHORUS_ASSIGN_FIELD("id", command.graph, FromProto(message.id()));
  switch (message.source_case()) {
    case v1::RegisterGraph::kGraph: {
      // Two bytes of a message are a node, which takes hundreds: of more than a frame has room for
      // none is made.
      if (message.graph().nodes_size() > kMaxNodesOfFrame) {
        return Malformed(absl::StrCat("graph.nodes: expected at most ", kMaxNodesOfFrame, ", got ",
                                      message.graph().nodes_size(),
                                      "; a large graph goes through a staging arena (staged)"));
      }
      DecodeLimits limits;
      limits.max_bytes = kMaxClientGraphBytes;
      CHORUS_ASSIGN_FIELD("graph", const Graph graph, FromProto(message.graph(), limits));
      // Of a converted graph the node sees the bytes alone, which decode, as what would not has
      // been refused above.
      command.encoded = EncodeGraph(graph);
      return CommandBody(std::move(command));
    }
    case v1::RegisterGraph::kStaged: {
      CHORUS_ASSIGN_FIELD("staged.range", command.staged, RangeFrom(message.staged().range()));
      if (!command.staged.strides.empty()) {
        return Malformed("staged.range.strides: expected none, a graph is a row of bytes");
      }
      if (message.staged().size_bytes() < 1) {
        return Malformed(absl::StrCat("staged.size_bytes: expected a number >= 1, got ",
                                      message.staged().size_bytes()));
      }
      command.staged_bytes = message.staged().size_bytes();
      return CommandBody(std::move(command));
    }
    case v1::RegisterGraph::SOURCE_NOT_SET:
      break;
  }
  return Missing("graph or staged");
}

absl::StatusOr<CommandBody> FromProto(const v1::Run& message) {
  Run run;
  CHORUS_ASSIGN_FIELD("graph", run.graph, FromProto(message.graph()));
  for (int i = 0; i < message.inputs_size(); ++i) {
    CHORUS_ASSIGN_FIELD(Indexed("inputs", i), Binding binding, BindingFrom(message.inputs(i)));
    run.inputs.push_back(std::move(binding));
  }
  for (int i = 0; i < message.outputs_size(); ++i) {
    CHORUS_ASSIGN_FIELD(Indexed("outputs", i), OutBinding binding,
                        OutBindingFrom(message.outputs(i)));
    run.outputs.push_back(std::move(binding));
  }
  for (int i = 0; i < message.groups_size(); ++i) {
    CHORUS_ASSIGN_FIELD(Indexed("groups", i), RunGroup group, RunGroupFrom(message.groups(i)));
    run.groups.push_back(std::move(group));
  }
  // As of a graph's nodes.
  if (message.instances_size() > kMaxInstancesOfFrame) {
    return Malformed(absl::StrCat("instances: expected at most ", kMaxInstancesOfFrame, ", got ",
                                  message.instances_size()));
  }
  for (int i = 0; i < message.instances_size(); ++i) {
    CHORUS_ASSIGN_FIELD(Indexed("instances", i), InstanceKey key, FromProto(message.instances(i)));
    run.instances.push_back(std::move(key));
  }
  for (int i = 0; i < message.pair_calls_size(); ++i) {
    CHORUS_ASSIGN_OR_RETURN(const int64_t call,
                            CallNumber(message.pair_calls(i), Indexed("pair_calls", i)));
    run.pair_calls.push_back(call);
  }
  run.call_goes_on = message.call_goes_on();
  run.donate.assign(message.donate().begin(), message.donate().end());
  for (int i = 0; i < message.devices_size(); ++i) {
    CHORUS_ASSIGN_OR_RETURN(const int32_t device,
                            Natural(message.devices(i), Indexed("devices", i)));
    run.devices.push_back(DeviceIndex(device));
  }
  run.gang = static_cast<uint64_t>(message.gang_id());
  return CommandBody(std::move(run));
}

absl::StatusOr<CommandBody> FromProto(const v1::CreateTensor& message) {
  CreateTensor create;
  CHORUS_ASSIGN_FIELD("id", create.tensor, FromProto(message.id()));
  CHORUS_ASSIGN_FIELD("type", create.type, FromProto(message.type()));
  CHORUS_ASSIGN_OR_RETURN(const int32_t device, Natural(message.device(), "device"));
  create.device = DeviceIndex(device);
  CHORUS_ASSIGN_FIELD("source", create.source, BindingFrom(message.source()));
  if (absl::holds_alternative<TensorId>(create.source)) {
    return Malformed("source: expected inline or external, got a tensor");
  }
  if (message.call_site().size() > kMaxSourceLineBytes) {
    return Malformed(absl::StrCat("call_site: expected at most ", kMaxSourceLineBytes,
                                  " bytes, got ", message.call_site().size()));
  }
  create.call_site = message.call_site();
  return CommandBody(std::move(create));
}

absl::StatusOr<CommandBody> FromProto(const v1::MakeReadable& message) {
  MakeReadable command;
  CHORUS_RETURN_IF_ERROR(NamesFrom(message.tensors(), "tensors", &command.tensors));
  return CommandBody(std::move(command));
}

absl::StatusOr<CommandBody> FromProto(const v1::Release& message) {
  Release release;
  CHORUS_RETURN_IF_ERROR(NamesFrom(message.tensors(), "tensors", &release.tensors));
  CHORUS_RETURN_IF_ERROR(NamesFrom(message.graphs(), "graphs", &release.graphs));
  for (int i = 0; i < message.arenas_size(); ++i) {
    CHORUS_ASSIGN_OR_RETURN(const int32_t arena, Natural(message.arenas(i), Indexed("arenas", i)));
    release.arenas.push_back(ArenaId(arena));
  }
  return CommandBody(std::move(release));
}

absl::StatusOr<Command> FromProto(const v1::Command& message) {
  Command command;
  if (message.sequence() < 1) {
    return Malformed(absl::StrCat("sequence: expected a number >= 1, got ", message.sequence()));
  }
  command.sequence = Sequence(message.sequence());
  CHORUS_ASSIGN_OR_RETURN(command.body, BodyFrom(message));
  return command;
}

absl::Status ToProto(const Command& command, v1::Command* message) {
  message->set_sequence(command.sequence.value());
  return absl::visit(BodyTo{message}, command.body);
}

Error FromProto(const v1::Error& message) {
  Error error;
  error.id = ErrorId(message.error_id());
  error.code = message.code() < 0 || message.code() > kLastCode
                   ? absl::StatusCode::kUnknown
                   : static_cast<absl::StatusCode>(message.code());
  error.reason = ReasonFromName(message.reason());
  error.message = message.message();
  if (message.culprit().has_rank()) error.culprit.rank = message.culprit().rank();
  if (message.culprit().has_pid()) error.culprit.pid = message.culprit().pid();
  error.culprit.node = message.culprit().node();
  error.instance = message.instance();
  error.op = message.op();
  error.source = message.source();
  error.expected = message.expected();
  error.got = message.got();
  error.alone = message.alone();
  for (const v1::Error::EndedEpoch& ended : message.ended()) {
    error.ended.push_back({WorldId(ended.world()), Epoch(ended.open_epoch())});
  }
  for (const v1::Error::Version& version : message.ranks()) {
    error.ranks.push_back({version.rank(), version.what(), version.source()});
  }
  return error;
}

void ToProto(const Error& error, v1::Error* message) {
  message->set_error_id(error.id.value());
  message->set_code(static_cast<int32_t>(error.code));
  message->set_reason(std::string(ReasonName(error.reason)));
  message->set_message(Utf8(error.message));
  if (error.culprit.rank >= 0) message->mutable_culprit()->set_rank(error.culprit.rank);
  if (error.culprit.pid >= 0) message->mutable_culprit()->set_pid(error.culprit.pid);
  if (!error.culprit.node.empty()) message->mutable_culprit()->set_node(Utf8(error.culprit.node));
  message->set_instance(Utf8(error.instance));
  message->set_op(Utf8(error.op));
  message->set_source(Utf8(error.source));
  message->set_expected(Utf8(error.expected));
  message->set_got(Utf8(error.got));
  for (const Error::Version& version : error.ranks) {
    v1::Error::Version* to = message->add_ranks();
    to->set_rank(version.rank);
    to->set_what(Utf8(version.what));
    to->set_source(Utf8(version.source));
  }
  for (const Error::EndedEpoch& ended : error.ended) {
    v1::Error::EndedEpoch* to = message->add_ended();
    to->set_world(ended.world.value());
    to->set_open_epoch(ended.open.value());
  }
  message->set_alone(error.alone);
}

}  // namespace chorus
