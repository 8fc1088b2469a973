// Gangs: runs that are launched together, from the launch, the point of no return, to the last
// completion of their devices.
//
// Threads: the node thread. Ownership: Gangs owns the gangs, the table their runs. Errors: a gang's
// status.
#ifndef CHORUS_CORE_NODE_GANGS_H_
#define CHORUS_CORE_NODE_GANGS_H_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/base/ids.h"
#include "core/collective/decisions.h"
#include "core/node/at_once.h"
#include "core/node/communicators.h"
#include "core/node/domains.h"
#include "core/node/donation.h"
#include "core/node/equal_work.h"
#include "core/node/info.h"
#include "core/node/launcher.h"
#include "core/node/options.h"
#include "core/node/run_state.h"
#include "core/node/storage.h"
#include "core/node/timers.h"
#include "core/node/world.h"
#include "core/runtime/messages.h"

namespace chorus::node {

// Runs of one gang, from launch to the last completion.
struct Gang {
  std::shared_ptr<World> world;  // null: one local run
  Ticket ticket;
  std::vector<RunHandle> runs;
  std::vector<LaunchId> launches;
  absl::Time launched;
  int32_t launches_left = 0;
  TimerQueue::Id watch;  // of one that was aborted (Gangs::Abort)
  absl::Status status;
  bool knows_origin = false;  // of its failure
  // Its world's, or its session's; and which of them it uses. Null: a run on one device.
  std::shared_ptr<CommunicatorLease> lease;
  std::vector<CommunicatorId> communicators;
  CommunicatorId commit;  // of all its devices, where some of them hold back
  // Launched, and where its results are read a failure of it need not be known: it has several
  // devices, which do not meet, or it reads results of such a gang that are not there yet.
  bool fails_unseen = false;
  size_t num_published = 0;  // of its runs, the first ones: once it has finished without error
  // By which look of RunTable's it was seen last, and whether somebody wants its results then.
  int64_t looked_at = 0;
  bool is_wanted = false;

  static constexpr size_t kKeptCapacity = 256;  // nobody is charged for what is kept
  void Recycle() {
    world.reset();
    ticket = Ticket();
    ClearList(&runs);
    ClearList(&launches);
    launched = absl::Time();
    launches_left = 0;
    watch = TimerQueue::Id();
    status = absl::OkStatus();
    knows_origin = false;
    lease.reset();
    ClearList(&communicators);
    commit = CommunicatorId();
    fails_unseen = false;
    num_published = 0;
    looked_at = 0;
    is_wanted = false;
  }

 private:
  template <typename T>
  static void ClearList(std::vector<T>* list) {
    list->clear();
    // Assigned `{}` it would keep its capacity.
    if (list->capacity() > kKeptCapacity) *list = std::vector<T>();
  }
};

class Gangs {
 public:
  // All outlive it.
  Gangs(const NodeOptions* options, const Domains* domains, RunTable* runs, Storage* storage,
        Launcher* launcher, Donations* donations, EqualWork* equal_work, TimerQueue* timers,
        NodeStats* stats)
      : options_(options),
        domains_(domains),
        runs_(runs),
        storage_(storage),
        launcher_(launcher),
        donations_(donations),
        equal_work_(equal_work),
        timers_(timers),
        stats_(stats),
        at_once_(runs, launcher) {}

  // Launches the runs of `action`, or one that takes part in no collective. Returns the gang's
  // index. If no launches are left the gang is complete, and is to be finished at once: it has run,
  // or its status is not OK and nothing was launched.
  int32_t Launch(const std::shared_ptr<World>& world, const SequencerAction& action,
                 absl::Time now);
  int32_t LaunchLocal(RunState* run, absl::Time now);
  // The index of the gang that is complete with this, if one is.
  absl::optional<int32_t> Complete(const CompletionMessage& completion, absl::Time now);

  // Until Recycle(), when its runs have ended. References stay valid.
  Gang& at(int32_t index) { return *gangs_[static_cast<size_t>(index)]; }
  void Recycle(int32_t index);
  // Nobody wants the results of this launched run: its kernels that have not begun are left out.
  void Abandon(RunState* run);
  // The same of all that a session which has ended has launched, but for what others still want.
  void AbandonAllOf(const Session& session);
  // Something of this launched run has failed by itself; the first such failure is its gang's.
  void Fail(const RunState& run, const absl::Status& why);
  // Its devices have failed, or not finished in time, and those that wait for each other would do
  // so for ever: ends their waits, and abandons its runs. It keeps its memory until its last
  // completion. A device that has had the node's own exec_timeout and kill_timeout for its part
  // alone, and has not ended it, is ended by force where that can be done. (Others' memory goes
  // with it: so it is not for a world's exec_timeout to say when, nor for the length of the queue.)
  // One that was not launched ends nothing: others may be at work in its communicators.
  void Abort(int32_t index, const absl::Status& why, absl::Time now);

 private:
  int32_t New();
  void LaunchOnDevices(const SequencerAction& action, absl::Span<RunState* const> members,
                       Gang* gang);
  absl::Status PrepareGang(const SequencerAction& action, absl::Span<RunState* const> members,
                           Gang* gang);
  absl::Status RunAtOnce(const SequencerAction& action, absl::Span<RunState* const> members);
  absl::Status CheckMeetings(absl::Span<RunState* const> members) const;
  absl::Status JoinCommit(absl::Span<RunState* const> members, Gang* gang);
  absl::Status FindBytes(const SequencerAction& action, absl::Span<RunState* const> members);
  bool IsLaunched(const RunState& run);
  absl::Status BindInputs(RunState* run);
  absl::Status ResolvePeers(const LaunchedInstance& instance);
  absl::Status ResolvePeers(const LaunchedInstance& instance, int32_t call,
                            absl::Span<RunState* const> runs);
  void PlaceOutputs(RunState* run);
  absl::Status PrepareLaunch(RunState* run, Gang* gang);
  std::shared_ptr<CommunicatorLease> LeaseFor(const RunState& run);
  static absl::StatusOr<CommunicatorId> GroupCommunicator(const World& world, GroupId group,
                                                          CommunicatorLease* lease);
  static absl::Status BindCommunicator(const RunState& run, const Plan::CollectiveSlot& collective,
                                       CommunicatorLease* lease,
                                       LaunchMessage::CollectiveBinding* binding);
  void LaunchRun(RunState* run);
  void Watch(int32_t index, absl::Time due);
  absl::Time LastEndInFrontOf(DeviceIndex device, LaunchId launch) const;
  absl::Time KillDevicesOf(const RunState& run, absl::Time now);

  const NodeOptions* const options_;
  const Domains* const domains_;
  RunTable* const runs_;
  Storage* const storage_;
  Launcher* const launcher_;
  Donations* const donations_;
  EqualWork* const equal_work_;
  TimerQueue* const timers_;
  NodeStats* const stats_;
  AtOnce at_once_;

  // Of gangs that have ended, and of tables of launches: nobody is charged for these.
  static constexpr size_t kKeptGangs = 256;
  static constexpr size_t kKeptLaunches = 4096;

  std::vector<std::unique_ptr<Gang>> gangs_;  // null: a free index
  std::vector<int32_t> free_;
  // Of gangs under way.
  struct Launched {
    RunHandle run;
    DeviceIndex device;
    bool complete = false;
  };
  absl::flat_hash_map<LaunchId, Launched> launches_;
  // By device and lane: the launch that has ended last.
  struct Ended {
    LaunchId launch;
    absl::Time at = absl::InfinitePast();
  };
  std::vector<std::array<Ended, kMaxLanes>> ended_;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_GANGS_H_
