// The benchmarks themselves, each a sub-command of chorus_bench.
#ifndef CHORUS_BENCHMARKS_SUITES_H_
#define CHORUS_BENCHMARKS_SUITES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "benchmarks/daemon.h"
#include "benchmarks/helper.h"
#include "benchmarks/interleave.h"
#include "benchmarks/open_mpi.h"
#include "benchmarks/plots.h"
#include "benchmarks/process.h"
#include "benchmarks/report.h"
#include "benchmarks/torch_peer.h"
#include "benchmarks/trainer.h"

namespace chorus {
namespace bench {

// How much is measured. A smoke run shows that everything works and says nothing about speed.
enum class Effort { kSmoke, kQuick, kFull };

struct Context {
  const ScratchDirectory* scratch = nullptr;
  Report* report = nullptr;
  Plots* plots = nullptr;
  std::string daemon_program;
  std::string attack_program;  // tests/hostile/attack.cc
  Effort effort = Effort::kFull;
  std::vector<int> ranks = {2, 4, 8};
  int64_t most_bytes = int64_t{256} << 20;  // of one rank's result
  // Of the collectives, or of the attacks, only these; empty: all.
  std::vector<std::string> ops;
  std::string torch_python;  // one that has torch; empty: that peer is not asked for
  std::string torch_rank;    // benchmarks/torch_rank.py

  InterleaveOptions Interleave() const;
  // Prints the rows that the report has got since the last time.
  void Show() const;
  // Those of `sizes` that the effort, most_bytes and the memory allow, where each of `copies` of
  // them is held at a time.
  std::vector<int64_t> Sizes(const std::vector<int64_t>& sizes, int copies) const;
  absl::StatusOr<std::unique_ptr<Daemon>> StartDaemon(std::vector<std::string> flags = {}) const;
  // Null, with a note in the report, where it is not installed.
  absl::StatusOr<std::unique_ptr<OpenMpi>> StartOpenMpi(int ranks) const;
  // Null where it was not asked for, or, with a note in the report, there is no torch.
  absl::StatusOr<std::unique_ptr<TorchPeer>> StartTorch(int ranks) const;
};

// The peer's contender for a task; its name is Open MPI's version, perhaps after a prefix.
// `samples` makes the outcomes of a round into samples: GroupSamples, where nothing else is said.
using Samples = std::function<std::vector<double>(const std::vector<Outcome>&)>;
Contender OpenMpiContender(OpenMpi* mpi, const Task& task, const std::string& prefix = "",
                           const Samples& samples = &GroupSamples);
// Takes notice of settings that were far slower than another one: they are left out from now on.
// Null: does nothing.
void DropHopeless(const std::vector<Measured>& measured, OpenMpi* mpi);
// One round of a task on all ranks of a job: all their samples.
absl::StatusOr<std::vector<double>> RunJob(Job* job, Task task, int64_t iterations);

// A daemon of their own with two ranks that all_reduce 4 B, for what is measured beside somebody.
struct WorkingPair {
  static constexpr int kRanks = 2;
  static Task SmallAllReduce();
  // `flags`: of the daemon. They have worked once when this returns: what that takes is there.
  static absl::StatusOr<WorkingPair> Start(const Context& context,
                                           std::vector<std::string> flags = {});

  // Gone after everything that uses it.
  std::unique_ptr<ScratchDirectory> scratch;
  std::unique_ptr<Daemon> daemon;
  std::unique_ptr<Job> job;
};

// What the machine itself takes: memory traffic, bare hand-offs, a gRPC call.
absl::Status RunFloor(const Context& context);
// all_reduce of 4 B to 64 KiB, against the bare hand-off and Open MPI.
absl::Status RunSmall(const Context& context);
// all_reduce of 64 KiB to 256 MiB on the daemon's memory, against the memory's speed and Open MPI;
// then RunCollectives.
absl::Status RunOwned(const Context& context);
// Every collective, results of 4 B to 256 MiB of a rank, against Open MPI and c10d/Gloo; also when
// every rank then reads its whole result.
absl::Status RunCollectives(const Context& context, const Daemon& daemon);
// all_reduce from the ranks' own memory to their own memory, against the memory's speed, Open MPI
// and c10d/Gloo.
absl::Status RunUser(const Context& context);
// What an all_reduce each millisecond costs four ranks that compute.
absl::Status RunCompute(const Context& context);
// Registration of graphs, what a node of a run costs, many small all_reduces in one graph.
absl::Status RunGraph(const Context& context);
// Memory and processor time of idle sessions, and what they cost two ranks that work.
absl::Status RunSessions(const Context& context);
// What one client that keeps the daemon busy costs two ranks that work, against one that keeps as
// many processors busy and never talks to the daemon.
absl::Status RunHostile(const Context& context);
// Steps of lesson 5's training, with updates that ranks have in common done once or by each, and of
// a transformer and a ResNet, against the same trainers without each other and PyTorch's DDP.
absl::Status RunTrain(const Context& context);
// Convolutions of lesson 7's ResNet and of ResNet-18, forward and both gradients, against PyTorch's
// with one thread.
absl::Status RunConv(const Context& context);
// The exchange of the gradients of one step of ResNet-50, owned by the daemon and in the ranks' own
// memory, against Open MPI and PyTorch's DDP.
absl::Status RunStep(const Context& context);
// From kill -9 of a waiting rank to the others' error; processor time of idle sessions.
absl::Status RunDeath(const Context& context);

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_SUITES_H_
