// The runs that compute what another run reads, as long as they are not launched: which of them it
// waits for, and which its world's sequencer waits for instead.
//
// Each run is gone by once, however many inputs come from it and on however many ways it is
// reached.
//
// Threads: the node thread. Ownership: none; RunTable owns the runs. Errors: none.
#ifndef CHORUS_CORE_NODE_PRODUCERS_H_
#define CHORUS_CORE_NODE_PRODUCERS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "core/base/ids.h"
#include "core/node/names.h"
#include "core/node/run_state.h"
#include "core/transport/command.h"

namespace chorus::node {

// The local runs through which a run that comes reads what runs of its world have voted for, and
// their way into that world, in the order of their log, in which producers come first. There are
// nearly always none. But there may be a thousand, each of which reads what all before it make: so
// they are found, and join the world, one after the other, as the slices of many turns have time.
// Meanwhile their session's log is parked, so that no other run comes to be between; but they may
// be launched, fail or end.
class Adoption {
 public:
  // For a run of `world` in `epoch`. `runs` outlives it.
  Adoption(RunTable* runs, std::shared_ptr<World> world, Epoch epoch)
      : runs_(runs), world_(std::move(world)), epoch_(epoch) {}

  const std::shared_ptr<World>& world() const { return world_; }
  Epoch epoch() const { return epoch_; }
  // The run, or one that lies between, reads what `producer` makes.
  void Reach(RunHandle producer);
  bool done() const { return reached_.empty() && next_ == between_.size(); }
  // One step, unless it is done: as much work as a run has producers. Returns the run that has
  // joined the world with it, and votes before the next step; null: none has.
  RunState* Step();

 private:
  bool LiesBetween(const RunState& local) const;
  RunState* FindBetween(RunHandle handle) const;
  void SearchNext();
  RunState* JoinNext();
  // `local` waits, and is of the world from now on: the sequencer waits for those of its producers
  // that have voted there.
  void Join(RunState* local);

  RunTable* const runs_;
  const std::shared_ptr<World> world_;
  const Epoch epoch_;
  std::vector<RunHandle> reached_;  // and not looked at yet
  absl::flat_hash_set<RunHandle> seen_;
  std::vector<std::pair<Sequence, RunHandle>> between_;  // sorted when nothing is `reached_`
  size_t next_ = 0;
};

class Producers {
 public:
  // `runs` outlives it.
  explicit Producers(RunTable* runs) : runs_(runs) {}

  // `run` is new and knows its inputs: finds its producers.
  void Find(RunState* run);
  // What a run that reads these inputs takes with it, before it is prepared. Nothing where one of
  // them has failed: it will be refused.
  Adoption Adopt(const Names& names, const Run& command, const std::shared_ptr<World>& world,
                 Epoch epoch) const;
  // How many runs Await() comes to through local ones, some perhaps more than once: a few frames
  // may make it millions.
  int64_t ThroughLocals(const RunState& run) const;
  // `run` has no producers yet that it waits for. Producers that its own sequencer knows go into
  // its vote, also those that it reaches through local runs that this does not know, so that
  // circles are seen; everything else blocks it from outside.
  void Await(RunState* run);

 private:
  RunTable* const runs_;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_PRODUCERS_H_
