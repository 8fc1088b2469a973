// A worker with devices of sim, for tests: sim_worker [--devices=N] [--backend=NAME]
// [--memory_bytes=N] [--fault_script=SCRIPT] [--kernels_wait_for=FIFO], where no kernel is made
// before somebody has opened that for writing.
#include <fcntl.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/status/statusor.h"
#include "core/backend/backends.h"
#include "core/backend/fault/fault_backend.h"
#include "core/backend/sim/sim_backend.h"
#include "core/base/error.h"
#include "core/base/thread_pool.h"
#include "core/base/unique_fd.h"
#include "core/ops/host_kernels.h"
#include "core/worker/worker_main.h"

ABSL_FLAG(std::string, backend, "sim", "Of the devices.");
ABSL_FLAG(int32_t, devices, 1, "How many.");
ABSL_FLAG(int64_t, memory_bytes, 0, "Of sim, all devices together; 0: its own default.");
ABSL_FLAG(std::string, fault_script, "", "core/backend/fault/fault_script.h.");
ABSL_FLAG(std::string, kernels_wait_for, "", "A FIFO that kernels wait for; empty: none.");

namespace chorus {
namespace {

absl::StatusOr<std::unique_ptr<Backend>> OpenSound(ThreadPool* pool) {
  BackendOptions options;
  options.devices = absl::GetFlag(FLAGS_devices);
  options.pool = pool;
  options.make_kernel = [](const NodeView& node, absl::Span<const TensorType> outputs) {
    const std::string fifo = absl::GetFlag(FLAGS_kernels_wait_for);
    if (!fifo.empty()) const UniqueFd opened(open(fifo.c_str(), O_RDONLY | O_CLOEXEC));
    return MakeHostKernel(node, outputs);
  };
  const int64_t memory_bytes = absl::GetFlag(FLAGS_memory_bytes);
  if (memory_bytes == 0) return OpenBackend(absl::GetFlag(FLAGS_backend), options);
  SimBackendOptions sim;
  static_cast<BackendOptions&>(sim) = options;
  sim.memory_bytes = memory_bytes;
  return CreateSimBackend(sim);
}

absl::StatusOr<std::unique_ptr<Backend>> Open(ThreadPool* pool) {
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, OpenSound(pool));
  return WithFaults(std::move(backend), absl::GetFlag(FLAGS_fault_script));
}

}  // namespace
}  // namespace chorus

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  chorus::ThreadPool pool(2);
  return chorus::worker::WorkerMain([&pool] { return chorus::Open(&pool); });
}
