// Small collectives whose operands are there: the node thread runs them itself, in place of
// launches.
//
// What a launch takes beside its work (a message for each device, streams, events, a completion) is
// most of what a small call costs. Where devices' memory is this process's own (the host's) none of
// that is needed: results have memory of their own that nobody reads yet, so it does not matter
// what the devices still have to do. The bits are those of a launch: both run CollectiveWork.
//
// Threads: the node thread. Ownership: none; the launcher and the runs outlive it. Errors: those of
// a call on a communicator.
#ifndef CHORUS_CORE_NODE_AT_ONCE_H_
#define CHORUS_CORE_NODE_AT_ONCE_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "core/backend/collective_work.h"
#include "core/collective/decisions.h"
#include "core/node/launcher.h"
#include "core/node/run_state.h"

namespace chorus::node {

// One collective, of which every member calls the same.
class CollectiveAtOnce {
 public:
  explicit CollectiveAtOnce(Launcher* launcher) : launcher_(launcher) {}

  // What one of so many members takes, in bytes that are read or written: of those that stand for
  // all of them on a domain, the first. A collective may be run at once if all of its members' are
  // no more than Launcher::at_once_bytes.
  static int64_t BytesOf(const Plan& plan, size_t participation, int64_t members, bool is_first);
  // Of what the slice has not used yet.
  int64_t bytes_left() const;

  void Begin(size_t members);
  // The call of this member, whose plan is of collectives alone and stands on `device`; `addresses`
  // by plan buffer.
  absl::Status Add(size_t member, const LoadedPlan& plan, size_t participation, DeviceIndex device,
                   absl::Span<const DeviceAddress> addresses);
  // All have been added. From here on nothing can fail.
  absl::Status Prepare();
  void Run();

 private:
  Launcher* const launcher_;
  // Of one after the other: kept for what they have grown to.
  CollectiveWork work_;
  std::vector<CollectiveWork::Member> members_;
};

// Gangs of such collectives.
class AtOnce {
 public:
  AtOnce(RunTable* runs, Launcher* launcher)
      : runs_(runs), launcher_(launcher), collective_(launcher) {}

  // Whether this gang, of these runs, may be run so: it consists of collectives alone, in which all
  // members take part, reads what is there or what it computes itself, takes over no memory, and
  // leaves the slice time for others.
  bool Takes(const SequencerAction& action, absl::Span<RunState* const> members) const;
  // Runs it. Its bytes have been found.
  absl::Status Run(const SequencerAction& action);

 private:
  absl::Status RunInstance(const LaunchedInstance& instance);

  RunTable* const runs_;
  Launcher* const launcher_;
  CollectiveAtOnce collective_;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_AT_ONCE_H_
