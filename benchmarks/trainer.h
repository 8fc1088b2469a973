// The ranks of a job that uses Chorus: helpers, each a process with a session of its own.
//
// Tasks of a rank, on float32 operands of `bytes`:
//   any op of collective_case.h   on pieces of `bytes` that the daemon owns
//   all_reduce_mapped             operand in memory mapped from the daemon
//   all_reduce_user               from the rank's own memory to its own memory
//                                 all of these, number 1: then read every byte of the result
//   all_reduces                   `number` of them, of `bytes` each, as `text` says: in one
//                                 compiled "graph", "coalesced" in one call, or "single" calls
//   gradients_HOW                 the means of tensors of the shapes that `text` lists: in one
//                                 "graph", "coalesced" in one call; or from the rank's own memory
//                                 to its own memory, a call each, "user", or as "parts" of one
//                                 call; number 1: then read every byte of the results
//   nodes                         a run of one compiled graph of `number` nodes on one element,
//                                 each of which does next to nothing
//   register                      such a graph anew in each iteration, all ranks at once; `text`
//                                 says what is a sample: "trace", of the function, or "register",
//                                 from there to the first result (for SlowestSamples)
//   forget                        give the operands and results back
//   compute                       number rounds of arithmetic, then an all_reduce_mapped
//                                 (bytes 0: none)
//   join                          leave the present world, join the one called `text`, of number
//                                 ranks
//   await_failure                 all_reduce that is to fail; end_ns says when it did, text with
//                                 what
#ifndef CHORUS_BENCHMARKS_TRAINER_H_
#define CHORUS_BENCHMARKS_TRAINER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "benchmarks/daemon.h"
#include "benchmarks/helper.h"

namespace chorus {
namespace bench {

class Job {
 public:
  // Starts the ranks, and has them join a world.
  static absl::StatusOr<std::unique_ptr<Job>> Start(const ScratchDirectory& scratch,
                                                    const Daemon& daemon, int ranks);
  absl::StatusOr<std::vector<Outcome>> Run(const Task& task) { return helpers_->Run(task); }
  HelperGroup& helpers() { return *helpers_; }
  int ranks() const { return helpers_->count(); }

  // Starts the ranks that are missing, and has all join a new world.
  absl::Status JoinAnew();

 private:
  std::string address_;
  int worlds_ = 0;
  std::unique_ptr<HelperGroup> helpers_;
};

// Of iterations that all ranks begin together and that each times by itself: the slowest rank's.
std::vector<double> SlowestSamples(const std::vector<Outcome>& outcomes);

int RunTrainerHelper(const std::string& control_path, int index, const std::string& address);

// What an awaited failure said: "PEER_DIED rank 2 pid 4711".
std::string FailureText(const std::string& reason, int rank, pid_t pid);

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_TRAINER_H_
