#include "core/node/agreement.h"

#include "absl/strings/str_cat.h"
#include "core/base/failpoint.h"
#include "core/base/work.h"
#include "core/node/world.h"

namespace chorus::node {

// --- The order of actions -----------------------------------------------------------------------

void ActionQueue::CarryOut(const std::shared_ptr<World>& world,
                           std::vector<SequencerAction>* actions, absl::Time now) {
  if (busy_) {
    for (SequencerAction& action : *actions) waiting_.emplace_back(world, std::move(action));
    return;
  }
  busy_ = true;
  CountWork(static_cast<int64_t>(actions->size()));
  for (SequencerAction& action : *actions) CarryOutOne(world, &action, now);
  while (!waiting_.empty()) {
    std::pair<std::shared_ptr<World>, SequencerAction> next = std::move(waiting_.front());
    waiting_.pop_front();
    CarryOutOne(next.first, &next.second, now);
  }
  busy_ = false;
}

void ActionQueue::CarryOutOne(const std::shared_ptr<World>& world, SequencerAction* action,
                              absl::Time now) {
  switch (action->kind) {
    case SequencerAction::Kind::kLaunch:
      return listener_->OnLaunch(world, *action, now);
    case SequencerAction::Kind::kReserve:
      return listener_->OnReserve(world, *action, now);
    case SequencerAction::Kind::kFail:
      return listener_->OnFail(world, *action, now);
    case SequencerAction::Kind::kWarn:
      return listener_->OnWarn(world, *action, now);
    case SequencerAction::Kind::kEpochEnded:
      return listener_->OnEpochEnded(world, action, now);
  }
}

// --- One world's --------------------------------------------------------------------------------

Agreement::Agreement(World* world, const SequencerOptions& options, ActionQueue* queue,
                     TimerQueue* timers, Background* background)
    : world_(world),
      queue_(queue),
      timers_(timers),
      background_(background),
      sequencer_(world->size(), options) {
  for (int rank = 0; rank < world->size(); ++rank) {
    MemberInfo info;
    info.pid = world->members[static_cast<size_t>(rank)].pid;
    sequencer_.SetMember(Rank(rank), info);
  }
}

Agreement::~Agreement() {
  timers_->Cancel(timer_);
  const auto rows = static_cast<int64_t>(sequencer_.LiveRows());
  if (rows <= kRowsAtOnce && sequencer_.HeldBytes() <= kBytesAtOnce) {
    CountWork(rows);
    return;
  }
  // Charged until it is gone.
  auto charge = std::make_shared<Charge>(world_->rows.Take());
  auto rest = std::make_shared<Sequencer>(std::move(sequencer_));
  background_->Do(/*tenant=*/"", [rest = std::move(rest)] {}, [charge = std::move(charge)] {});
}

void Agreement::CarryOut(Sequencer::Actions* actions, absl::Time now) {
  if (actions->empty()) return ArmTimer();
  // It may end the world's last membership, and with it the world.
  const std::shared_ptr<World> world = world_->shared_from_this();
  queue_->CarryOut(world, actions, now);
  ArmTimer();
}

void Agreement::MakeWay() {
  if (world_->stands_short) world_->make_way();
}

void Agreement::Decide(absl::Time now, absl::FunctionRef<void(Sequencer::Actions*)> event) {
  MakeWay();
  Sequencer::Actions actions;
  event(&actions);
  CarryOut(&actions, now);
}

void Agreement::ArmTimer() {
  const absl::Time due = sequencer_.NextDeadline();
  if (due >= timer_due_) return;
  timers_->Cancel(timer_);
  timer_due_ = due;
  timer_ = timers_->Add(due, [this](absl::Time now) {
    timer_due_ = absl::InfiniteFuture();
    Sequencer::Actions actions;
    sequencer_.Advance(now, &actions);
    CarryOut(&actions, now);
  });
}

absl::Status Agreement::Submit(const Vote& vote, absl::Time now) {
  MakeWay();
  CHORUS_FAILPOINT("node.before_vote");
  constexpr int64_t kWorkPerVote = 4;
  CountWork(kWorkPerVote * static_cast<int64_t>(vote.what->participations.size()));
  if (vote.epoch == epoch()) {
    CHORUS_ASSIGN_OR_RETURN(const int64_t path_bytes, sequencer_.PathBytes(vote));
    if (path_bytes > 0) {
      CHORUS_RETURN_IF_ERROR(world_->ReserveCalls(vote.what->participations.size(), path_bytes));
    }
  }
  absl::Status status;
  Decide(now, [&](Sequencer::Actions* actions) {
    status = sequencer_.Submit(vote, now, actions);
    CHORUS_FAILPOINT("node.after_vote");
  });
  return status;
}

absl::StatusOr<absl::Span<const InstanceKey>> Agreement::Resolve(const Vote& vote) {
  if (vote.epoch != epoch()) return absl::Span<const InstanceKey>();
  return sequencer_.Resolve(vote);
}

void Agreement::Unblock(RunHandle run, absl::Time now) {
  Decide(now, [&](Sequencer::Actions* actions) { sequencer_.Unblock(run, now, actions); });
}

void Agreement::Reserved(RunHandle run, absl::Time now) {
  Decide(now, [&](Sequencer::Actions* actions) { sequencer_.Reserved(run, now, actions); });
}

void Agreement::Cancel(RunHandle run, Rank rank, absl::Time now) {
  Decide(now, [&](Sequencer::Actions* actions) { sequencer_.Cancel(run, rank, now, actions); });
}

void Agreement::DropTape(Rank rank, const InstanceKey& key, bool consumed, Epoch epoch,
                         absl::Time now) {
  Decide(now, [&](Sequencer::Actions* actions) {
    sequencer_.DropTape(rank, key, consumed, epoch, now, actions);
  });
}

void Agreement::Finished(Ticket ticket, const absl::Status& status, absl::Time now) {
  Decide(now,
         [&](Sequencer::Actions* actions) { sequencer_.Finished(ticket, status, now, actions); });
}

void Agreement::Abort(const Error& cause, absl::Time now) {
  Decide(now, [&](Sequencer::Actions* actions) { sequencer_.Abort(cause, now, actions); });
}

void Agreement::Dead(Rank rank, absl::string_view how, absl::Time now) {
  Decide(now, [&](Sequencer::Actions* actions) { sequencer_.Dead(rank, how, now, actions); });
}

void Agreement::Left(Rank rank, absl::Span<const RunHandle> pending, absl::Time now) {
  const Error why(Reason::kCancelled, absl::StrCat("rank ", rank.value(),
                                                   " left the world before a local run of its "
                                                   "session was launched there"));
  Decide(now, [&](Sequencer::Actions* actions) {
    for (RunHandle run : pending) {
      if (!sequencer_.RanksOf(run).empty()) sequencer_.Cancel(run, rank, now, actions);
    }
    for (RunHandle run : pending) sequencer_.Withdraw(run, why, now, actions);
    sequencer_.Left(rank, now, actions);
  });
}

std::vector<int32_t> Agreement::Shrink(absl::Time now) {
  std::vector<int32_t> new_ranks;
  Decide(now, [&](Sequencer::Actions* actions) {
    new_ranks = sequencer_.Shrink(now, actions);
    world_->points.reset();  // their groups are gone
  });
  return new_ranks;
}

Agreement::Decision Agreement::Refuse(absl::Span<const RefusedMember> members, Epoch epoch,
                                      const Error& why, absl::Time now) {
  MakeWay();
  Sequencer::Actions actions;
  const int64_t seats = sequencer_.SeatsOf(members);
  const bool too_many_seats = seats > sequencer_.max_seats();
  absl::Status status;
  if (too_many_seats) {
    status = MakeError(Reason::kQuota,
                       absl::StrCat("their groups have ", seats, " members together; at most ",
                                    sequencer_.max_seats(), " may be looked at"));
  } else if (const size_t pairs = sequencer_.NewPairs(members); pairs > 0) {
    status = world_->ReserveCalls(pairs);
  }
  if (status.ok()) {
    sequencer_.Refuse(members, epoch, why, now, &actions);
  } else {
    // That takes no memory.
    std::vector<RefusedMember> out_of_line(members.begin(), members.end());
    for (RefusedMember& member : out_of_line) {
      member.calls.clear();
      if (too_many_seats) member.gradients.clear();
      member.rest_of_step = true;
    }
    Error error = why;
    error.message = absl::StrCat("its calls could not be counted (", ErrorOf(status).message,
                                 "): ", why.message);
    sequencer_.Refuse(out_of_line, epoch, error, now, &actions);
  }
  return Decision(this, std::move(actions));
}

Agreement::Decision Agreement::Withdraw(RunHandle run, const Error& why, absl::Time now) {
  MakeWay();
  Sequencer::Actions actions;
  sequencer_.Withdraw(run, why, now, &actions);
  return Decision(this, std::move(actions));
}

}  // namespace chorus::node
