#include "core/transport/ring.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/failpoint.h"
#include "core/base/futex.h"

namespace chorus {
namespace {

constexpr uint64_t Padded(uint64_t bytes) {
  return (bytes + kRecordAlign - 1) / kRecordAlign * kRecordAlign;
}

// Where the byte after `count` bytes lies. The size is a power of two: a division would take longer
// than the rest of a write.
constexpr uint64_t Offset(uint64_t count, uint64_t ring_bytes) { return count & (ring_bytes - 1); }

static_assert(sizeof(FrameStart) == kRecordAlign, "fits into the smallest rest of the ring");

uint64_t MaxFrameBytes(uint64_t ring_bytes) {
  // With half of the ring a frame and the skip record before it always fit into an empty ring.
  return std::min<uint64_t>(kMaxFrameBytes, ring_bytes / 2);
}

absl::Status Damaged(absl::string_view what) {
  return MakeError(Reason::kInternal, absl::StrCat("submission ring: ", what));
}

}  // namespace

SubmissionRingWriter::SubmissionRingWriter(SessionMemory* memory, WaitOptions options)
    : memory_(memory),
      options_(std::move(options)),
      ring_bytes_(memory->ring_bytes()),
      spin_(options_.clock, options_.spin) {}

size_t SubmissionRingWriter::max_frame_bytes() const { return MaxFrameBytes(ring_bytes_); }

uint64_t SubmissionRingWriter::SkipFor(uint64_t record_bytes) const {
  const uint64_t to_end = ring_bytes_ - Offset(tail_, ring_bytes_);
  return record_bytes <= to_end ? 0 : to_end;
}

absl::StatusOr<bool> SubmissionRingWriter::Fits(size_t frame_bytes) {
  const uint64_t record = Padded(frame_bytes);
  const uint64_t bytes_needed = record + SkipFor(record);
  if (tail_ + bytes_needed - known_head_ <= ring_bytes_) return true;
  const uint64_t head = memory_->control().daemon.head.load(std::memory_order_acquire);
  if (tail_ - head > ring_bytes_) {
    return Damaged(absl::StrCat("expected the daemon's head within ", ring_bytes_,
                                " bytes before the tail ", tail_, ", got ", head));
  }
  known_head_ = head;
  return tail_ + bytes_needed - known_head_ <= ring_bytes_;
}

absl::StatusOr<bool> SubmissionRingWriter::TryWrite(absl::string_view frame) {
  FrameStart start{};
  if (frame.size() >= kFrameHeaderBytes) std::memcpy(&start, frame.data(), sizeof(start));
  if (frame.size() < kFrameHeaderBytes || frame.size() > max_frame_bytes() ||
      start.size != frame.size() || start.kind == kSkipKind) {
    return Malformed(absl::StrCat("submission ring: expected a frame of ", kFrameHeaderBytes,
                                  " to ", max_frame_bytes(),
                                  " bytes that states its size and kind, got ", frame.size(),
                                  " bytes that state ", start.size, " and kind ", start.kind));
  }
  CHORUS_ASSIGN_OR_RETURN(const bool fits, Fits(frame.size()));
  if (!fits) return false;
  const uint64_t record = Padded(frame.size());
  if (const uint64_t skip = SkipFor(record)) {
    const FrameStart skip_record{static_cast<uint32_t>(skip), kSkipKind, 0};
    std::memcpy(memory_->ring() + Offset(tail_, ring_bytes_), &skip_record, sizeof(skip_record));
    tail_ += skip;  // published together with the frame
  }
  CHORUS_FAILPOINT("ring.before_copy");
  char* const to = memory_->ring() + Offset(tail_, ring_bytes_);
  // In two parts, so that a fault test can stop between them.
  std::memcpy(to, frame.data(), kFrameHeaderBytes);
  CHORUS_FAILPOINT("ring.mid_copy");
  std::memcpy(to + kFrameHeaderBytes, frame.data() + kFrameHeaderBytes,
              frame.size() - kFrameHeaderBytes);
  CHORUS_FAILPOINT("ring.before_tail");
  tail_ += record;
  // Release for the frame's bytes; sequentially consistent for the doorbell (doorbell.h, C1).
  memory_->control().client.tail.store(tail_, std::memory_order_seq_cst);
  return true;
}

absl::Status SubmissionRingWriter::WaitForSpace(size_t frame_bytes, absl::Time deadline) {
  if (frame_bytes > max_frame_bytes()) {
    return Malformed(absl::StrCat("submission ring: expected a frame of at most ",
                                  max_frame_bytes(), " bytes, got ", frame_bytes));
  }
  SessionControl& control = memory_->control();
  absl::StatusOr<bool> fits = false;
  const auto ready = [&] {
    fits = Fits(frame_bytes);
    return !fits.ok() || *fits;
  };
  int64_t start = 0;
  if (spin_.Spin(ready, &start)) return fits.status();

  absl::Status status;
  for (;;) {
    // The daemon stores `head`, then reads `space_waiter`; this side the other way round, all
    // sequentially consistent: one of the two sees the other.
    control.client.space_waiter.store(1, std::memory_order_seq_cst);
    const uint32_t head =
        static_cast<uint32_t>(control.daemon.head.load(std::memory_order_seq_cst));
    if (ready()) {
      status = fits.status();
      break;
    }
    const absl::Duration left = deadline - SteadyNow();
    if (left <= absl::ZeroDuration()) {
      status = MakeError(Reason::kTransportTimeout,
                         absl::StrCat("submission ring: no room for ", frame_bytes,
                                      " bytes before the deadline; nothing was submitted"));
      break;
    }
    CHORUS_FAILPOINT("ring.waiting_for_space");
    const absl::Duration slice = std::min(left, options_.look_around);
    if (FutexWait(control.daemon.head, head, slice) == FutexResult::kTimeout && options_.liveness) {
      status = options_.liveness();
      if (!status.ok()) break;
    }
  }
  control.client.space_waiter.store(0, std::memory_order_relaxed);
  spin_.WaitEnded(options_.clock->NowNanos() - start);
  return status;
}

FrameBuffer::FrameBuffer() : bytes_(new char[kMaxFrameBytes]) {}

SubmissionRingReader::SubmissionRingReader(SessionMemory* memory)
    : memory_(memory), ring_bytes_(memory->ring_bytes()) {}

bool SubmissionRingReader::HasFrame() const {
  return memory_->control().client.tail.load(std::memory_order_seq_cst) != head_ || !status_.ok();
}

bool SubmissionRingReader::StopLooking() {
  memory_->control().bell.must_ring.store(1, std::memory_order_seq_cst);  // doorbell.h, D1
  if (!HasFrame()) return true;                                           // D2
  LookAgain();
  return false;
}

// Late is harmless: until the client sees it, it rings for nothing.
void SubmissionRingReader::LookAgain() {
  memory_->control().bell.must_ring.store(0, std::memory_order_relaxed);
}

SubmissionRingReader::Result SubmissionRingReader::Refuse(absl::string_view what) {
  status_ = Malformed(absl::StrCat("submission ring, after ", head_, " bytes: ", what));
  return Result::kMalformed;
}

void SubmissionRingReader::PublishHead() {
  SessionControl& control = memory_->control();
  control.daemon.head.store(head_, std::memory_order_seq_cst);
  if (control.client.space_waiter.load(std::memory_order_seq_cst) != 0) {
    FutexWake(control.daemon.head, 1);  // a ring has one writer
  }
}

SubmissionRingReader::Result SubmissionRingReader::Poll(FrameBuffer* buffer,
                                                        absl::string_view* frame) {
  if (!status_.ok()) return Result::kMalformed;
  const uint64_t tail = memory_->control().client.tail.load(std::memory_order_acquire);
  if (tail == head_) return Result::kEmpty;
  uint64_t available = tail - head_;  // modulo 2^64: a tail behind the head is far too much
  if (available > ring_bytes_ || available % kRecordAlign != 0) {
    return Refuse(absl::StrCat("expected a tail at most ", ring_bytes_,
                               " bytes ahead, in steps of ", kRecordAlign, ", got ", tail));
  }
  for (;;) {
    const uint64_t offset = Offset(head_, ring_bytes_);
    const char* const from = memory_->ring() + offset;
    FrameStart start;
    std::memcpy(&start, from, sizeof(start));
    // The copy is what counts from here: without this the compiler could read the ring again.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    const uint64_t record = Padded(start.size);
    const uint64_t to_end = ring_bytes_ - offset;
    if (start.kind == kSkipKind) {
      // A skip fills the rest of the ring and stands before a frame. At the ring's start it would
      // have to be the whole ring, with no room for a frame: there is never a second one.
      if (start.size != to_end || start.size >= available) {
        return Refuse(absl::StrCat("expected a skip record of the ", to_end,
                                   " bytes before the end, with a frame behind it, got one of ",
                                   start.size, " with ", available, " bytes published"));
      }
      head_ += start.size;
      available -= start.size;
      continue;
    }
    if (start.size < kFrameHeaderBytes || start.size > MaxFrameBytes(ring_bytes_) ||
        record > available || record > to_end) {
      return Refuse(absl::StrCat("expected a frame of ", kFrameHeaderBytes, " to ",
                                 std::min({MaxFrameBytes(ring_bytes_), available, to_end}),
                                 " bytes, got ", start.size));
    }
    CHORUS_FAILPOINT("ring_reader.before_copy");
    std::memcpy(buffer->data(), from, start.size);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    // The client may have changed the size between the two copies; what was checked is what counts.
    std::memcpy(buffer->data(), &start, sizeof(start));
    *frame = absl::string_view(buffer->data(), start.size);
    head_ += record;
    PublishHead();
    return Result::kFrame;
  }
}

Submitter::Submitter(SessionMemory* memory, const DoorbellView* doorbell, UniqueFd wake_event,
                     WaitOptions options)
    : writer_(memory, std::move(options)),
      doorbell_(doorbell),
      wake_event_(std::move(wake_event)) {}

absl::Status Submitter::Submit(absl::string_view frame, absl::Duration timeout) {
  CHORUS_ASSIGN_OR_RETURN(bool is_written, writer_.TryWrite(frame));
  if (!is_written) {
    const absl::Time deadline = SteadyNow() + timeout;
    while (!is_written) {
      CHORUS_RETURN_IF_ERROR(writer_.WaitForSpace(frame.size(), deadline));
      CHORUS_ASSIGN_OR_RETURN(is_written, writer_.TryWrite(frame));
    }
  }
  CHORUS_FAILPOINT("ring.before_doorbell");
  if (doorbell_->daemon_asleep() || writer_.must_ring()) RingWakeEvent(wake_event_.get());
  return absl::OkStatus();
}

}  // namespace chorus
