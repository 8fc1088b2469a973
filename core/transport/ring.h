// The submission ring: frames from one client to the daemon, through memory that both can write.
//
// Bytes of the ring hold records, one after the other, each padded to kRecordAlign. A record is a
// frame (frame_format.h); none crosses the end of the ring: where one does not fit, a skip record
// (kind kSkipKind) fills the rest. `tail` counts the bytes ever put in, `head` those ever taken
// out: 64 bits that never wrap, each on its own cache line.
//
// A frame is published by one store of `tail`. A client that dies before it leaves nothing behind.
//
// Threads: said at each class. Ownership: all refer to the session's memory, which outlives them; a
// Submitter has its eventfd. Errors: said at each function.
#ifndef CHORUS_CORE_TRANSPORT_RING_H_
#define CHORUS_CORE_TRANSPORT_RING_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/base/adaptive_spin.h"
#include "core/transport/doorbell.h"
#include "core/transport/frame_format.h"
#include "core/transport/session_memory.h"

namespace chorus {

inline constexpr size_t kRecordAlign = 8;

// How a client waits for the daemon.
struct WaitOptions {
  // Asked by a thread that sleeps, after each `look_around`: an error ends the wait with it. The
  // client library answers UNAVAILABLE when its daemon is gone. Empty: never asked.
  std::function<absl::Status()> liveness;
  absl::Duration look_around = absl::Milliseconds(100);
  SpinClock* clock = SpinClock::Real();
  AdaptiveSpinOptions spin;
};

// Client side.
//
// Threads: one at a time; the caller's lock also gives the frames their sequences.
class SubmissionRingWriter {
 public:
  // `memory` outlives this. The ring is the writer's alone, and new.
  explicit SubmissionRingWriter(SessionMemory* memory, WaitOptions options = {});

  // Largest frame that the ring takes.
  size_t max_frame_bytes() const;

  // Puts one frame into the ring and publishes it. False: no room now.
  // INVALID_ARGUMENT (MALFORMED): `frame` is larger than max_frame_bytes(), or its header states
  // another size or kSkipKind. INTERNAL: the daemon's words make no sense; the session is of no
  // more use.
  absl::StatusOr<bool> TryWrite(absl::string_view frame);

  // Whether the reader looks at nothing until it is rung for (doorbell.h); asked after each write.
  bool must_ring() const {
    return memory_->control().bell.must_ring.load(std::memory_order_seq_cst) != 0;  // C2
  }

  // Waits until a frame of `frame_bytes` fits: spins, then sleeps. At once when it fits already.
  // `deadline`: by SteadyNow (core/base/clock.h).
  // DEADLINE_EXCEEDED (TRANSPORT_TIMEOUT), or what `liveness` says.
  absl::Status WaitForSpace(size_t frame_bytes, absl::Time deadline);

 private:
  // Bytes to put in front so that the frame does not cross the end.
  uint64_t SkipFor(uint64_t record_bytes) const;
  // Whether a frame fits now. INTERNAL as above.
  absl::StatusOr<bool> Fits(size_t frame_bytes);

  SessionMemory* const memory_;
  const WaitOptions options_;
  const uint64_t ring_bytes_;
  uint64_t tail_ = 0;        // ours; the shared word is a copy
  uint64_t known_head_ = 0;  // as last read: the shared line is touched only when this is too old
  AdaptiveSpin spin_;
};

// Room for one frame outside shared memory. One serves all readers of a thread.
class FrameBuffer {
 public:
  FrameBuffer();
  char* data() { return bytes_.get(); }

 private:
  std::unique_ptr<char[]> bytes_;
};

// Daemon side. Whatever the client writes, and whenever: no read outside the ring, no loop without
// end, and every byte that is judged has been copied first.
//
// Threads: one at a time.
class SubmissionRingReader {
 public:
  enum class Result {
    kEmpty,
    kFrame,      // `*frame` points into the buffer, until its next use
    kMalformed,  // the client broke the rules: status() says how; it stays so
  };

  // `memory` outlives this.
  explicit SubmissionRingReader(SessionMemory* memory);

  // Takes the next frame out. Its size field equals its size and is at least kFrameHeaderBytes;
  // everything else is DecodeFrame's to check.
  Result Poll(FrameBuffer* buffer, absl::string_view* frame);

  // Whether Poll would give something other than kEmpty. Cheap: one load.
  bool HasFrame() const;

  // The reader will not look again until the writer rings (doorbell.h). False: there is a frame,
  // for which the writer may not have rung, and nothing has changed.
  bool StopLooking();
  void LookAgain();

  // INVALID_ARGUMENT (MALFORMED) after kMalformed, else OK.
  const absl::Status& status() const { return status_; }

 private:
  Result Refuse(absl::string_view what);
  void PublishHead();

  SessionMemory* const memory_;
  const uint64_t ring_bytes_;
  uint64_t head_ = 0;  // ours; the shared word is a copy that is never read back
  absl::Status status_;
};

// Client side: all that it takes to hand a frame to the daemon.
//
// Threads: one at a time, as for the writer.
class Submitter {
 public:
  // `memory` and `doorbell` outlive this; `wake_event` is taken over.
  Submitter(SessionMemory* memory, const DoorbellView* doorbell, UniqueFd wake_event,
            WaitOptions options = {});

  // Writes the frame, waiting for room at most `timeout` (mostly there is some, and then no clock
  // is read), and wakes the daemon if it sleeps or does not look. On an error nothing was written;
  // errors are the writer's.
  absl::Status Submit(absl::string_view frame, absl::Duration timeout);

  size_t max_frame_bytes() const { return writer_.max_frame_bytes(); }

 private:
  SubmissionRingWriter writer_;
  const DoorbellView* const doorbell_;
  const UniqueFd wake_event_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_TRANSPORT_RING_H_
