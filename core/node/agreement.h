// A world's agreement on what is launched: the only one to ask its sequencer.
//
// What the sequencer decides is carried out by the node's listener, in the order in which it was
// decided, over all worlds; what follows from carrying out one action comes after all that were
// there.
//
// Threads: the node thread. Ownership: a world owns its agreement, and the agreement the sequencer.
// Errors: as Sequencer; what ranks are told of is an action.
#ifndef CHORUS_CORE_NODE_AGREEMENT_H_
#define CHORUS_CORE_NODE_AGREEMENT_H_

#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/base/error.h"
#include "core/base/ids.h"
#include "core/collective/sequencer.h"
#include "core/node/background.h"
#include "core/node/timers.h"

namespace chorus::node {

struct World;

// Carries out what worlds have agreed on. See SequencerAction for what each asks for.
class AgreementListener {
 public:
  virtual void OnLaunch(const std::shared_ptr<World>& world, const SequencerAction& action,
                        absl::Time now) = 0;
  virtual void OnReserve(const std::shared_ptr<World>& world, const SequencerAction& action,
                         absl::Time now) = 0;
  virtual void OnFail(const std::shared_ptr<World>& world, const SequencerAction& action,
                      absl::Time now) = 0;
  virtual void OnWarn(const std::shared_ptr<World>& world, const SequencerAction& action,
                      absl::Time now) = 0;
  // May take the action's remains.
  virtual void OnEpochEnded(const std::shared_ptr<World>& world, SequencerAction* action,
                            absl::Time now) = 0;

 protected:
  ~AgreementListener() = default;
};

// The actions of all worlds, on their way to the listener.
class ActionQueue {
 public:
  // `listener` outlives it.
  explicit ActionQueue(AgreementListener* listener) : listener_(listener) {}
  ActionQueue(const ActionQueue&) = delete;
  ActionQueue& operator=(const ActionQueue&) = delete;

  void CarryOut(const std::shared_ptr<World>& world, std::vector<SequencerAction>* actions,
                absl::Time now);

 private:
  void CarryOutOne(const std::shared_ptr<World>& world, SequencerAction* action, absl::Time now);

  AgreementListener* const listener_;
  std::deque<std::pair<std::shared_ptr<World>, SequencerAction>> waiting_;
  bool busy_ = false;
};

class Agreement {
 public:
  // More rows than that, or more bytes, are let go of in the background: it takes about 50 ns each.
  static constexpr int64_t kRowsAtOnce = 512;
  static constexpr int64_t kBytesAtOnce = kRowsAtOnce << 10;
  // That kept causes take, all together.
  static constexpr int64_t kMostCauseBytes = Sequencer::kMostCauseBytes;

  // `world` owns it; the others outlive it.
  Agreement(World* world, const SequencerOptions& options, ActionQueue* queue, TimerQueue* timers,
            Background* background);
  ~Agreement();
  Agreement(const Agreement&) = delete;
  Agreement& operator=(const Agreement&) = delete;

  // Actions that were decided and have not been carried out. CarryOut() must follow, before another
  // event.
  class Decision {
   public:
    Decision(Agreement* agreement, std::vector<SequencerAction> actions)
        : agreement_(agreement), actions_(std::move(actions)) {}
    void CarryOut(absl::Time now) { agreement_->CarryOut(&actions_, now); }

   private:
    Agreement* agreement_;
    std::vector<SequencerAction> actions_;
  };

  // --- Events (Sequencer); what they decide is carried out before they return, unless actions are
  // being carried out already. Runs that stand at the world's meeting points make way first ---
  absl::Status Submit(const Vote& vote, absl::Time now);
  void Unblock(RunHandle run, absl::Time now);
  void Reserved(RunHandle run, absl::Time now);
  void Cancel(RunHandle run, Rank rank, absl::Time now);
  void DropTape(Rank rank, const InstanceKey& key, bool consumed, Epoch epoch, absl::Time now);
  void Finished(Ticket ticket, const absl::Status& status, absl::Time now);
  void Abort(const Error& cause, absl::Time now);
  void Dead(Rank rank, absl::string_view how, absl::Time now);
  // The `pending` runs that go with it end first: an orderly leaver does not leave votes behind.
  // Those that speak for no rank fail alone.
  void Left(Rank rank, absl::Span<const RunHandle> pending, absl::Time now);
  std::vector<int32_t> Shrink(absl::Time now);
  // One that decides nothing, for those that stand (ShortWay).
  absl::optional<MetGang> Meet(GroupId group, absl::Span<const MetCall> calls, int64_t results,
                               absl::Time now) {
    return sequencer_.Meet(group, calls, results, now);
  }

  // --- Events of which the caller tells others before they are carried out ---
  // Where what the members count cannot be charged, they are out of line instead.
  ABSL_MUST_USE_RESULT Decision Refuse(absl::Span<const RefusedMember> members, Epoch epoch,
                                       const Error& why, absl::Time now);
  ABSL_MUST_USE_RESULT Decision Withdraw(RunHandle run, const Error& why, absl::Time now);

  // --- What it knows (Sequencer) ---
  Epoch epoch() const { return sequencer_.epoch(); }
  absl::StatusOr<GroupId> AddGroup(Rank rank, absl::Span<const Rank> members,
                                   absl::optional<InstanceKey::Request> request,
                                   Sequencer::ReserveGroup reserve) {
    return sequencer_.AddGroup(rank, members, request, reserve);
  }
  absl::StatusOr<absl::Span<const Rank>> GroupMembers(GroupId group) const {
    return sequencer_.GroupMembers(group);
  }
  // None for a vote of another epoch, which will not be launched.
  absl::StatusOr<absl::Span<const InstanceKey>> Resolve(const Vote& vote);
  std::vector<RefusedMember> CallsOf(const Vote& vote) { return sequencer_.CallsOf(vote); }
  size_t NewPairs(absl::Span<const RefusedMember> members) const {
    return sequencer_.NewPairs(members);
  }
  bool IsPending(RunHandle run) const { return sequencer_.IsPending(run); }
  absl::Span<const Rank> RanksOf(RunHandle run) const { return sequencer_.RanksOf(run); }
  absl::Status CheckMembership(Epoch epoch) const { return sequencer_.CheckMembership(epoch); }
  absl::optional<InstanceKey> LastPublished(Rank rank) const {
    return sequencer_.LastPublished(rank);
  }
  CallPosition NextCall(GroupId group, Rank rank) const { return sequencer_.NextCall(group, rank); }
  CallPosition NextCall(GroupId group, GroupRank member) const {
    return sequencer_.NextCall(group, member);
  }
  Epoch since() const { return sequencer_.since(); }
  bool IsQuiet() const { return sequencer_.IsQuiet(); }
  int num_groups() const { return sequencer_.num_groups(); }
  int64_t num_group_members() const { return sequencer_.num_group_members(); }
  std::vector<PendingInstance> Pending(absl::Time now, int64_t* room) const {
    return sequencer_.Pending(now, room);
  }
  size_t LiveRows() const { return sequencer_.LiveRows(); }
  int64_t HeldBytes() const { return sequencer_.HeldBytes(); }
  int64_t BytesPerCall() const { return sequencer_.BytesPerCall(); }

 private:
  // An event, from its beginning to its end.
  void Decide(absl::Time now, absl::FunctionRef<void(Sequencer::Actions*)> event);
  void MakeWay();
  void CarryOut(Sequencer::Actions* actions, absl::Time now);
  // Re-armed when an earlier deadline appears.
  void ArmTimer();

  World* const world_;
  ActionQueue* const queue_;
  TimerQueue* const timers_;
  Background* const background_;
  Sequencer sequencer_;
  TimerQueue::Id timer_;
  absl::Time timer_due_ = absl::InfiniteFuture();
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_AGREEMENT_H_
