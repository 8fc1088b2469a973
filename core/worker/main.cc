// chorus-worker: has devices for the daemon that starts it (worker_devices.h). Not for people: what
// it is told and asked comes by descriptors of that daemon.
#include <memory>
#include <string>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "core/backend/backends.h"
#include "core/backend/fault/fault_backend.h"
#include "core/base/error.h"
#include "core/base/thread_pool.h"
#include "core/ops/host_kernels.h"
#include "core/worker/worker_main.h"

ABSL_FLAG(std::string, backend, "sim", "Of the devices; not host.");
ABSL_FLAG(int32_t, devices, 1, "How many.");
ABSL_FLAG(uint64_t, seed, 0, "Of what the backend chooses at random; 0: a random one.");
ABSL_FLAG(std::string, fault_script, "", "For tests: core/backend/fault/fault_script.h.");

namespace chorus::worker {
namespace {

absl::StatusOr<std::unique_ptr<Backend>> Open(ThreadPool* pool) {
  BackendOptions options;
  options.devices = absl::GetFlag(FLAGS_devices);
  options.seed = absl::GetFlag(FLAGS_seed);
  options.pool = pool;
  options.make_kernel = MakeHostKernel;
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend,
                          OpenBackend(absl::GetFlag(FLAGS_backend), options));
  const std::string text = absl::GetFlag(FLAGS_fault_script);
  if (text.empty()) return backend;
  CHORUS_ASSIGN_OR_RETURN(FaultScript script, ParseFaultScript(text));
  return CreateFaultBackend(std::move(backend), std::move(script), nullptr);
}

}  // namespace
}  // namespace chorus::worker

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("Has devices for the chorusd that starts it.");
  absl::ParseCommandLine(argc, argv);
  chorus::ThreadPool pool(chorus::UsableCpus());
  return chorus::worker::WorkerMain([&pool] { return chorus::worker::Open(&pool); });
}
