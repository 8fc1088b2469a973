#include "core/node/command_log.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/transport/session_memory.h"

namespace chorus::node {

// Where a later outcome has the slot in shared memory, the earlier command is not among the last
// here: so PublishUnfinished says whether it is over.
static_assert(CommandLog::kKeptOutcomes <= kRunSlots);

CommandLog::~CommandLog() { shared_.timers->Cancel(gap_timer_); }

CommandLog::Sender CommandLog::Begin(Sequence sequence, OnOutcome done) {
  ++next_;
  if (records_.empty()) records_.resize(kKeptOutcomes);
  Record& record = RecordOf(sequence);
  if (record.sequence != 0 && (!record.done || record.outcome.code != absl::StatusCode::kOk)) {
    Displace(record);
  }
  record = {sequence.value(), false, {}};
  return AddSender(sequence, std::move(done));
}

CommandLog::Sender CommandLog::AddSender(Sequence sequence, OnOutcome done) {
  if (done == nullptr) return {};
  return {sequence, waiting_[sequence.value()].senders.Add(std::move(done))};
}

CommandLog::Sender CommandLog::Repeat(Sequence sequence, OnOutcome done) {
  const absl::optional<absl::Status> status = StatusIfOver(sequence);
  if (!status.has_value()) return AddSender(sequence, std::move(done));
  if (done != nullptr) done({sequence, *status});
  return {};
}

void CommandLog::Forget(const Sender& sender) {
  const auto it = waiting_.find(sender.sequence.value());
  if (it == waiting_.end()) return;
  it->second.senders.Remove(sender.id);
  DropWaiting(it);
}

void CommandLog::Park() {
  ++parked_;
  shared_.timers->Cancel(gap_timer_);
}

TimerQueue::Id CommandLog::WhenTaken(absl::Time deadline,
                                     std::function<void(const absl::Status&)> then) {
  if (!parked()) {
    then(absl::OkStatus());
    return {};
  }
  // Whichever comes first ends the other.
  auto waiter = std::make_shared<Waiters<absl::Status>::Id>();
  const TimerQueue::Id timer = shared_.timers->Add(deadline, [this, waiter, then](absl::Time) {
    when_taken_.Remove(*waiter);
    then(MakeError(Reason::kTransportTimeout,
                   "the commands before it have not all been taken yet; ask again"));
  });
  *waiter = when_taken_.Add([this, timer, then](const absl::Status& status) {
    shared_.timers->Cancel(timer);
    then(status);
  });
  return timer;
}

void CommandLog::Finish(Sequence sequence) {
  Conclude(sequence, {absl::StatusCode::kOk, ErrorId()});
  if (!waiting_.empty()) Tell(sequence, absl::OkStatus());
}

void CommandLog::Finish(Sequence sequence, const Error& error) {
  ++failed_;
  Conclude(sequence, {error.code, error.id});
  if (!waiting_.empty()) Tell(sequence, ToStatus(error));
}

void CommandLog::Conclude(Sequence sequence, const RunOutcome& outcome) {
  completions_->PublishRun(sequence, outcome);
  Record& record = RecordOf(sequence);
  if (record.sequence == sequence.value()) {
    record = {sequence.value(), true, outcome};
    return;
  }
  unfinished_.erase(sequence.value());
  if (outcome.code != absl::StatusCode::kOk) KeepFailure(sequence.value(), outcome);
  completions_->PublishUnfinished(Sequence(unfinished_.empty() ? 0 : *unfinished_.begin()));
}

void CommandLog::Displace(const Record& record) {
  if (record.done) return KeepFailure(record.sequence, record.outcome);
  unfinished_.insert(record.sequence);
  completions_->PublishUnfinished(Sequence(*unfinished_.begin()));
}

std::deque<CommandLog::Failure>::const_iterator CommandLog::FindFailure(int64_t sequence) const {
  return std::lower_bound(failures_.begin(), failures_.end(), sequence,
                          [](const Failure& f, int64_t wanted) { return f.sequence < wanted; });
}

void CommandLog::KeepFailure(int64_t sequence, const RunOutcome& outcome) {
  // A deque's blocks are not all full.
  static_assert(kKeptOutcomes * int64_t{sizeof(Record) + sizeof(Failure)} + 2048 <=
                kMaxOutcomeBytes);
  failures_.insert(FindFailure(sequence), {sequence, outcome});
  if (static_cast<int64_t>(failures_.size()) <= kKeptOutcomes) return;
  forgotten_ = std::max(forgotten_, failures_.front().sequence);
  failures_.pop_front();
}

void CommandLog::Tell(Sequence sequence, const absl::Status& status) {
  const auto it = waiting_.find(sequence.value());
  if (it == waiting_.end()) return;
  Waiting waiting = std::move(it->second);
  waiting_.erase(it);
  waiting.senders.Call({sequence, status});
  waiting.others.Call({sequence, status});
}

// --- Held frames --------------------------------------------------------------------------------

CommandLog::Sender CommandLog::Hold(Sequence sequence, absl::string_view frame, absl::Time now,
                                    OnOutcome done) {
  if (held_.count(sequence.value()) > 0) return AddSender(sequence, std::move(done));
  absl::StatusOr<Charge> charge = ChargeHeld(frame.size());
  if (!charge.ok()) {
    // Of its gap: QUOTA or OUT_OF_MEMORY is what a command may have come to that was taken.
    if (done != nullptr) {
      done({sequence, MakeError(Reason::kSequenceGap,
                                absl::StrCat("command ", sequence.value(), " came before command ",
                                             next_, ", and is not kept until that comes: ",
                                             ErrorOf(charge.status()).message))});
    }
    return {};
  }
  HeldFrame held;
  held.bytes = *std::move(charge);
  held.frame = std::string(frame);
  held_.emplace(sequence.value(), std::move(held));
  // Else the timer runs, or will when the log goes on.
  if (held_.size() == 1 && !parked()) LimitGap(now);
  return AddSender(sequence, std::move(done));
}

absl::StatusOr<Charge> CommandLog::ChargeHeld(size_t bytes) const {
  if (held_.size() >= kMaxHeldFrames) {
    return MakeError(Reason::kQuota,
                     absl::StrCat(kMaxHeldFrames, " commands already wait for command ", next_));
  }
  return budget_->Charge(Domain::kHost, Resource::kCommandBytes,
                         static_cast<int64_t>(bytes + kHeldRowBytes));
}

absl::optional<CommandLog::HeldFrame> CommandLog::TakeHeld(absl::Time now) {
  if (!held_.empty() && held_.begin()->first == next_) {
    HeldFrame held = std::move(held_.begin()->second);
    held_.erase(held_.begin());
    return held;
  }
  shared_.timers->Cancel(gap_timer_);
  if (!held_.empty()) LimitGap(now);
  when_taken_.Call(absl::OkStatus());
  return absl::nullopt;
}

void CommandLog::LimitGap(absl::Time now) {
  gap_timer_ = shared_.timers->Add(now + shared_.gap_timeout, [this, missing = next_](absl::Time) {
    RefuseHeld(MakeError(
        Reason::kSequenceGap,
        absl::StrCat("command ", missing, " did not arrive within ",
                     absl::FormatDuration(shared_.gap_timeout),
                     "; the commands after it were not executed: send it, then them again")));
  });
}

void CommandLog::RefuseHeld(const absl::Status& why) {
  const auto held = std::move(held_);
  held_.clear();
  for (const auto& entry : held) {
    const auto it = waiting_.find(entry.first);
    if (it == waiting_.end()) continue;
    Waiters<Outcome> senders = std::exchange(it->second.senders, {});
    DropWaiting(it);
    senders.Call({Sequence(entry.first), why});
  }
}

// --- Waiting ------------------------------------------------------------------------------------

const CommandLog::Record* CommandLog::Find(Sequence sequence) {
  if (records_.empty() || sequence.value() <= 0) return nullptr;
  const Record& record = RecordOf(sequence);
  return record.sequence == sequence.value() ? &record : nullptr;
}

absl::Status CommandLog::PastStatus(Sequence sequence) const {
  const auto failure = FindFailure(sequence.value());
  if (failure != failures_.end() && failure->sequence == sequence.value()) {
    return StatusOf(failure->outcome);
  }
  if (sequence.value() > forgotten_) return absl::OkStatus();
  return MakeError(Reason::kOutcomeForgotten,
                   absl::StrCat("command ", sequence.value(), " is not among the last ",
                                kKeptOutcomes, " of this session, nor among the last ",
                                kKeptOutcomes, " before these that have failed"));
}

absl::Status CommandLog::StatusOf(const RunOutcome& outcome) const {
  if (outcome.code == absl::StatusCode::kOk) return absl::OkStatus();
  if (absl::optional<Error> error = shared_.errors->Find(outcome.error, tenant_)) {
    return ToStatus(*error);
  }
  return MakeError(
      Reason::kOutcomeForgotten,
      absl::StrCat("it failed with ", absl::StatusCodeToString(outcome.code), ", error ",
                   outcome.error.value(), ", which is too old: its details are forgotten"));
}

absl::optional<absl::Status> CommandLog::StatusIfOver(Sequence sequence) {
  const Record* const record = Find(sequence);
  if (record != nullptr && record->done) return StatusOf(record->outcome);
  if (record == nullptr && sequence.value() < next_ && unfinished_.count(sequence.value()) == 0) {
    return PastStatus(sequence);
  }
  return absl::nullopt;
}

TimerQueue::Id CommandLog::Wait(Sequence sequence, absl::Time deadline, OnOutcome done) {
  const absl::optional<absl::Status> status = StatusIfOver(sequence);
  if (status.has_value()) {
    done({sequence, *status});
    return {};
  }
  if (deadline == absl::InfiniteFuture()) {
    waiting_[sequence.value()].others.Add(std::move(done));
    return {};
  }
  // Whichever comes first ends the other.
  auto waiter = std::make_shared<Waiters<Outcome>::Id>();
  const TimerQueue::Id timer = shared_.timers->Add(deadline, [this, waiter, sequence,
                                                              done](absl::Time) {
    const auto it = waiting_.find(sequence.value());
    it->second.others.Remove(*waiter);
    DropWaiting(it);
    done({sequence,
          MakeError(Reason::kTransportTimeout,
                    absl::StrCat("command ", sequence.value(), " has no outcome yet; ask again"))});
  });
  *waiter = waiting_[sequence.value()].others.Add([this, timer, done](Outcome outcome) {
    shared_.timers->Cancel(timer);
    done(std::move(outcome));
  });
  return timer;
}

void CommandLog::Abandon(const absl::Status& why) {
  shared_.timers->Cancel(gap_timer_);
  RefuseHeld(why);
  when_taken_.Call(why);
  auto waiters = std::exchange(waiting_, {});
  for (auto& [sequence, those] : waiters) {
    those.senders.Call({Sequence(sequence), why});
    those.others.Call({Sequence(sequence), why});
  }
}

}  // namespace chorus::node
