// Work that ranks of one domain of devices have in common is done once, and its results are kept
// once.
//
// At submit every result that other ranks may have too gets a value id, which is equal exactly
// where the value is: output k of a collective has that of its instance, the result of a group of
// equal work (Plan::EqualGroup) that of what it computes from which values. Runs whose groups have
// one id share the buffers of their results from then on. At launch, those of them that are in the
// gang are dealt out: one device runs a group, the others leave it out, and a barrier between them
// ends the launches, so that whatever follows on any of these devices finds the work done.
//
// Threads: the node thread. Ownership: runs and their world share the buffers. Errors: said at each
// function.
#ifndef CHORUS_CORE_NODE_EQUAL_WORK_H_
#define CHORUS_CORE_NODE_EQUAL_WORK_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/collective/instance.h"
#include "core/node/communicators.h"
#include "core/node/domains.h"
#include "core/node/info.h"
#include "core/node/run_state.h"
#include "core/node/storage.h"
#include "core/transport/command.h"

namespace chorus::node {

class EqualWork {
 public:
  // All outlive it. `stats` counts what is shared.
  EqualWork(const Domains* domains, Storage* storage, NodeStats* stats)
      : domains_(domains), storage_(storage), stats_(stats) {}

  // Gives the run's outputs their value ids, and finds the buffers that its groups of equal work
  // share with other runs. `instances` by participation; empty: it votes for an epoch that is not
  // open. Where this turn has made its share of arenas (Storage::Reserve) buffers of the run's own
  // are left out. RESOURCE_EXHAUSTED: it is the first to need such a buffer, and there is no
  // memory.
  absl::Status Find(const Run& command, absl::Span<const InstanceKey> instances, RunState* run);
  // The run is to be prepared again later, or will not be launched. Lets go of what it has reserved
  // with others for equal work, where no other run has it too.
  void Leave(RunState* run);
  // The run, whose vote has not been taken, will not be launched, and with it the votes for its
  // instances fail: lets go of what was reserved for these. (Later the vote may name other ones:
  // calls without positions have been counted.)
  void ForgetInstances(const RunState* run);
  // Deals a gang's groups of equal work out to the runs that have them; they meet in a communicator
  // of `lease`. RESOURCE_EXHAUSTED: where ranks cannot share, and there is no memory for each.
  absl::Status Deal(absl::Span<RunState* const> members, CommunicatorLease* lease);

 private:
  absl::StatusOr<std::vector<BufferRef>> Reserve(const Plan::EqualGroup& group, RunState* run);

  const Domains* const domains_;
  Storage* const storage_;
  NodeStats* const stats_;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_EQUAL_WORK_H_
