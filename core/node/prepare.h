// From a Run command to a RunState: everything that can be wrong or missing is found here, before
// the vote, and every byte that the run will write is reserved.
//
// Threads: the node thread. Ownership: none; the run keeps what it is given. Errors: said at each
// function.
#ifndef CHORUS_CORE_NODE_PREPARE_H_
#define CHORUS_CORE_NODE_PREPARE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/collective/instance.h"
#include "core/node/domains.h"
#include "core/node/donation.h"
#include "core/node/equal_work.h"
#include "core/node/graph_store.h"
#include "core/node/launcher.h"
#include "core/node/run_state.h"
#include "core/node/session.h"
#include "core/node/storage.h"
#include "core/transport/command.h"

namespace chorus::node {

// The worlds that the groups of a run name and of which the session is a member, each once, in the
// order of the groups: those whose other ranks hear of it where the run is refused. A run is of one
// world; of one that names more than a few, the first are enough.
struct NamedWorld {
  std::shared_ptr<World> world;
  Rank rank;  // RankOn() the run's devices
  Epoch epoch;
};
// The session's rank in `world` that a run on these devices is of: the one on the first of them
// that has one there, else the session's first.
Rank RankOn(const World& world, const Session& session, absl::Span<const DeviceIndex> devices);
inline constexpr size_t kMaxNamedWorlds = 8;
std::vector<NamedWorld> WorldsNamed(const Run& command, const Session& session);

// What a run takes beside its graph and the plan, which its session has: its row, what RunState
// lists by input, output, buffer and participation, and what stands in the queues of its devices
// until its turn comes.
int64_t MemoryOfRun(const Graph& graph, const Plan& plan);

class Preparer {
 public:
  // `arrived` is called when bytes of a run's inputs have come to its device, or cannot: kLater,
  // they are one of the run's blockers. All outlive it.
  using Arrived = std::function<void(RunHandle run, Storage::Arrival, const absl::Status& status)>;
  Preparer(const Domains* domains, GraphStore* graphs, Launcher* launcher, Storage* storage,
           Donations* donations, EqualWork* equal_work, Arrived arrived)
      : domains_(domains),
        graphs_(graphs),
        launcher_(launcher),
        storage_(storage),
        donations_(donations),
        equal_work_(equal_work),
        arrived_(std::move(arrived)) {}

  // `run` is new: it has its session, handle and sequence. An error leaves it half made; Forget()
  // and Return() (EqualWork, Donations) give back what it has reserved with others. False: its plan
  // is being made or loaded, and nothing has happened; or its memory takes more turns than this
  // (Session::Reservation).
  absl::StatusOr<bool> Prepare(const Run& command, const GraphStore::Waiting& waiting,
                               RunState* run);
  // The gang has agreed on another order than this rank's program has: its streams are queues, so
  // its plan must follow. RESOURCE_EXHAUSTED: what that takes is not there. False: the plan is
  // being made or loaded.
  absl::StatusOr<bool> FollowOrder(RunState* run, const std::vector<int32_t>& order,
                                   const GraphStore::Waiting& waiting);
  // The run takes so much more. RESOURCE_EXHAUSTED: its session cannot be charged for it.
  static absl::Status Charge(RunState* run, int64_t bytes);
  // The run waits until `cell`, an input of it, is ready or has failed; `arrived` is told.
  void Await(const CellRef& cell, RunState* run);

 private:
  // False: it must be waited for.
  absl::StatusOr<bool> FindPlan(const Run& command, const GraphStore::Waiting& waiting,
                                RunState* run);
  absl::StatusOr<bool> FindGraph(const Run& command, const GraphStore::Waiting& waiting,
                                 RunState* run);
  absl::StatusOr<bool> ChoosePlan(const GraphStore::Waiting& waiting, RunState* run);
  absl::Status FindInstances(RunState* run);
  absl::Status FindOneDomain(RunState* run);
  absl::StatusOr<std::vector<int64_t>> SizesOf(const Run& command, const RunState& run) const;
  absl::Status ChargeRows(RunState* run);
  absl::Status FindDevices(const Run& command, RunState* run);
  absl::Status FindWorld(const Run& command, RunState* run);
  absl::Status MakeOutputs(const Run& command, RunState* run);
  // Those that are tensors; then those that come with the run.
  absl::Status FindInputs(const Run& command, RunState* run);
  // What BindBytes() will copy to in host memory.
  absl::Status ReserveCopies(const Run& command, RunState* run, std::vector<BufferRef>* copies);
  absl::Status BindBytes(const Run& command, RunState* run);
  absl::Status ReserveBuffers(absl::Span<const InstanceKey> instances, RunState* run);

  // The world's copy of a result of `instance` in the domain of `device`; null: none yet.
  BufferRef* SharedResult(World* world, const InstanceKey& instance, int32_t output,
                          DeviceIndex device);

  const Domains* const domains_;
  GraphStore* const graphs_;
  Launcher* const launcher_;
  Storage* const storage_;
  Donations* const donations_;
  EqualWork* const equal_work_;
  const Arrived arrived_;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_PREPARE_H_
