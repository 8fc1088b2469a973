#include "core/transport/completion.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/failpoint.h"
#include "core/base/futex.h"

namespace chorus {
namespace {

constexpr int kStateBits = 8;

// By the daemon, for one change of `completed`: how long its thread takes is not the client's
// choice. With more waiters, each that sees a change wakes one more.
constexpr int kWakesPerSignal = 16;

uint64_t Word(uint32_t generation, TensorState state) {
  return static_cast<uint64_t>(generation) << kStateBits | static_cast<uint64_t>(state);
}

uint32_t Generation(uint64_t word) { return static_cast<uint32_t>(word >> kStateBits); }

std::string Name(TensorId id) { return absl::StrCat("tensor ", id.slot, ".", id.generation); }

absl::Status Damaged(absl::string_view what) {
  return MakeError(Reason::kInternal, absl::StrCat("session memory: ", what));
}

}  // namespace

// Fields are stored with release and loaded with acquire, not for each other's sake: a release
// store stays behind the store before it (the word that invalidates the record), and an acquire
// load stays ahead of the load after it (the word that is read again).

bool CompletionWriter::PublishTensor(TensorId id, const TensorRecord& record) {
  if (id.slot < 0 || static_cast<uint32_t>(id.slot) >= memory_->tensor_slots()) return false;
  TensorSlot& slot = memory_->tensors()[id.slot];
  // Released while it was pending, and its slot has been given away and settled since.
  if (Generation(slot.word.load(std::memory_order_relaxed)) > id.generation) return true;
  const bool ready = record.state == TensorState::kReady;
  const bool failed = record.state == TensorState::kFailed;
  if (ready || failed) {
    // While the rest changes the record says "pending": a reader that sees a mixture reads the word
    // again and finds it changed.
    slot.word.store(Word(id.generation, TensorState::kPending), std::memory_order_relaxed);
    CHORUS_FAILPOINT("completion_writer.mid_record");
    slot.arena.store(ready ? record.arena.value() : 0, std::memory_order_release);
    slot.offset.store(ready ? record.offset : 0, std::memory_order_release);
    slot.value.store(ready ? record.bytes : record.error.value(), std::memory_order_release);
    slot.code.store(failed ? static_cast<int32_t>(record.code) : 0, std::memory_order_release);
  }
  slot.word.store(Word(id.generation, record.state), std::memory_order_release);
  published_ = true;
  return true;
}

void CompletionWriter::PublishRun(Sequence sequence, const RunOutcome& outcome) {
  RunSlot& slot = memory_->runs()[static_cast<uint64_t>(sequence.value()) % kRunSlots];
  if (slot.sequence.load(std::memory_order_relaxed) > sequence.value()) return;
  slot.sequence.store(0, std::memory_order_relaxed);
  slot.code.store(static_cast<int32_t>(outcome.code), std::memory_order_release);
  slot.error.store(outcome.error.value(), std::memory_order_release);
  slot.sequence.store(sequence.value(), std::memory_order_release);
  published_ = true;
}

void CompletionWriter::PublishUnfinished(Sequence oldest) {
  memory_->control().completion.unfinished.store(oldest.value(), std::memory_order_release);
}

void CompletionWriter::Signal() {
  if (!published_) return;
  published_ = false;
  completed_ = (completed_ + 1) & ~kCompletedWakeBit;
  SessionControl& control = memory_->control();
  control.completion.completed.store(completed_, std::memory_order_seq_cst);
  if (control.client.completion_waiters.load(std::memory_order_seq_cst) != 0) {
    FutexWake(control.completion.completed, kWakesPerSignal);
  }
}

CompletionWaiter::CompletionWaiter(SessionMemory* memory, WaitOptions options)
    : memory_(memory), options_(std::move(options)), spin_(options_.clock, options_.spin) {}

absl::StatusOr<TensorRecord> CompletionWaiter::Tensor(TensorId id) const {
  if (id.slot < 0 || static_cast<uint32_t>(id.slot) >= memory_->tensor_slots()) {
    return UnknownName(absl::StrCat(Name(id), ": expected a slot below ", memory_->tensor_slots()));
  }
  const TensorSlot& slot = memory_->tensors()[id.slot];
  TensorRecord record;
  const uint64_t word = slot.word.load(std::memory_order_acquire);
  const uint32_t generation = Generation(word);
  if (generation != id.generation) {
    if (generation > id.generation) {
      return UnknownName(
          absl::StrCat(Name(id), " was released: its slot now belongs to generation ", generation));
    }
    return record;
  }
  const uint8_t state = static_cast<uint8_t>(word & 0xff);
  if (state > static_cast<uint8_t>(TensorState::kFailed)) {
    return Damaged(absl::StrCat(Name(id), ": expected a state of 0 to 4, got ", state));
  }
  const int32_t arena = slot.arena.load(std::memory_order_acquire);
  const int64_t offset = slot.offset.load(std::memory_order_acquire);
  const int64_t value = slot.value.load(std::memory_order_acquire);
  const int32_t code = slot.code.load(std::memory_order_acquire);
  if (slot.word.load(std::memory_order_relaxed) != word) {
    // It changed meanwhile. A caller that wants the new one looks again.
    record.state = TensorState::kPending;
    return record;
  }
  record.state = static_cast<TensorState>(state);
  if (record.state == TensorState::kReady) {
    record.arena = ArenaId(arena);
    record.offset = offset;
    record.bytes = value;
  } else if (record.state == TensorState::kFailed) {
    record.code = static_cast<absl::StatusCode>(code);
    record.error = ErrorId(value);
  }
  return record;
}

absl::StatusOr<absl::optional<RunOutcome>> CompletionWaiter::Run(Sequence sequence) const {
  const RunSlot& slot = memory_->runs()[static_cast<uint64_t>(sequence.value()) % kRunSlots];
  const int64_t owner = slot.sequence.load(std::memory_order_acquire);
  if (owner > sequence.value()) {
    return MakeError(Reason::kOutcomeForgotten,
                     absl::StrCat("run ", sequence.value(), ": its record went to run ", owner,
                                  "; the last ", kRunSlots, " outcomes are kept"));
  }
  if (owner != sequence.value()) return absl::optional<RunOutcome>();
  RunOutcome outcome;
  outcome.code = static_cast<absl::StatusCode>(slot.code.load(std::memory_order_acquire));
  outcome.error = ErrorId(slot.error.load(std::memory_order_acquire));
  // Changed meanwhile: the next look says that it is forgotten.
  if (slot.sequence.load(std::memory_order_relaxed) != owner) return absl::optional<RunOutcome>();
  return absl::optional<RunOutcome>(outcome);
}

bool CompletionWaiter::MayGoOn(Sequence sequence) const {
  const int64_t oldest = memory_->control().completion.unfinished.load(std::memory_order_acquire);
  return oldest != 0 && sequence.value() >= oldest;
}

template <typename Done, typename What>
absl::Status CompletionWaiter::Await(const Done& done, absl::Time deadline, const What& what) {
  int64_t start = 0;
  if (spin_.Spin(done, &start)) return absl::OkStatus();

  SessionControl& control = memory_->control();
  uint32_t wakes = wakes_.load(std::memory_order_seq_cst);
  control.client.completion_waiters.fetch_add(1, std::memory_order_seq_cst);
  absl::Status status;
  bool look_around = false;
  uint32_t slept_at = control.completion.completed.load(std::memory_order_seq_cst);
  for (;;) {
    const uint32_t completed = control.completion.completed.load(std::memory_order_seq_cst);
    // Of those that sleep the daemon has woken the first.
    if (std::exchange(slept_at, completed) != completed &&
        control.client.completion_waiters.load(std::memory_order_seq_cst) > kWakesPerSignal) {
      FutexWake(control.completion.completed, 1);
    }
    if (done()) break;
    const uint32_t wakes_now = wakes_.load(std::memory_order_seq_cst);
    if ((look_around || wakes_now != wakes) && options_.liveness) {
      wakes = wakes_now;
      status = options_.liveness();
      if (!status.ok()) break;
    }
    const absl::Duration left = deadline - SteadyNow();
    if (left <= absl::ZeroDuration()) {
      status = MakeError(Reason::kTransportTimeout,
                         absl::StrCat(what(), " was not done before the deadline; it goes on, and ",
                                      "its outcome can be asked for again"));
      break;
    }
    CHORUS_FAILPOINT("completion.waiting");
    look_around = FutexWait(control.completion.completed, completed,
                            std::min(left, options_.look_around)) == FutexResult::kTimeout;
  }
  control.client.completion_waiters.fetch_sub(1, std::memory_order_seq_cst);
  spin_.WaitEnded(options_.clock->NowNanos() - start);
  return status;
}

absl::StatusOr<TensorRecord> CompletionWaiter::WaitForTensor(TensorId id, Until until,
                                                             absl::Time deadline) {
  absl::StatusOr<TensorRecord> record = TensorRecord();
  const bool in_table = id.slot >= 0 && static_cast<uint32_t>(id.slot) < memory_->tensor_slots();
  const std::atomic<uint64_t>* const word = in_table ? &memory_->tensors()[id.slot].word : nullptr;
  // Looking is one load as long as nothing has changed.
  uint64_t last_word = Word(id.generation, TensorState::kPending);
  CHORUS_RETURN_IF_ERROR(Await(
      [&] {
        const uint64_t current_word = in_table ? word->load(std::memory_order_relaxed) : 0;
        if (in_table && current_word == last_word) return false;
        record = Tensor(id);
        if (!record.ok()) return true;
        // Of this generation: what the record says, which may be older or newer than
        // `current_word`. A record may change and end with the same word.
        last_word = record->state == TensorState::kEmpty ? current_word
                                                         : Word(id.generation, record->state);
        return record->state == TensorState::kReady || record->state == TensorState::kFailed ||
               (record->state == TensorState::kOnDevice && until == Until::kDone);
      },
      deadline, [&] { return Name(id); }));
  return record;
}

absl::StatusOr<RunOutcome> CompletionWaiter::WaitForRun(Sequence sequence, absl::Time deadline) {
  absl::StatusOr<absl::optional<RunOutcome>> outcome = absl::optional<RunOutcome>();
  CHORUS_RETURN_IF_ERROR(Await(
      [&] {
        outcome = Run(sequence);
        return !outcome.ok() || outcome->has_value();
      },
      deadline, [&] { return absl::StrCat("run ", sequence.value()); }));
  if (!outcome.ok()) return outcome.status();
  return **outcome;
}

void CompletionWaiter::WakeAll() {
  wakes_.fetch_add(1, std::memory_order_seq_cst);
  std::atomic<uint32_t>& completed = memory_->control().completion.completed;
  completed.fetch_xor(kCompletedWakeBit, std::memory_order_seq_cst);
  FutexWakeAll(completed);
}

}  // namespace chorus
