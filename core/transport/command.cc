#include "core/transport/command.h"

#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/source_line.h"
#include "core/tensor/type.h"

namespace chorus {
namespace {

constexpr uint64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
constexpr uint64_t kMaxInt64 = std::numeric_limits<int64_t>::max();
constexpr size_t kMinKeyBytes = 7;  // of an InstanceKey

enum BindingKind : uint8_t { kTensorBinding = 0, kInlineBinding = 1, kExternalBinding = 2 };
enum GraphPlace : uint8_t { kGraphInline = 0, kGraphStaged = 1 };
enum RefusedWhat : uint8_t { kGroupCalls = 0, kSends = 1, kRecvs = 2 };
// Flags of a run: what most have not. Then of a refusal, and of a refused member.
constexpr uint8_t kHasPairCalls = 1;
constexpr uint8_t kCallGoesOn = 2;
constexpr uint8_t kByHand = 1;
constexpr uint8_t kAlone = 2;
constexpr uint8_t kRestOfStep = 1;
constexpr uint8_t kDropsTapes = 2;

// Gathers numbers on the stack: a ByteWriter checks its room for each byte, and most frames are a
// few dozen small numbers.
class FrameWriter {
 public:
  explicit FrameWriter(ByteWriter* out) : out_(out) {}
  FrameWriter(const FrameWriter&) = delete;
  FrameWriter& operator=(const FrameWriter&) = delete;

  template <typename T>
  void Put(T value) {
    Reserve(sizeof(value));
    std::memcpy(end_, &value, sizeof(value));
    end_ += sizeof(value);
  }
  void PutVarint(uint64_t value) {
    Reserve(kMaxVarintBytes);
    char* at = end_;
    for (; value >= 0x80; value >>= 7) *at++ = static_cast<char>(value | 0x80);
    *at++ = static_cast<char>(value);
    end_ = at;
  }
  void PutSigned(int64_t value) { Flushed()->PutSigned(value); }
  void PutString(absl::string_view value) { Flushed()->PutString(value); }

  // The writer behind this, with all that was put so far.
  ByteWriter* Flushed() {
    out_->PutRaw(bytes_, static_cast<size_t>(end_ - bytes_));
    end_ = bytes_;
    return out_;
  }

 private:
  static constexpr size_t kMaxVarintBytes = 10;

  void Reserve(size_t bytes) {
    if (static_cast<size_t>(bytes_ + sizeof(bytes_) - end_) < bytes) Flushed();
  }

  ByteWriter* const out_;
  char* end_ = bytes_;
  char bytes_[128];
};

// Names and offsets are never negative, so they go as plain varints; a negative one becomes a
// number that is too large, which the decoder refuses.
void Put32(int32_t value, FrameWriter* out) { out->PutVarint(static_cast<uint32_t>(value)); }
void Put64(int64_t value, FrameWriter* out) { out->PutVarint(static_cast<uint64_t>(value)); }

template <typename Tag>
void PutId(SlotId<Tag> id, FrameWriter* out) {
  Put32(id.slot, out);
  out->PutVarint(id.generation);
}

void PutRange(const ExternalRange& range, FrameWriter* out) {
  Put32(range.arena.value(), out);
  Put64(range.offset, out);
  out->PutVarint(range.strides.size());
  for (const int64_t stride : range.strides) out->PutSigned(stride);
}

void PutBinding(const Binding& binding, FrameWriter* out) {
  if (const TensorId* tensor = absl::get_if<TensorId>(&binding)) {
    out->Put(kTensorBinding);
    PutId(*tensor, out);
  } else if (const InlineData* data = absl::get_if<InlineData>(&binding)) {
    out->Put(kInlineBinding);
    out->PutString(absl::string_view(data->bytes.data(), data->bytes.size()));
  } else {
    out->Put(kExternalBinding);
    PutRange(absl::get<ExternalRange>(binding), out);
  }
}

// The call's lowest bit says whether a part follows: few have one. A call out of range stays so.
void PutPosition(const CallPosition& at, FrameWriter* out) {
  Put64(at.step, out);
  const bool in_range = at.call >= 0 && at.call < kMaxCallNumber;
  Put64(in_range ? at.call * 2 + (at.part != 0 ? 1 : 0) : -1, out);
  if (at.part != 0) Put32(at.part, out);
}

template <typename Id>
void PutIds(const std::vector<Id>& ids, FrameWriter* out) {
  out->PutVarint(ids.size());
  for (const Id& id : ids) PutId(id, out);
}

// One overload for each body: the kind, then the bytes.
CommandKind PutBody(const RegisterGraph& body, FrameWriter* out) {
  PutId(body.graph, out);
  if (!body.encoded.empty()) {
    out->Put(kGraphInline);
    out->PutString(body.encoded);
  } else {
    out->Put(kGraphStaged);
    PutRange(body.staged, out);
    Put64(body.staged_bytes, out);
  }
  return CommandKind::kRegisterGraph;
}

CommandKind PutBody(const Run& body, FrameWriter* out) {
  PutId(body.graph, out);
  out->PutVarint(body.inputs.size());
  for (const Binding& input : body.inputs) PutBinding(input, out);
  out->PutVarint(body.outputs.size());
  for (const OutBinding& output : body.outputs) {
    out->Put(output.kind);
    if (output.kind == OutBinding::Kind::kFresh) PutId(output.id, out);
    if (output.kind == OutBinding::Kind::kInto) PutRange(output.into, out);
  }
  out->PutVarint(body.groups.size());
  for (const RunGroup& group : body.groups) {
    Put64(group.world.value(), out);
    Put32(group.group.value(), out);
    Put64(group.epoch.value(), out);
    out->PutVarint(group.base.size());
    for (const CallPosition& base : group.base) PutPosition(base, out);
  }
  out->Put(static_cast<uint8_t>((body.pair_calls.empty() ? 0 : kHasPairCalls) |
                                (body.call_goes_on ? kCallGoesOn : 0)));
  if (!body.pair_calls.empty()) {
    out->PutVarint(body.pair_calls.size());
    for (const int64_t call : body.pair_calls) Put64(call, out);
  }
  out->PutVarint(body.instances.size());
  for (const InstanceKey& key : body.instances) EncodeInstanceKey(key, out->Flushed());
  // One bit an input, the first one lowest.
  out->PutVarint(body.donate.size());
  for (size_t i = 0; i < body.donate.size(); i += 8) {
    uint8_t bits = 0;
    for (size_t j = i; j < body.donate.size() && j < i + 8; ++j) {
      bits = static_cast<uint8_t>(bits | (body.donate[j] ? 1 << (j - i) : 0));
    }
    out->Put(bits);
  }
  out->PutVarint(body.devices.size());
  for (const DeviceIndex device : body.devices) Put32(device.value(), out);
  out->PutVarint(body.gang);
  return CommandKind::kRun;
}

CommandKind PutBody(const CreateTensor& body, FrameWriter* out) {
  PutId(body.tensor, out);
  EncodeType(body.type, out->Flushed());
  Put32(body.device.value(), out);
  PutBinding(body.source, out);
  out->PutString(body.call_site);
  return CommandKind::kCreateTensor;
}

CommandKind PutBody(const MakeReadable& body, FrameWriter* out) {
  PutIds(body.tensors, out);
  return CommandKind::kMakeReadable;
}

CommandKind PutBody(const Release& body, FrameWriter* out) {
  PutIds(body.tensors, out);
  PutIds(body.graphs, out);
  out->PutVarint(body.arenas.size());
  for (const ArenaId arena : body.arenas) Put32(arena.value(), out);
  return CommandKind::kRelease;
}

CommandKind PutBody(const DropTape& body, FrameWriter* out) {
  out->PutVarint(body.entries.size());
  for (const DropTape::Entry& entry : body.entries) {
    Put64(entry.world.value(), out);
    Put32(entry.member.value(), out);
    EncodeInstanceKey(entry.key, out->Flushed());
    out->Put(static_cast<uint8_t>(entry.consumed ? 1 : 0));
  }
  return CommandKind::kDropTape;
}

CommandKind PutBody(const Cancel& body, FrameWriter* out) {
  Put64(body.run.value(), out);
  return CommandKind::kCancel;
}

CommandKind PutBody(const EnterEpoch& body, FrameWriter* out) {
  Put64(body.world.value(), out);
  Put64(body.epoch.value(), out);
  return CommandKind::kEnterEpoch;
}

CommandKind PutBody(const Refuse& body, FrameWriter* out) {
  Put64(body.world.value(), out);
  Put64(body.epoch.value(), out);
  out->Put(static_cast<uint8_t>((body.by_hand ? kByHand : 0) | (body.why.alone ? kAlone : 0)));
  out->PutVarint(body.members.size());
  for (const RefusedMember& member : body.members) {
    Put32(member.rank.value(), out);
    Put64(member.step, out);
    out->Put(static_cast<uint8_t>((member.rest_of_step ? kRestOfStep : 0) |
                                  (member.drops_tapes ? kDropsTapes : 0)));
    out->PutVarint(member.calls.size());
    for (const RefusedCalls& calls : member.calls) {
      Put32(calls.group.value(), out);
      if (calls.source.value() < 0) {
        out->Put(kGroupCalls);
      } else {
        out->Put(calls.is_recv ? kRecvs : kSends);
        Put32(calls.source.value(), out);
        Put32(calls.destination.value(), out);
        out->PutSigned(calls.tag);
      }
      Put64(calls.first, out);
      Put64(calls.next, out);
    }
    out->PutVarint(member.gradients.size());
    for (const InstanceKey& key : member.gradients) EncodeInstanceKey(key, out->Flushed());
  }
  out->Put(static_cast<uint8_t>(body.why.code));
  out->PutVarint(static_cast<uint64_t>(body.why.reason));
  out->PutString(body.why.message);
  out->PutString(body.why.source);
  return CommandKind::kRefuse;
}

// Reads one frame's body and remembers the first field that was wrong.
class BodyReader {
 public:
  explicit BodyReader(absl::string_view body) : in_(body) {}

  bool ok() const { return in_.ok(); }
  bool Done() const { return in_.Done(); }
  size_t remaining() const { return in_.remaining(); }
  // What was expected where decoding stopped.
  const char* wrong() const { return wrong_ == nullptr ? "nothing more" : wrong_; }

  // `expected` is what the error says.
  int32_t Number32(const char* expected) {
    return static_cast<int32_t>(Check(in_.GetVarint(), kMaxInt32, expected));
  }
  int64_t Number64(const char* expected) {
    return static_cast<int64_t>(Check(in_.GetVarint(), kMaxInt64, expected));
  }
  uint64_t Unsigned64(const char* expected) {
    return Check(in_.GetVarint(), ~uint64_t{0}, expected);
  }
  // A step, or how many calls there have been.
  int64_t CallNumber(const char* expected) {
    return static_cast<int64_t>(Check(in_.GetVarint(), kMaxCallNumber - 1, expected));
  }
  uint8_t Byte(uint8_t maximum, const char* expected) {
    return static_cast<uint8_t>(Check(in_.Get<uint8_t>(), maximum, expected));
  }
  size_t Count(size_t min_bytes_each, const char* expected) {
    return Check(in_.GetCount(min_bytes_each), ~uint64_t{0}, expected);
  }
  template <typename Id>
  Id SlotName(const char* expected) {
    Id id;
    id.slot = Number32(expected);
    id.generation = static_cast<uint32_t>(
        Check(in_.GetVarint(), std::numeric_limits<uint32_t>::max(), expected));
    return id;
  }
  int64_t Signed(const char* expected) {
    const int64_t value = in_.GetSigned();
    Expect(true, expected);
    return value;
  }
  absl::string_view String(size_t maximum, const char* expected) {
    const absl::string_view bytes = in_.GetString();
    Expect(bytes.size() <= maximum, expected);
    return bytes;
  }

  ExternalRange Range() {
    ExternalRange range;
    range.arena = ArenaId(Number32("an arena's number"));
    range.offset = Number64("an offset in an arena");
    const size_t strides = Count(1, "a count of strides");
    if (!Expect(strides <= TensorType::kMaxRank, "at most 16 strides")) return range;
    range.strides.reserve(strides);
    for (size_t i = 0; i < strides; ++i) range.strides.push_back(in_.GetSigned());
    Expect(true, "strides");
    return range;
  }

  void Source(Binding* source) {
    switch (Byte(kExternalBinding, "a binding: 0 (tensor), 1 (inline) or 2 (external)")) {
      case kInlineBinding: {
        const absl::string_view bytes =
            String(InlineData::kMaxBytes, "inline data of at most 64 bytes");
        InlineData& data = source->emplace<InlineData>();
        if (ok()) data.bytes.assign(bytes.begin(), bytes.end());
        break;
      }
      case kExternalBinding:
        *source = Range();
        break;
      default:
        *source = SlotName<TensorId>("a tensor's name");
    }
  }

  InstanceKey Key() {
    InstanceKey key = DecodeInstanceKey(&in_);
    Expect(true, "an instance's key");
    return key;
  }

  CallPosition Position() {
    CallPosition at;
    at.step = CallNumber("a step below 2^48");
    const uint64_t call = Check(in_.GetVarint(), kMaxCallNumber * 2 - 1, "a call below 2^48");
    at.call = static_cast<int64_t>(call / 2);
    if (call % 2 != 0) {
      at.part = Number32("the part of a call");
      Expect(at.part != 0, "the part of a call, not 0");
    }
    return at;
  }

  TensorType Type() {
    TensorType type = DecodeType(&in_);
    Expect(true, "a tensor type");
    return type;
  }

  // Fails the whole frame unless `condition` holds and everything could be read.
  bool Expect(bool condition, const char* expected) {
    if (!condition) in_.Fail();
    if (!in_.ok() && wrong_ == nullptr) wrong_ = expected;
    return in_.ok();
  }

 private:
  uint64_t Check(uint64_t value, uint64_t maximum, const char* expected) {
    return Expect(value <= maximum, expected) ? value : 0;
  }

  ByteReader in_;
  const char* wrong_ = nullptr;
};

void ReadBody(BodyReader* in, RegisterGraph* body) {
  body->graph = in->SlotName<GraphId>("a graph's name");
  if (in->Byte(kGraphStaged, "0 (the graph's bytes) or 1 (where they are)") == kGraphInline) {
    const absl::string_view encoded = in->String(kMaxFrameBytes, "a graph's bytes");
    if (in->Expect(!encoded.empty(), "a graph's bytes")) {
      body->encoded.assign(encoded.data(), encoded.size());
    }
  } else {
    body->staged = in->Range();
    in->Expect(body->staged.strides.empty(), "a graph without strides");
    body->staged_bytes = in->Number64("the bytes of a staged graph");
  }
}

void ReadBody(BodyReader* in, Run* body) {
  body->graph = in->SlotName<GraphId>("a graph's name");
  const size_t inputs = in->Count(2, "a count of inputs");
  body->inputs.reserve(inputs);
  for (size_t i = 0; i < inputs && in->ok(); ++i) in->Source(&body->inputs.emplace_back());

  const size_t outputs = in->Count(1, "a count of outputs");
  body->outputs.reserve(outputs);
  for (size_t i = 0; i < outputs && in->ok(); ++i) {
    body->outputs.emplace_back();
    OutBinding& output = body->outputs.back();
    output.kind = static_cast<OutBinding::Kind>(
        in->Byte(static_cast<uint8_t>(OutBinding::Kind::kDiscard),
                 "an output's binding: 0 (fresh), 1 (into) or 2 (discard)"));
    if (output.kind == OutBinding::Kind::kFresh)
      output.id = in->SlotName<TensorId>("a tensor's name");
    if (output.kind == OutBinding::Kind::kInto) output.into = in->Range();
  }

  const size_t groups = in->Count(4, "a count of groups");
  body->groups.reserve(groups);
  for (size_t i = 0; i < groups && in->ok(); ++i) {
    body->groups.emplace_back();
    RunGroup& group = body->groups.back();
    group.world = WorldId(in->Number64("a world's number"));
    group.group = GroupId(in->Number32("a group's number"));
    group.epoch = Epoch(in->Number64("an epoch"));
    const size_t members = in->Count(2, "a count of members");
    group.base.reserve(members);
    for (size_t j = 0; j < members && in->ok(); ++j) {
      group.base.push_back(in->Position());
    }
  }

  const uint8_t flags = in->Byte(kHasPairCalls | kCallGoesOn, "a run's flags");
  if ((flags & kHasPairCalls) != 0) {
    const size_t calls = in->Count(1, "a count of pairs' calls");
    in->Expect(calls != 0, "a count of pairs' calls, not 0");
    body->pair_calls.reserve(calls);
    for (size_t i = 0; i < calls && in->ok(); ++i) {
      body->pair_calls.push_back(in->CallNumber("a pair's call below 2^48"));
    }
  }
  body->call_goes_on = (flags & kCallGoesOn) != 0;

  const size_t instances = in->Count(kMinKeyBytes, "a count of instances");
  body->instances.reserve(instances);
  for (size_t i = 0; i < instances && in->ok(); ++i) body->instances.push_back(in->Key());

  // Not Count: eight take a byte.
  const uint64_t donate = in->Unsigned64("a count of donation marks");
  if (!in->Expect(donate == 0 || donate == inputs, "a donation mark for each input, or none"))
    return;
  body->donate.reserve(donate);
  for (size_t i = 0; i < donate && in->ok(); i += 8) {
    const size_t bits = donate - i < 8 ? donate - i : 8;
    const uint8_t byte = in->Byte(static_cast<uint8_t>((1 << bits) - 1),
                                  "donation marks, the rest of the byte zero");
    for (size_t j = 0; j < bits; ++j) body->donate.push_back((byte >> j & 1) != 0);
  }

  const size_t devices = in->Count(1, "a count of devices");
  body->devices.reserve(devices);
  for (size_t i = 0; i < devices && in->ok(); ++i) {
    body->devices.push_back(DeviceIndex(in->Number32("a device's number")));
  }
  body->gang = in->Unsigned64("a gang's id");
}

void ReadBody(BodyReader* in, CreateTensor* body) {
  body->tensor = in->SlotName<TensorId>("a tensor's name");
  body->type = in->Type();
  body->device = DeviceIndex(in->Number32("a device's number"));
  in->Source(&body->source);
  in->Expect(!absl::holds_alternative<TensorId>(body->source),
             "a new tensor's source: 1 (inline) or 2 (external)");
  const absl::string_view site =
      in->String(kMaxSourceLineBytes, "a call site of at most 512 bytes");
  if (in->ok()) body->call_site.assign(site.data(), site.size());
}

template <typename Id>
void ReadIds(BodyReader* in, std::vector<Id>* ids, const char* expected) {
  const size_t count = in->Count(2, expected);
  ids->reserve(count);
  for (size_t i = 0; i < count && in->ok(); ++i) ids->push_back(in->SlotName<Id>(expected));
}

void ReadBody(BodyReader* in, MakeReadable* body) {
  ReadIds(in, &body->tensors, "tensors' names");
  in->Expect(body->tensors.size() <= MakeReadable::kMaxTensors, "at most 1024 tensors");
}

void ReadBody(BodyReader* in, Release* body) {
  ReadIds(in, &body->tensors, "tensors' names");
  ReadIds(in, &body->graphs, "graphs' names");
  const size_t arenas = in->Count(1, "arenas' numbers");
  body->arenas.reserve(arenas);
  for (size_t i = 0; i < arenas && in->ok(); ++i) {
    body->arenas.push_back(ArenaId(in->Number32("an arena's number")));
  }
}

void ReadBody(BodyReader* in, DropTape* body) {
  const size_t entries = in->Count(kMinKeyBytes + 3, "a count of tape entries");
  if (!in->Expect(entries <= DropTape::kMaxEntries, "at most 512 tape entries")) return;
  body->entries.reserve(entries);
  for (size_t i = 0; i < entries && in->ok(); ++i) {
    body->entries.emplace_back();
    DropTape::Entry& entry = body->entries.back();
    entry.world = WorldId(in->Number64("a world's number"));
    entry.member = GroupRank(in->Number32("a member's rank"));
    entry.key = in->Key();
    entry.consumed = in->Byte(1, "0 (abandoned) or 1 (consumed)") != 0;
  }
}

void ReadBody(BodyReader* in, Cancel* body) {
  body->run = Sequence(in->Number64("a run's number"));
}

void ReadBody(BodyReader* in, EnterEpoch* body) {
  body->world = WorldId(in->Number64("a world's number"));
  body->epoch = Epoch(in->Number64("an epoch"));
}

RefusedCalls ReadRefusedCalls(BodyReader* in) {
  RefusedCalls calls;
  calls.group = GroupId(in->Number32("a group's number"));
  const uint8_t what = in->Byte(kRecvs, "refused calls: 0 (of a group), 1 (sends) or 2 (receives)");
  if (what != kGroupCalls) {
    calls.is_recv = what == kRecvs;
    calls.source = GroupRank(in->Number32("a pair's source"));
    calls.destination = GroupRank(in->Number32("a pair's destination"));
    calls.tag = in->Signed("a pair's tag");
  }
  calls.first = in->CallNumber("a call below 2^48");
  calls.next = in->CallNumber("a call below 2^48");
  in->Expect(calls.first <= calls.next, "refused calls whose end is not before their start");
  return calls;
}

void ReadBody(BodyReader* in, Refuse* body) {
  body->world = WorldId(in->Number64("a world's number"));
  body->epoch = Epoch(in->Number64("an epoch"));
  const uint8_t how = in->Byte(kByHand | kAlone, "a refusal's flags");
  body->by_hand = (how & kByHand) != 0;
  body->why.alone = (how & kAlone) != 0;
  const size_t members = in->Count(5, "a count of members");
  if (!in->Expect(members >= 1 && members <= Refuse::kMaxMembers, "1 to 1024 members")) return;
  body->members.reserve(members);
  size_t room = Refuse::kMaxCalls;
  const auto count = [in, &room](size_t bytes_each, const char* what) -> size_t {
    const size_t n = in->Count(bytes_each, what);
    if (!in->Expect(n <= room, "at most 1024 refused calls and gradients")) return 0;
    room -= n;
    return n;
  };
  for (size_t i = 0; i < members && in->ok(); ++i) {
    RefusedMember& member = body->members.emplace_back();
    member.rank = Rank(in->Number32("a rank"));
    member.step = in->CallNumber("a step below 2^48");
    const uint8_t flags = in->Byte(kRestOfStep | kDropsTapes, "a member's flags");
    member.rest_of_step = (flags & kRestOfStep) != 0;
    member.drops_tapes = (flags & kDropsTapes) != 0;
    const size_t calls = count(4, "a count of refused calls");
    member.calls.reserve(calls);
    for (size_t j = 0; j < calls && in->ok(); ++j) member.calls.push_back(ReadRefusedCalls(in));
    const size_t gradients = count(kMinKeyBytes, "a count of gradients");
    member.gradients.reserve(gradients);
    for (size_t j = 0; j < gradients && in->ok(); ++j) {
      member.gradients.push_back(in->Key());
      in->Expect(member.gradients.back().is_gradient(), "a gradient's key");
    }
  }
  constexpr auto kLastCode = static_cast<uint8_t>(absl::StatusCode::kUnauthenticated);
  const uint8_t code = in->Byte(kLastCode, "a status code");
  in->Expect(code != 0, "a status code other than OK");
  body->why.code = static_cast<absl::StatusCode>(code);
  const uint64_t reason = in->Unsigned64("a reason");
  body->why.reason = ReasonFromName(ReasonName(static_cast<Reason>(reason)));
  in->Expect(static_cast<uint64_t>(body->why.reason) == reason, "a reason that this build knows");
  for (std::string* text : {&body->why.message, &body->why.source}) {
    const absl::string_view bytes = in->String(Error::kMaxBytes, "a text of at most 4096 bytes");
    if (in->ok()) text->assign(bytes.data(), bytes.size());
  }
}

template <typename Body>
absl::Status DecodeBody(absl::string_view bytes, const char* name, CommandBody* body) {
  BodyReader in(bytes);
  ReadBody(&in, &body->emplace<Body>());
  if (in.Done()) return absl::OkStatus();
  return Malformed(in.ok() ? absl::StrCat("frame of a ", name, ": expected its end, got ",
                                          in.remaining(), " bytes more")
                           : absl::StrCat("frame of a ", name, " with a body of ", bytes.size(),
                                          " bytes: expected ", in.wrong(),
                                          ", got something else or the end"));
}

absl::Status DecodeInto(absl::string_view frame, Command* command) {
  if (frame.size() < kFrameHeaderBytes || frame.size() > kMaxFrameBytes) {
    return Malformed(absl::StrCat("frame: expected ", kFrameHeaderBytes, " to ", kMaxFrameBytes,
                                  " bytes, got ", frame.size()));
  }
  FrameStart header;
  std::memcpy(&header, frame.data(), sizeof(header));
  if (header.size != frame.size()) {
    return Malformed(absl::StrCat("frame: expected the ", frame.size(),
                                  " bytes that came, its header says ", header.size));
  }
  if (header.version != kFrameVersion) {
    return MakeError(Reason::kVersion,
                     absl::StrCat("frame: this build speaks version ", kFrameVersion,
                                  ", the frame has version ", header.version));
  }
  int64_t sequence = 0;
  std::memcpy(&sequence, frame.data() + sizeof(header), sizeof(sequence));
  if (sequence < 1) {
    return Malformed(absl::StrCat("frame: expected a sequence from 1, got ", sequence));
  }
  const absl::string_view body = frame.substr(kFrameHeaderBytes);
  command->sequence = Sequence(sequence);
  switch (static_cast<CommandKind>(header.kind)) {
    case CommandKind::kRegisterGraph:
      return DecodeBody<RegisterGraph>(body, "RegisterGraph", &command->body);
    case CommandKind::kRun:
      return DecodeBody<Run>(body, "Run", &command->body);
    case CommandKind::kCreateTensor:
      return DecodeBody<CreateTensor>(body, "CreateTensor", &command->body);
    case CommandKind::kMakeReadable:
      return DecodeBody<MakeReadable>(body, "MakeReadable", &command->body);
    case CommandKind::kRelease:
      return DecodeBody<Release>(body, "Release", &command->body);
    case CommandKind::kDropTape:
      return DecodeBody<DropTape>(body, "DropTape", &command->body);
    case CommandKind::kCancel:
      return DecodeBody<Cancel>(body, "Cancel", &command->body);
    case CommandKind::kEnterEpoch:
      return DecodeBody<EnterEpoch>(body, "EnterEpoch", &command->body);
    case CommandKind::kRefuse:
      return DecodeBody<Refuse>(body, "Refuse", &command->body);
    default:
      return Malformed(absl::StrCat("frame: expected a kind of 1 to 9, got ", header.kind));
  }
}

}  // namespace

void EncodeFrame(const Command& command, ByteWriter* out) {
  const size_t start = out->size();
  FrameStart header{0, 0, kFrameVersion};
  FrameWriter frame(out);
  frame.Put(header);
  frame.Put(command.sequence.value());
  header.kind = static_cast<uint16_t>(
      absl::visit([&frame](const auto& body) { return PutBody(body, &frame); }, command.body));
  frame.Flushed();
  header.size = static_cast<uint32_t>(out->size() - start);
  out->Overwrite(start, header.size);
  out->Overwrite(start + sizeof(header.size), header.kind);
}

absl::StatusOr<Command> DecodeFrame(absl::string_view frame) {
  // One variable and one return: it is made where the caller wants it, for it is costly to move.
  absl::StatusOr<Command> command(absl::in_place);
  absl::Status status = DecodeInto(frame, &*command);
  if (!status.ok()) command = std::move(status);
  return command;
}

}  // namespace chorus
