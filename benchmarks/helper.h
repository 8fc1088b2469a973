// Helper processes of a benchmark: the ranks of a job, the two ends of a bare hand-off.
//
// The driver sends each of them a task over a Unix socket and waits for its outcome. Between tasks
// a helper sleeps in recv, so it takes no processor time from the contender whose turn it is; ranks
// that mpirun starts are helpers like those that the driver starts itself.
#ifndef CHORUS_BENCHMARKS_HELPER_H_
#define CHORUS_BENCHMARKS_HELPER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "benchmarks/process.h"
#include "core/base/unique_fd.h"

namespace chorus {
namespace bench {

struct Task {
  std::string op;
  int64_t bytes = 0;
  int64_t iterations = 0;
  int64_t warm_up = 0;  // iterations before those, not measured
  int64_t number = 0;   // what they mean is up to the op
  std::string text;
};

struct Outcome {
  absl::Status status;   // DATA_LOSS: a result was wrong
  int64_t start_ns = 0;  // NowNanos() around the measured iterations
  int64_t end_ns = 0;
  int64_t cpu_ns = 0;           // processor time of this process meanwhile
  std::vector<double> samples;  // nanoseconds, one after the other from start_ns
  std::string text;
};

using Handler = std::function<Outcome(const Task&)>;

// The helper's side: says hello, then handles tasks until the driver has gone. Returns the exit
// status for main.
int RunHelper(const std::string& control_path, int index, const Handler& handler);

// The driver's side. Threads: thread-compatible.
class HelperGroup {
 public:
  // Every wait for a helper ends after this long with DEADLINE_EXCEEDED naming it.
  static constexpr int64_t kPatienceNanos = int64_t{180} * 1000000000;

  // A group of `count` helpers that are to connect to `path` in `scratch`.
  static absl::StatusOr<std::unique_ptr<HelperGroup>> Create(const ScratchDirectory& scratch,
                                                             const std::string& name, int count);
  // Closes the connections, which ends the helpers, and waits for the processes that it owns.
  ~HelperGroup();
  HelperGroup(const HelperGroup&) = delete;
  HelperGroup& operator=(const HelperGroup&) = delete;

  const std::string& path() const { return path_; }
  int count() const { return static_cast<int>(connections_.size()); }
  // Takes over a process, to be ended with the group: a helper's, or mpirun's.
  void Own(Process process) { processes_.push_back(std::move(process)); }
  // Waits until helpers with all the indexes that are not connected have said hello.
  absl::Status AwaitHellos();

  absl::Status Send(int index, const Task& task);
  absl::StatusOr<Outcome> Receive(int index);
  // The same task to all, then all outcomes by index; the first one's error that has one.
  absl::StatusOr<std::vector<Outcome>> Run(const Task& task);
  // GroupSamples() of so many iterations of `task`.
  absl::StatusOr<std::vector<double>> Sample(Task task, int64_t iterations);
  // The process id that it said hello with.
  pid_t pid(int index) const { return pids_[index]; }
  // SIGKILL, and forgets its connection: AwaitHellos waits for another one of that index.
  void Kill(int index);

 private:
  HelperGroup() = default;

  std::string path_;
  UniqueFd listener_;
  std::vector<UniqueFd> connections_;
  std::vector<pid_t> pids_;
  std::vector<Process> processes_;
};

// What an iteration of all helpers together took: from the moment when the last one had the result
// of the iteration before to that when the last one had this one's. A helper's own samples would
// mislead: the one that comes last finds everything ready, and a broadcast's root does not wait.
// Outcomes without samples do not count; the others have equally many.
std::vector<double> GroupSamples(const std::vector<Outcome>& outcomes);
// Iterations of a task's warm-up for that many measured ones.
int64_t WarmUpFor(int64_t iterations);
// From the first one's start to the last one's end.
int64_t WallNanos(const std::vector<Outcome>& outcomes);

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_HELPER_H_
