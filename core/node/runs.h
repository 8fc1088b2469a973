// Runs from their submission to their outcome: voted where they take part in collectives, launched
// with their gang, published or failed, with what waits for them.
//
// Threads: the node thread. Ownership: the table owns the runs. Errors: each goes to the session's
// log and to the names of the run's results.
#ifndef CHORUS_CORE_NODE_RUNS_H_
#define CHORUS_CORE_NODE_RUNS_H_

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/base/error.h"
#include "core/base/ids.h"
#include "core/base/turn_queue.h"
#include "core/node/agreement.h"
#include "core/node/background.h"
#include "core/node/donation.h"
#include "core/node/equal_work.h"
#include "core/node/fail_turns.h"
#include "core/node/failures.h"
#include "core/node/gangs.h"
#include "core/node/holders.h"
#include "core/node/info.h"
#include "core/node/options.h"
#include "core/node/prepare.h"
#include "core/node/producers.h"
#include "core/node/run_state.h"
#include "core/node/session.h"
#include "core/node/storage.h"
#include "core/node/world.h"
#include "core/runtime/messages.h"
#include "core/transport/command.h"

namespace chorus::node {

class Runs final : public AgreementListener {
 public:
  // All outlive it.
  struct Parts {
    const NodeOptions* options = nullptr;
    const Clock* clock = nullptr;
    RunTable* table = nullptr;
    Storage* storage = nullptr;
    Preparer* preparer = nullptr;
    Donations* donations = nullptr;
    EqualWork* equal_work = nullptr;
    Gangs* gangs = nullptr;
    Background* background = nullptr;
    Failures* failures = nullptr;
    Holders* holders = nullptr;
    NodeStats* stats = nullptr;
    // The log of a session that was parked for runs that fail goes on.
    std::function<void(const std::shared_ptr<Session>&)> go_on;
    InNextTurn go_on_later;
  };
  explicit Runs(const Parts& parts)
      : options_(parts.options),
        clock_(parts.clock),
        table_(parts.table),
        producers_(parts.table),
        storage_(parts.storage),
        preparer_(parts.preparer),
        donations_(parts.donations),
        equal_work_(parts.equal_work),
        gangs_(parts.gangs),
        background_(parts.background),
        failures_(parts.failures),
        holders_(parts.holders),
        stats_(parts.stats),
        go_on_later_(parts.go_on_later),
        fail_turns_(parts.go_on) {}
  Runs(const Runs&) = delete;
  Runs& operator=(const Runs&) = delete;

  // Takes a Run command; its outcome goes to the session's log. False: it has to be planned first,
  // its memory is on its way or takes more turns than this to reserve, or runs that it takes with
  // it are not all in its world yet, and nothing else has happened; then it is asked again by what
  // `waiting` gives.
  bool Submit(const std::shared_ptr<Session>& session, Sequence sequence, const Run& command,
              const GraphStore::Waiting& waiting, absl::Time now);
  // Withdraws a run of the session, unless it is launched: commit wins.
  void Cancel(const Session& session, Sequence sequence, absl::Time now);
  // Bytes of one of its inputs have come to its device, or have not.
  void Arrived(RunHandle handle, Storage::Arrival arrival, const absl::Status& status);
  void Complete(const CompletionMessage& completion, absl::Time now);
  // The cell is ready or has failed: tells what waits for it, in turns that come where there is
  // more than this slice has time for.
  void Settled(const CellRef& cell, const std::string& tenant);
  // The session has ended: nothing will read the results of its runs. Those that wait fail, those
  // that are launched end early.
  void EndAllOf(const Session& session, const Error& why, absl::Time now);
  // The session's runs that `world` has votes of and that go with `rank`, which has left: those
  // that speak for it, and those that speak for none, where that was the session's last rank there.
  std::vector<RunHandle> VotedFor(const World& world, const Session& session, Rank rank);
  // The daemon ends: runs that come are refused, those that are there fail.
  void StopTaking() { stopped_ = true; }
  void FailAll(const Error& why, absl::Time now);

  // Goes on with runs that fail, with those whose turn it is because of what became of another, and
  // with gangs that have finished, for a turn's share. Whether there were any.
  bool Continue(absl::Time now);
  // Runs `then`, in a Continue(), when those of the tenant that fail by now have.
  void AfterFailing(const std::string& tenant, std::function<void()> then) {
    fail_turns_.Add(tenant, std::move(then));
  }

  // --- AgreementListener ----------------------------------------------------------------------
  void OnLaunch(const std::shared_ptr<World>& world, const SequencerAction& action,
                absl::Time now) override;
  void OnReserve(const std::shared_ptr<World>& world, const SequencerAction& action,
                 absl::Time now) override;
  void OnFail(const std::shared_ptr<World>& world, const SequencerAction& action,
              absl::Time now) override;
  void OnWarn(const std::shared_ptr<World>& world, const SequencerAction& action,
              absl::Time now) override;
  void OnEpochEnded(const std::shared_ptr<World>& world, SequencerAction* action,
                    absl::Time now) override;

 private:
  void FollowOrder(RunHandle handle, const std::vector<int32_t>& order, const absl::Status& planned,
                   absl::Time now);
  absl::Status AwaitProducers(RunState* run);
  // False: not all that the command takes with it into its world have voted there, or the slice has
  // no time for its run. It is asked again when they have. An error: it cannot be.
  absl::StatusOr<bool> AdoptProducers(const std::shared_ptr<Session>& session, const Run& command,
                                      const GraphStore::Waiting& waiting, absl::Time now);
  // Keeps what the run has of its memory, and has it asked again in the next turn. An error: it
  // cannot be.
  absl::Status ReserveInTurns(const GraphStore::Waiting& waiting, RunState* run);
  void CastVote(RunState* run, absl::Time now);
  void Refuse(const std::shared_ptr<Session>& session, Sequence sequence, const Run& command,
              RunState* run, const absl::Status& why, absl::Time now);
  void RefuseVote(RunState* run, const absl::Status& why, absl::Time now);
  // What it waits for has failed.
  void RefuseAwaiting(RunState* run, std::shared_ptr<const Error> failed, absl::Time now);
  // As many of the warnings that wait as the slice has time for, the others in turns that come.
  void WriteDown(const std::shared_ptr<World>& world);
  void Unblock(RunHandle handle, absl::Time now);
  // Of a local run that is to write over what it was given: whether it waits for what it reads of
  // gangs that may fail without its device's knowing.
  bool AwaitsGangs(RunState* run);
  void LaunchLocal(RunState* run, absl::Time now);
  void ReleaseConsumers(RunState* run, absl::Time now);
  void Follow(absl::Span<const RunHandle> consumers, std::shared_ptr<const Error> failed,
              absl::Time now);
  void FinishGang(int32_t index, absl::Time now);
  // All its runs have their outcome, or will have had it when those that fail by now have.
  void EndGang(int32_t index);
  bool AwaitInputs(const Gang& gang, int32_t index);
  void Publish(RunState* run, absl::Time now);
  // Of a run whose results are published: its outputs that go into client memory. Then it has
  // ended.
  void WriteOut(RunState* run);
  void Written(RunHandle handle, const absl::Status& status);
  // Tells the session once that its run has failed: at once, unless this slice has had its share.
  // Until then it is charged for the cause. `common`: what others that wait have of the same cause;
  // null: nothing yet, and then this is it.
  void Fail(RunState* run, const Error& cause, absl::Time now,
            std::shared_ptr<const Error>* common = nullptr);
  void FailAtOnce(RunState* run, const Error& cause, absl::Time now);
  struct Ended;
  // Of runs that have ended with their epoch: as many as the slice has time for, and those that are
  // left, unless it is all, in the turns that come; `goes_on`: this is one of them.
  bool FailThose(const std::shared_ptr<Ended>& ended, bool goes_on, absl::Time now);
  void End(RunState* run);

  const NodeOptions* const options_;
  const Clock* const clock_;
  RunTable* const table_;
  Producers producers_;
  Storage* const storage_;
  Preparer* const preparer_;
  Donations* const donations_;
  EqualWork* const equal_work_;
  Gangs* const gangs_;
  Background* const background_;
  Failures* const failures_;
  Holders* const holders_;
  NodeStats* const stats_;
  const InNextTurn go_on_later_;
  bool stopped_ = false;
  // Runs that what they waited for lets go of, tenants in turns: it is launched, or has come. Those
  // for which it has failed do not wait for a turn, but are looked at one behind the other, however
  // long the chain; of those that have voted the worlds are told as the slice has time.
  TurnQueue<RunHandle> next_;
  struct Next {
    RunHandle run;
    std::shared_ptr<const Error> failed;
  };
  std::deque<Next> failed_next_;
  bool following_ = false;  // a call further up goes through them
  // The runs that fail with an epoch of a world. Until it is their turn they are in Phase::kVoted,
  // with a vote of that epoch.
  struct Ended {
    std::shared_ptr<World> world;
    Epoch epoch;
    std::vector<RunHandle> runs;
    size_t next = 0;
    Error error;
  };
  // What OnFail() was told last, and what waits for that: one cause may fail thousands, one after
  // the other.
  struct LastFailed {
    std::weak_ptr<const Error> cause;
    Epoch open_epoch;
    std::weak_ptr<const Error> common;
  };
  LastFailed last_failed_;
  // Runs in Phase::kFailing, or launched and `failing`, and what waits for those before it: in
  // order, as far as they are of one tenant.
  FailTurns fail_turns_;
  // Gangs that are complete, by index: so is now what they have waited for, or some of their runs
  // have been published. Tenants in turns.
  TurnQueue<int32_t> finishing_;
  // With more that waits for them than their slices had time for; tenants in turns.
  struct SettledCell {
    CellRef cell;
    std::string tenant;
  };
  TurnQueue<SettledCell> settled_;
  int turn_ = 0;  // of Continue(): whether one fails, goes on, is finished or told
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_RUNS_H_
