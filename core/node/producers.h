// The runs that compute what another run reads, as long as they are not launched: which of them it
// waits for, and which its world's sequencer waits for instead.
//
// Each run is gone by once, however many inputs come from it and on however many ways it is
// reached.
//
// Threads: the node thread. Ownership: none; RunTable owns the runs. Errors: none.
#ifndef CHORUS_CORE_NODE_PRODUCERS_H_
#define CHORUS_CORE_NODE_PRODUCERS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "core/node/run_state.h"

namespace chorus::node {

class Producers {
 public:
  // `runs` outlives it.
  explicit Producers(RunTable* runs) : runs_(runs) {}

  // `run` is new and knows its inputs: finds its producers.
  void Find(RunState* run);
  // The local runs through which `run`, or one of these, reads what runs of its world have voted
  // for; in the order of their log, in which producers come first. Nearly always empty.
  std::vector<RunHandle> Between(const RunState& run);
  // `local` waits, and is of its producers' world from now on: the sequencer waits for those of
  // them that have voted there.
  void Join(const std::shared_ptr<World>& world, RunState* local);
  // How many runs Await() comes to through local ones, some perhaps more than once: a few frames
  // may make it millions.
  int64_t ThroughLocals(const RunState& run) const;
  // `run` has no producers yet that it waits for. Producers that its own sequencer knows go into
  // its vote, also those that it reaches through local runs, so that circles are seen; everything
  // else blocks it from outside.
  void Await(RunState* run);

 private:
  bool LiesBetween(const RunState& local, const World* world);
  // Unless it was seen in this look.
  static void AddVoted(RunState* producer, int64_t look, RunState* run) {
    if (RunTable::FirstSeen(producer, look)) run->voted_producers.push_back(producer->handle);
  }

  RunTable* const runs_;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_PRODUCERS_H_
