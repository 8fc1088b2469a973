// Child processes of a benchmark: the daemon, helpers, mpirun. None outlives the benchmark.
//
// Threads: thread-compatible. Start from the main thread only: children are killed when the thread
// that started them ends.
#ifndef CHORUS_BENCHMARKS_PROCESS_H_
#define CHORUS_BENCHMARKS_PROCESS_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace chorus {
namespace bench {

class Process {
 public:
  struct Options {
    std::string log;               // file that takes stdout and stderr; empty: ours
    std::vector<std::string> env;  // NAME=VALUE; what else it gets is ours
    std::vector<int> keep_fds;     // open in the child too, under the same numbers
  };
  // argv[0] is looked up on PATH. NOT_FOUND: no such program.
  static absl::StatusOr<Process> Start(const std::vector<std::string>& argv,
                                       const Options& options);

  // A copy of this process, which must have one thread, that calls `main` and exits with what it
  // returns. Of the descriptors from 3 on it keeps only `keep_fds`: a copy of a connection would
  // keep it open.
  static absl::StatusOr<Process> Fork(const std::function<int()>& main,
                                      const std::vector<int>& keep_fds);

  Process() = default;
  Process(Process&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}
  Process& operator=(Process&& other) noexcept;
  ~Process();  // kills it

  pid_t pid() const { return pid_; }
  bool running() const { return pid_ > 0; }
  // Also returns when it has gone; does not wait.
  void Signal(int signal) const;
  // Stops it, as SIGSTOP does; returns when every thread of it stands still, or it has ended.
  void Stop() const;
  // Waits until it has ended, at most `timeout_ns`. Its exit status (128 + signal when killed), or
  // DEADLINE_EXCEEDED: it still runs.
  absl::StatusOr<int> Wait(int64_t timeout_ns);

 private:
  explicit Process(pid_t pid) : pid_(pid) {}
  pid_t pid_ = -1;
};

// Monotonic nanoseconds, equal in all processes of the machine.
int64_t NowNanos();
// Processor time used so far: by this process, or by another one of the same user.
int64_t CpuNanos();
absl::StatusOr<int64_t> CpuNanosOf(pid_t pid);
// How often the threads that it has now have gone to sleep.
absl::StatusOr<int64_t> SleepsOf(pid_t pid);
// Whether this build keeps what is freed, as a sanitizer does: then heaps tell nothing.
#ifdef __SANITIZE_ADDRESS__
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif
// Memory that a process has in use now, what it shares with others included.
absl::StatusOr<int64_t> ResidentBytesOf(pid_t pid);
// The most that it ever had.
absl::StatusOr<int64_t> PeakResidentBytesOf(pid_t pid);
// Of these its heap and stacks: nothing that is shared or a file's.
absl::StatusOr<int64_t> AnonymousBytesOf(pid_t pid);
// Processes that `pid` has started, and that have not ended.
std::vector<pid_t> ChildrenOf(pid_t pid);
// Does nothing for that long.
void Pause(int64_t nanos);

// A directory of this run for sockets and logs, short enough for a socket's path; removed with
// everything in it by the destructor.
class ScratchDirectory {
 public:
  ScratchDirectory();
  ~ScratchDirectory();
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// A file's content, "" when it cannot be read.
std::string FileText(const std::string& path);

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_PROCESS_H_
