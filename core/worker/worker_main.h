// The main function of a program that a daemon starts for its devices.
//
// Threads: the main one. Ownership: the backend is the function's. Errors: its exit status.
#ifndef CHORUS_CORE_WORKER_WORKER_MAIN_H_
#define CHORUS_CORE_WORKER_WORKER_MAIN_H_

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "core/backend/backend.h"

namespace chorus::worker {

// Serves the backend that `open` gives to the daemon that has started this process, with the
// descriptors of worker_process.h. Returns the exit status: 2, and a line, where there is none; 1:
// there is no backend, of which the daemon is told; else 0 when the daemon says that it is to stop.
// It does not return where the daemon is gone, or the devices are lost: it ends the process with 1,
// and a line. It waits for no reader of its lines (own_stderr.h).
int WorkerMain(const std::function<absl::StatusOr<std::unique_ptr<Backend>>()>& open);

}  // namespace chorus::worker

#endif  // CHORUS_CORE_WORKER_WORKER_MAIN_H_
