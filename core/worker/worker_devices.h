// Devices that a worker has, a process that is started for them: what fails there, or is killed,
// takes no more with it than what stood on the devices.
//
// A worker that ends, says what makes no sense, does not answer within `kill_timeout` or gets no
// further with what it loads (plans, and kernels whose scratch is asked for) is killed, and another
// started when it has ended, for it has the devices until then. What it had been asked for fails
// with kDeviceLost, each executor says a LostMessage, and takes nothing until Recover()
// (core/runtime/executor.h). Nobody waits for the end of one that was killed: where that takes
// longer than `kill_timeout`, what is asked for meanwhile fails.
//
// WorkspaceBytes asks each worker that comes within `start_timeout` and `kill_timeout` together.
// UNAVAILABLE kDeviceLost: there is none then; DEADLINE_EXCEEDED kExecTimeout: there is one, which
// is still at what it loads.
//
// Threads: as core/runtime/devices.h says; threads of its own wait for the worker and send bulk to
// it. Ownership: it has its worker; ended with it. Errors: said at Start() and above; those of the
// backend come from the worker.
#ifndef CHORUS_CORE_WORKER_WORKER_DEVICES_H_
#define CHORUS_CORE_WORKER_WORKER_DEVICES_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/runtime/devices.h"

namespace chorus::worker {

struct WorkerOptions {
  // A program that serves (server/worker_main.cc), by its path, and its arguments.
  std::vector<std::string> command;
  absl::Duration start_timeout = absl::Seconds(60);  // for it to open its devices
  // For a plan, or a kernel whose scratch is asked for, of those that have been sent to it.
  absl::Duration load_timeout = absl::Seconds(60);
  // For it to answer while it has work, and to end when it is to.
  absl::Duration kill_timeout = absl::Seconds(10);
  // Takes a line for each worker that ended or did not start, on any thread. Null: nobody does.
  std::function<void(const std::string& line)> log;
};

class WorkerDevices : public Devices {
 public:
  // Waits until the worker has its devices. FAILED_PRECONDITION kWrongState: it does not start, or
  // why it has none. DEADLINE_EXCEEDED kExecTimeout.
  static absl::StatusOr<std::unique_ptr<WorkerDevices>> Start(WorkerOptions options);

  // Of the worker that there is now; -1: one is being started.
  virtual pid_t pid() const = 0;
};

}  // namespace chorus::worker

#endif  // CHORUS_CORE_WORKER_WORKER_DEVICES_H_
