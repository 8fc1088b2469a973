#include "core/runtime/messages.h"

#include <cstddef>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "core/base/error.h"

namespace chorus {
namespace {

// An event's first byte: these, of one that has failed, and which kind it is.
constexpr int kFailed = 1;
constexpr int kHeldBack = 2;
constexpr int kIsOrigin = 4;
constexpr int kKindShift = 4;

uint64_t IdOf(const CompletionMessage& message) { return message.launch.value(); }
uint64_t IdOf(const LoadedMessage& message) { return message.plan.value(); }
uint64_t IdOf(const OpenedMessage& message) { return message.communicator.value(); }
uint64_t IdOf(const TransferredMessage& message) { return message.transfer.value(); }
uint64_t IdOf(const LostMessage&) { return 0; }

template <typename Message>
int FlagsOf(const Message& message) {
  return message.status.ok() ? 0 : kFailed;
}
int FlagsOf(const CompletionMessage& message) {
  if (message.status.ok()) return 0;
  return kFailed | (message.held_back ? kHeldBack : 0) | (message.is_origin ? kIsOrigin : 0);
}

absl::optional<EventMessage> EventOf(int kind, int flags, uint64_t id, absl::Status status) {
  constexpr int kKnown = kFailed | kHeldBack | kIsOrigin;
  const bool failed = (flags & kFailed) != 0;
  if (flags > (kind == 0 ? kKnown : kFailed) || (flags != 0 && !failed)) return absl::nullopt;
  switch (kind) {
    case 0:
      return CompletionMessage{LaunchId(id), std::move(status), (flags & kHeldBack) != 0,
                               (flags & kIsOrigin) != 0};
    case 1:
      return LoadedMessage{PlanId(id), std::move(status)};
    case 2:
      return OpenedMessage{CommunicatorId(id), std::move(status)};
    case 3:
      return TransferredMessage{TransferId(id), std::move(status)};
    case 4:
      if (id != 0 || !failed) return absl::nullopt;
      return LostMessage{std::move(status)};
    default:
      return absl::nullopt;
  }
}

// For a small collective these bytes are more work than its arithmetic, so they are laid out to be
// copied: a head with the counts, then the arrays, numbers as they stand in memory.
struct LaunchHead {
  uint64_t launch;
  uint64_t plan;
  uint32_t buffers;
  uint32_t collectives;
  uint32_t after;
  uint32_t left_out;
  uint32_t hold_back;
  uint32_t inlines;
  uint64_t commit;
  uint32_t uploads;
  int32_t lane;
};
struct BindingHead {
  uint64_t communicator;
  uint32_t present;
  int32_t rank;
};
struct InlineHead {
  int32_t buffer;
  uint32_t bytes;
};
static_assert(sizeof(LaunchHead) == 56 && sizeof(BindingHead) == 16 && sizeof(InlineHead) == 8,
              "no padding is sent");

bool IsLane(int32_t lane) { return lane >= 0 && lane < kMaxLanes; }

template <typename Array>
void PutArray(const Array& array, ByteWriter* out) {
  if (!array.empty()) out->PutRaw(array.data(), array.size() * sizeof(array[0]));
}

template <typename Head>
bool GetHead(ByteReader* in, Head* head) {
  const absl::string_view bytes = in->GetRaw(sizeof(Head));
  if (bytes.size() != sizeof(Head)) return false;
  std::memcpy(head, bytes.data(), sizeof(Head));
  return true;
}

template <typename Array>
bool GetArray(ByteReader* in, uint64_t count, Array* array) {
  constexpr size_t kEach = sizeof(typename Array::value_type);
  if (count > in->remaining() / kEach) return false;
  array->resize(static_cast<size_t>(count));
  if (count == 0) return true;
  const absl::string_view bytes = in->GetRaw(static_cast<size_t>(count) * kEach);
  std::memcpy(array->data(), bytes.data(), bytes.size());
  return true;
}

}  // namespace

void EncodeLaunch(const LaunchMessage& message, ByteWriter* out) {
  const LaunchHead head{message.launch.value(),
                        message.plan.value(),
                        static_cast<uint32_t>(message.buffers.size()),
                        static_cast<uint32_t>(message.collectives.size()),
                        static_cast<uint32_t>(message.after.size()),
                        static_cast<uint32_t>(message.left_out.size()),
                        message.hold_back,
                        static_cast<uint32_t>(message.inlines.size()),
                        message.commit.value(),
                        static_cast<uint32_t>(message.uploads.size()),
                        message.lane};
  out->PutRaw(&head, sizeof(head));
  PutArray(message.buffers, out);
  for (const LaunchMessage::CollectiveBinding& binding : message.collectives) {
    const BindingHead bound{binding.communicator.value(),
                            static_cast<uint32_t>(binding.present.size()), binding.rank};
    out->PutRaw(&bound, sizeof(bound));
    PutArray(binding.present, out);
  }
  PutArray(message.after, out);
  PutArray(message.uploads, out);
  PutArray(message.left_out, out);
  for (const LaunchMessage::Inline& in_line : message.inlines) {
    const InlineHead head{in_line.buffer, static_cast<uint32_t>(in_line.bytes.size())};
    out->PutRaw(&head, sizeof(head));
    PutArray(in_line.bytes, out);
  }
}

bool DecodeLaunchInto(absl::string_view bytes, LaunchMessage* message) {
  ByteReader in(bytes);
  LaunchHead head;
  if (!GetHead(&in, &head)) return false;
  message->launch = LaunchId(head.launch);
  message->lane = head.lane;
  message->plan = PlanId(head.plan);
  message->hold_back = head.hold_back == 1;
  message->commit = CommunicatorId(head.commit);
  if (!GetArray(&in, head.buffers, &message->buffers)) return false;
  if (head.collectives > in.remaining() / sizeof(BindingHead)) return false;
  message->collectives.resize(head.collectives);
  for (LaunchMessage::CollectiveBinding& binding : message->collectives) {
    BindingHead bound;
    if (!GetHead(&in, &bound)) return false;
    binding.communicator = CommunicatorId(bound.communicator);
    binding.rank = bound.rank;
    if (!GetArray(&in, bound.present, &binding.present)) return false;
  }
  if (!GetArray(&in, head.after, &message->after) ||
      !GetArray(&in, head.uploads, &message->uploads) ||
      !GetArray(&in, head.left_out, &message->left_out) ||
      head.inlines > in.remaining() / sizeof(InlineHead)) {
    return false;
  }
  message->inlines.resize(head.inlines);
  for (LaunchMessage::Inline& in_line : message->inlines) {
    InlineHead of;
    if (!GetHead(&in, &of) || of.bytes > LaunchMessage::Inline::kMaxBytes) return false;
    in_line.buffer = of.buffer;
    if (!GetArray(&in, of.bytes, &in_line.bytes)) return false;
  }
  return in.Done() && head.hold_back <= 1 && IsLane(head.lane);
}

absl::StatusOr<LaunchMessage> DecodeLaunch(absl::string_view bytes) {
  LaunchMessage message;
  if (!DecodeLaunchInto(bytes, &message)) {
    return Malformed(absl::StrCat("a launch of ", bytes.size(), " bytes does not decode"));
  }
  return message;
}

LaunchId LaunchOf(absl::string_view bytes) {
  LaunchHead head;
  ByteReader in(bytes);
  return GetHead(&in, &head) ? LaunchId(head.launch) : LaunchId();
}

int32_t LaneOf(absl::string_view bytes) {
  LaunchHead head;
  ByteReader in(bytes);
  return GetHead(&in, &head) && IsLane(head.lane) ? head.lane : 0;
}

void EncodeEvent(const EventMessage& message, ByteWriter* out) {
  const int kind = static_cast<int>(message.index());
  absl::visit(
      [kind, out](const auto& of) {
        out->Put(static_cast<uint8_t>(kind << kKindShift | FlagsOf(of)));
        out->PutVarint(IdOf(of));
        if (!of.status.ok()) out->PutString(EncodeError(ErrorOf(of.status)));
      },
      message);
}

absl::StatusOr<EventMessage> DecodeEvent(absl::string_view bytes) {
  ByteReader in(bytes);
  const int first = in.Get<uint8_t>();
  const int flags = first & ((1 << kKindShift) - 1);
  const uint64_t id = in.GetVarint();
  absl::Status status;
  if (flags != 0) status = ToStatus(DecodeError(in.GetString()));
  absl::optional<EventMessage> event = EventOf(first >> kKindShift, flags, id, std::move(status));
  if (!in.Done() || !event.has_value()) {
    return Malformed(absl::StrCat("an event of ", bytes.size(), " bytes does not decode"));
  }
  return *std::move(event);
}

}  // namespace chorus
