// Runs golden vectors through the SDK and a chorusd of its own, or a node in this process.
#ifndef CHORUS_TESTS_VECTORS_RUNNER_H_
#define CHORUS_TESTS_VECTORS_RUNNER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "benchmarks/daemon.h"
#include "benchmarks/process.h"
#include "chorus/chorus.h"
#include "tests/conformance/cluster.h"
#include "tests/vectors/trainers.h"
#include "tests/vectors/vector.h"

namespace chorus {
namespace vectors {

struct RunnerOptions {
  // If given, opens what they run on, without a transport, and all else but `sim_seed` and
  // `patience` says nothing.
  conformance::OpenCluster cluster;
  std::string daemon;  // the program
  Transport transport = Transport::kRing;
  std::string backend = "host";  // or "sim"
  uint64_t sim_seed = 1;
  absl::Duration patience = TrainerOptions().patience;
};

struct Tally {
  int passed = 0;
  int failed = 0;
};

// Threads: one, which must not end before it (the daemon would be killed).
class Runner {
 public:
  explicit Runner(RunnerOptions options) : options_(std::move(options)) {}

  // What is wrong with a vector, in one line; empty: nothing. Starts the daemon where there is
  // none, or none with enough devices; a vector after which it is gone has failed.
  std::string Run(const Vector& v, const Tolerance& tolerance);

  // Null before the first vector, and where there is a cluster.
  bench::Daemon* daemon() { return daemon_.get(); }

  // All vectors of a file. `say` gets a line for each that failed; a file that cannot be read or
  // parsed counts as one.
  Tally RunFile(const std::string& path, const std::function<void(const std::string&)>& say);

 private:
  absl::Status Prepare(int devices);
  bool Lives();
  // With these trainers, whose sessions and what they wait for are to be told.
  absl::Status StartDaemon(TrainerOptions* trainers);
  absl::Status OpenCluster(TrainerOptions* trainers);
  std::string RunPass(const Vector& v, const Tolerance& tolerance, Pass pass);

  const RunnerOptions options_;
  const bench::ScratchDirectory scratch_;
  int devices_ = 0;  // of the daemon or the cluster
  std::unique_ptr<bench::Daemon> daemon_;
  std::unique_ptr<conformance::Cluster> cluster_;
  std::unique_ptr<Trainers> trainers_;
};

// The JSON files of a directory, by name. NOT_FOUND: there are none.
absl::StatusOr<std::vector<std::string>> VectorFiles(const std::string& directory);

}  // namespace vectors
}  // namespace chorus

#endif  // CHORUS_TESTS_VECTORS_RUNNER_H_
