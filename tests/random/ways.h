// The ways to run a program: how trainers make their calls (run.h), how these reach the daemon,
// what computes there, and whether trainers are threads or processes.
#ifndef CHORUS_TESTS_RANDOM_WAYS_H_
#define CHORUS_TESTS_RANDOM_WAYS_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "chorus/chorus.h"
#include "tests/conformance/cluster.h"
#include "tests/random/program.h"
#include "tests/random/run.h"

namespace chorus {
namespace random_programs {

enum class Reach { kDirect, kRing, kStream, kUnary, kProcesses };

struct Way {
  std::string name;
  Reach reach = Reach::kDirect;
  std::string backend = "host";
  bool shares = true;  // equal work
  // Its results have the host's bits. A GPU's have bits of their own behind sums and functions of
  // floats, the same in all its ways; elsewhere the host's (docs/gpu.md).
  bool host_bits = true;
  Mode mode;
};

// The first, on the host, is what the others are compared with.
const std::vector<Way>& AllWays();
// Whose names contain `part`, and always the first.
std::vector<Way> WaysNamed(const std::string& part);

struct RunnerOptions {
  uint64_t seed = 1;                            // of sim
  Timeout patience = std::chrono::seconds(20);  // how late a rank may be
  // Of processes: the program that serves (Serve), and chorusd. Empty: these ways are refused.
  std::string trainer;
  std::string daemon;
};

// Keeps a cluster and its sessions for each reach and backend, from program to program, until a
// program has an error there.
//
// Threads: one.
class Runner {
 public:
  explicit Runner(RunnerOptions options);
  ~Runner();

  // Of all trainers. A trainer that hangs is left behind, and has the error DEADLINE_EXCEEDED.
  Outcomes Run(const Program& program, const Way& way);

 private:
  class Deployment;
  class Threads;
  class Processes;

  const RunnerOptions options_;
  int worlds_ = 0;
  std::map<std::string, std::shared_ptr<Deployment>> deployments_;
};

// A trainer's process: does what it is told on `in_fd` and tells what came of it on `out_fd`, until
// the input ends.
int Serve(int in_fd, int out_fd);

}  // namespace random_programs
}  // namespace chorus

#endif  // CHORUS_TESTS_RANDOM_WAYS_H_
