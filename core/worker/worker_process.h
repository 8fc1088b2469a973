// A worker's process: started with its end of a channel, watched, ended.
//
// Threads: thread-compatible; the thread that starts one outlives it, or the kernel kills it.
// Ownership: it is killed with its object, and waited for, but not for long: one that the kernel
// does not let go of is left to it. Errors: said at Start().
#ifndef CHORUS_CORE_WORKER_WORKER_PROCESS_H_
#define CHORUS_CORE_WORKER_WORKER_PROCESS_H_

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/base/unique_fd.h"

namespace chorus::worker {

class WorkerProcess {
 public:
  // Descriptors `inherited_fds` are those from kFirstDescriptor on there, in this order. It gets no
  // signal of a terminal's. FAILED_PRECONDITION kWrongState: the program cannot be started.
  static constexpr int kFirstDescriptor = 3;
  static absl::StatusOr<WorkerProcess> Start(const std::vector<std::string>& command,
                                             absl::Span<const int> inherited_fds);
  WorkerProcess() = default;
  WorkerProcess(WorkerProcess&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}
  WorkerProcess& operator=(WorkerProcess&& other) noexcept;
  ~WorkerProcess();

  pid_t pid() const { return pid_; }  // -1: there is none
  void Kill() const;
  // How it ended, in words: "was killed by signal 9 (Killed)". Nothing: it still runs after so
  // long.
  absl::optional<std::string> Wait(absl::Duration at_most);

 private:
  explicit WorkerProcess(pid_t pid) : pid_(pid) {}
  pid_t pid_ = -1;
};

}  // namespace chorus::worker

#endif  // CHORUS_CORE_WORKER_WORKER_PROCESS_H_
