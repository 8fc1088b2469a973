// The bare hand-off: what N clients and one server of them take to post a word each and be answered
// together, with nothing else to do. Same processes, same topology as ranks and their daemon.
//
// Three ways:
//   yield   a word each way in shared memory; a side that waits looks and calls sched_yield
//   futex   the same words; a side that waits sleeps at once
//   ring    core/transport: a frame of a small run through the submission ring, decoded; a tensor's
//           and a run's record back; adaptive spin, then eventfd and futex
// With the ring it is what the daemon's transport costs, without the daemon's work.
//
// The server may also move a reduction's bytes between the last question and the answers: what no
// daemon that is asked over this transport can do without.
#ifndef CHORUS_BENCHMARKS_HANDOFF_H_
#define CHORUS_BENCHMARKS_HANDOFF_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "benchmarks/helper.h"
#include "benchmarks/interleave.h"

namespace chorus {
namespace bench {

// The driver's side: N clients and a server, each a process. Threads: thread-compatible; Start
// forks.
class HandoffGroup {
 public:
  static constexpr int kMostClients = 16;
  static absl::StatusOr<std::unique_ptr<HandoffGroup>> Start(const ScratchDirectory& scratch,
                                                             int clients);

  // task.op: the way. task.number: rounds of Compute() that each client does before it asks. The
  // clients' outcomes; the last one is the server's, without samples.
  absl::StatusOr<std::vector<Outcome>> Run(const Task& task) { return helpers_->Run(task); }
  absl::StatusOr<std::vector<double>> Run(const std::string& way, int64_t iterations);
  // By the ring, and each time one array of `bytes` is read for each client and their sum written
  // to one of two arrays in turn: a result is still the clients' while the next one is made. The
  // settings are the ways to move; the best one counts. Lives no longer than this.
  Contender WithTraffic(int64_t bytes) const;

 private:
  std::unique_ptr<HelperGroup> helpers_;
};

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_HANDOFF_H_
