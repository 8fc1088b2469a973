// Outcomes of one session, from the daemon to the client: run records and the tensor table.
//
// A record is published by one store of its first word. A waiter looks at its record for a short
// while (AdaptiveSpin), then sleeps on `completed`.
//
// Why no wake is lost: the waiter counts itself in `completion_waiters`, reads `completed`, looks
// at its record and sleeps if `completed` still has that value. The daemon publishes records,
// changes `completed`, reads `completion_waiters`. The two stores and the two loads are
// sequentially consistent: if the daemon misses the waiter, the waiter reads the changed word, and
// with it the records published before. The daemon wakes a few; where there are more, each waiter
// that sees the word changed wakes one, and those that sleep for the change stand before those that
// have seen it.
//
// Threads: said at each class. Ownership: both refer to the session's memory, which outlives them.
// Errors: said at each function.
#ifndef CHORUS_CORE_TRANSPORT_COMPLETION_H_
#define CHORUS_CORE_TRANSPORT_COMPLETION_H_

#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/base/adaptive_spin.h"
#include "core/base/ids.h"
#include "core/transport/ring.h"
#include "core/transport/session_memory.h"

namespace chorus {

struct TensorRecord {
  TensorState state = TensorState::kEmpty;
  // kReady: where the bytes are. A client checks them against its own mapping of the arena.
  ArenaId arena;
  int64_t offset = 0;
  int64_t bytes = 0;
  // kFailed.
  absl::StatusCode code = absl::StatusCode::kOk;
  ErrorId error;
};

struct RunOutcome {
  absl::StatusCode code = absl::StatusCode::kOk;
  ErrorId error;  // 0: none recorded
};

// Daemon side.
//
// What comes late stays silent: a record that a later generation or run has is not touched. (That
// is read from the client's memory: one that changes it there misses its own outcomes.)
//
// Threads: one at a time.
class CompletionWriter {
 public:
  // `memory` outlives this.
  explicit CompletionWriter(SessionMemory* memory) : memory_(memory) {}

  // False, and nothing happens: the slot is not in the table (a client's error; check it where the
  // name comes in). Of `record`, kReady uses arena, offset and bytes, kFailed code and error.
  bool PublishTensor(TensorId id, const TensorRecord& record);
  // The record of the run that had this slot before is gone. Sequences start at 1.
  void PublishRun(Sequence sequence, const RunOutcome& outcome);
  // The first command that is not over though a later one may get its record; 0: there is none.
  void PublishUnfinished(Sequence oldest);
  // Makes waiters look: once for a batch of records. Nothing when none was published.
  void Signal();

 private:
  SessionMemory* const memory_;
  uint32_t completed_ = 0;  // ours; never read back
  bool published_ = false;
};

// Client side.
//
// Threads: any number. Deadlines: by SteadyNow (core/base/clock.h); absl::InfiniteFuture() is
// allowed; a wait may end a spin (at most 400 us) late.
class CompletionWaiter {
 public:
  // `memory` outlives this. `liveness` is also asked after WakeAll(); on the waiting thread.
  explicit CompletionWaiter(SessionMemory* memory, WaitOptions options = {});

  enum class Until {
    kDone,      // ready, on the device, or failed
    kReadable,  // ready or failed: for a client that has asked for the bytes
  };

  // The record of a tensor as it is: kEmpty while the daemon has not heard of this generation.
  // NOT_FOUND (UNKNOWN_NAME): the slot belongs to a later generation, or is not in the table.
  // INTERNAL: the record makes no sense.
  absl::StatusOr<TensorRecord> Tensor(TensorId id) const;
  // The outcome of a run, if there is one.
  // NOT_FOUND (OUTCOME_FORGOTTEN): a later run has the record; the daemon may know.
  absl::StatusOr<absl::optional<RunOutcome>> Run(Sequence sequence) const;
  // Of a run that is forgotten here, as Run() has just said: false: it is over.
  bool MayGoOn(Sequence sequence) const;

  // Waits. A failed tensor or run is an answer, not an error of the wait.
  // DEADLINE_EXCEEDED (TRANSPORT_TIMEOUT): not done by then; it goes on, ask again. Else what
  // `liveness` says, or the errors above.
  absl::StatusOr<TensorRecord> WaitForTensor(TensorId id, Until until, absl::Time deadline);
  absl::StatusOr<RunOutcome> WaitForRun(Sequence sequence, absl::Time deadline);

  // Makes all waits ask `liveness` now. For the thread that watches the daemon's process.
  void WakeAll();

 private:
  // Waits until `done()`; `what()` names it in the error.
  template <typename Done, typename What>
  absl::Status Await(const Done& done, absl::Time deadline, const What& what);

  SessionMemory* const memory_;
  const WaitOptions options_;
  AdaptiveSpin spin_;
  std::atomic<uint32_t> wakes_{0};  // WakeAll() calls
};

}  // namespace chorus

#endif  // CHORUS_CORE_TRANSPORT_COMPLETION_H_
