// One session's log: its commands in their order, their outcomes, and the calls that wait for them.
//
// A command is taken once, in the order of its sequence. One that comes before its predecessor is
// held for a while; one that comes again is answered from the record.
//
// Records are of the last kKeptOutcomes commands, of all that are not over, however long ago they
// came, and of as many more that have failed. So what is not recorded is over and went well, unless
// a failure so long ago has been forgotten.
//
// Threads: the node thread. Ownership: a session owns its log, which has the frames that it holds
// and the callbacks that wait. Errors: said at each function; they come with the outcome.
#ifndef CHORUS_CORE_NODE_COMMAND_LOG_H_
#define CHORUS_CORE_NODE_COMMAND_LOG_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/base/error.h"
#include "core/base/ids.h"
#include "core/node/completions.h"
#include "core/node/records.h"
#include "core/node/requests.h"
#include "core/node/timers.h"
#include "core/node/waiters.h"
#include "core/runtime/budget.h"

namespace chorus::node {

class CommandLog {
 public:
  static constexpr int64_t kKeptOutcomes = 1024;
  static constexpr size_t kMaxHeldFrames = 1024;
  // Of the outcomes that it keeps, which are charged to nobody.
  static constexpr int64_t kMaxOutcomeBytes = int64_t{60} << 10;
  // What a frame that is held takes beside its bytes.
  static constexpr size_t kHeldRowBytes = 256;
  // Taken from one log before other sessions have their turn.
  static constexpr int kFramesPerTurn = 8;

  // What the logs of a node have in common. All outlive them.
  struct Shared {
    TimerQueue* timers = nullptr;
    const ErrorStore* errors = nullptr;
    absl::Duration gap_timeout;  // how long a frame may be held
  };

  // `tenant`: whose errors its outcomes are. What it holds is charged to `budget`. `completions` is
  // told each outcome, and outlives it.
  CommandLog(const Shared& shared, std::string tenant, BudgetRef budget, Completions* completions)
      : shared_(shared),
        tenant_(std::move(tenant)),
        budget_(std::move(budget)),
        completions_(completions) {}
  ~CommandLog();
  CommandLog(const CommandLog&) = delete;
  CommandLog& operator=(const CommandLog&) = delete;

  // The sequence of the command whose turn it is.
  Sequence next() const { return Sequence(next_); }
  int64_t taken() const { return next_ - 1; }

  // A caller that has sent a command and waits for its outcome. Names nobody once that has been
  // told.
  struct Sender {
    Sequence sequence;
    Waiters<Outcome>::Id id = 0;  // 0: nobody
  };
  // Waits no more, and is not told.
  void Forget(const Sender& sender);

  // The turn of `sequence` has come: next() moves on. `done`, unless null, gets the outcome, as do
  // those of Hold().
  Sender Begin(Sequence sequence, OnOutcome done);
  // `done` gets the outcome of a command that has come before: perhaps at once.
  Sender Repeat(Sequence sequence, OnOutcome done);
  // The command whose turn it is, or the end of earlier ones, takes longer than the node thread
  // may: nothing behind it is taken until each that was parked for goes on.
  void Park();
  void Unpark() { --parked_; }
  bool parked() const { return parked_ > 0; }
  // Calls `then` when every frame that is there, and that no gap or parking holds back, has been
  // taken: at once unless the log is parked. At `deadline` TRANSPORT_TIMEOUT; another error: why no
  // more will be taken. Returns the deadline's timer, as Wait() does; unless it is parked none.
  TimerQueue::Id WhenTaken(absl::Time deadline, std::function<void(const absl::Status&)> then);
  // The command is over: well, or with an error that is recorded.
  void Finish(Sequence sequence);
  void Finish(Sequence sequence, const Error& error);
  int64_t failed() const { return failed_; }  // commands that ended with an error

  // Whether a frame's turn has not come.
  bool IsEarly(Sequence sequence) const {
    return sequence.value() > next_ || (parked() && sequence.value() == next_);
  }
  // Keeps such a frame; unless null, `done` hears of it as for Begin(), or SEQUENCE_GAP when its
  // predecessors have not come in time, or at once where there is no room for it.
  Sender Hold(Sequence sequence, absl::string_view frame, absl::Time now, OnOutcome done);
  struct HeldFrame {
    Charge bytes;
    std::string frame;
  };
  // The held frame whose turn it is. Absent: there is none; then frames that are held behind
  // another gap have their time from `now` on, and the calls of WhenTaken() end. Not while it is
  // parked.
  absl::optional<HeldFrame> TakeHeld(absl::Time now);
  bool holds() const { return !held_.empty(); }

  // `done` gets the outcome of `sequence`, which may not have come yet: perhaps at once, at
  // `deadline` TRANSPORT_TIMEOUT. OUTCOME_FORGOTTEN: it is too long ago to say whether it failed.
  // Returns the deadline's timer, which waits as long as `done` does; of no deadline none.
  TimerQueue::Id Wait(Sequence sequence, absl::Time deadline, OnOutcome done);

  // No outcome will come any more: every call that waits gets `why`, and held frames go.
  void Abandon(const absl::Status& why);

 private:
  struct Record {
    int64_t sequence = 0;
    bool done = false;
    RunOutcome outcome;
  };
  struct Failure {
    int64_t sequence;
    RunOutcome outcome;
  };
  Record& RecordOf(Sequence sequence) {
    return records_[static_cast<size_t>(sequence.value() % kKeptOutcomes)];
  }
  // Null when it is not among the last.
  const Record* Find(Sequence sequence);
  // Absent: it is not over.
  absl::optional<absl::Status> StatusIfOver(Sequence sequence);
  // What a command that is over and not among the last came to.
  absl::Status PastStatus(Sequence sequence) const;
  // A later command gets the slot of this record, which says more than that all went well.
  void Displace(const Record& record);
  // The first of failures_ that is not before `sequence`.
  std::deque<Failure>::const_iterator FindFailure(int64_t sequence) const;
  void KeepFailure(int64_t sequence, const RunOutcome& outcome);
  absl::Status StatusOf(const RunOutcome& outcome) const;
  void Conclude(Sequence sequence, const RunOutcome& outcome);
  Sender AddSender(Sequence sequence, OnOutcome done);
  void Tell(Sequence sequence, const absl::Status& status);
  absl::StatusOr<Charge> ChargeHeld(size_t bytes) const;
  void LimitGap(absl::Time now);
  void RefuseHeld(const absl::Status& why);

  const Shared shared_;
  const std::string tenant_;
  const BudgetRef budget_;
  Completions* const completions_;
  int64_t next_ = 1;
  int parked_ = 0;
  int64_t failed_ = 0;
  Waiters<absl::Status> when_taken_;  // none unless it is parked
  std::map<int64_t, HeldFrame> held_;
  TimerQueue::Id gap_timer_;
  std::vector<Record> records_;  // of the last, by sequence; an idle session keeps none
  // Of those before them, by sequence: those that are not over, and those that have failed, of
  // which all up to `forgotten_` are not kept.
  absl::btree_set<int64_t> unfinished_;
  // By sequence. No tree, which may be half empty: with `records_` it has no more than
  // kMaxOutcomeBytes.
  std::deque<Failure> failures_;
  int64_t forgotten_ = 0;
  // Those that wait for a command.
  struct Waiting {
    Waiters<Outcome> senders;  // held with its frame, or since it was begun
    Waiters<Outcome> others;
  };
  // Those of `sequence` have become fewer.
  void DropWaiting(std::map<int64_t, Waiting>::iterator waiting) {
    if (waiting->second.senders.empty() && waiting->second.others.empty()) waiting_.erase(waiting);
  }
  std::map<int64_t, Waiting> waiting_;  // by sequence; none is empty
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_COMMAND_LOG_H_
