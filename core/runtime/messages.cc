#include "core/runtime/messages.h"

#include <cstddef>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace {

// Bits of a completion's flags, where it has any.
constexpr int kFailed = 1;
constexpr int kHeldBack = 2;
constexpr int kIsOrigin = 4;

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
static_assert(sizeof(LaunchHead) == 48 && sizeof(BindingHead) == 16 && sizeof(InlineHead) == 8,
              "no padding is sent");

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
                        message.commit.value()};
  out->PutRaw(&head, sizeof(head));
  PutArray(message.buffers, out);
  for (const LaunchMessage::CollectiveBinding& binding : message.collectives) {
    const BindingHead bound{binding.communicator.value(),
                            static_cast<uint32_t>(binding.present.size()), binding.rank};
    out->PutRaw(&bound, sizeof(bound));
    PutArray(binding.present, out);
  }
  PutArray(message.after, out);
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
  return in.Done() && head.hold_back <= 1;
}

absl::StatusOr<LaunchMessage> DecodeLaunch(absl::string_view bytes) {
  LaunchMessage message;
  if (!DecodeLaunchInto(bytes, &message)) {
    return Malformed(absl::StrCat("a launch of ", bytes.size(), " bytes does not decode"));
  }
  return message;
}

void EncodeCompletion(const CompletionMessage& message, ByteWriter* out) {
  out->PutVarint(message.launch.value());
  const int failed =
      kFailed | (message.held_back ? kHeldBack : 0) | (message.is_origin ? kIsOrigin : 0);
  out->Put(static_cast<uint8_t>(message.status.ok() ? 0 : failed));
  if (!message.status.ok()) out->PutString(EncodeError(ErrorOf(message.status)));
}

absl::StatusOr<CompletionMessage> DecodeCompletion(absl::string_view bytes) {
  ByteReader in(bytes);
  CompletionMessage message;
  message.launch = LaunchId(in.GetVarint());
  const uint8_t failed = in.Get<uint8_t>();
  message.held_back = (failed & kHeldBack) != 0;
  message.is_origin = (failed & kIsOrigin) != 0;
  if (failed != 0) message.status = ToStatus(DecodeError(in.GetString()));
  if (!in.Done() || failed > (kFailed | kHeldBack | kIsOrigin) ||
      (failed != 0 && (failed & kFailed) == 0)) {
    return Malformed(absl::StrCat("a completion of ", bytes.size(), " bytes does not decode"));
  }
  return message;
}

}  // namespace chorus
