// A worker with devices of sim, for tests: sim_worker [--devices=N] [--backend=NAME].
#include <memory>
#include <string>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "core/backend/backends.h"
#include "core/base/thread_pool.h"
#include "core/ops/host_kernels.h"
#include "core/worker/worker_main.h"

ABSL_FLAG(std::string, backend, "sim", "Of the devices.");
ABSL_FLAG(int32_t, devices, 1, "How many.");

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  chorus::ThreadPool pool(2);
  return chorus::worker::WorkerMain([&pool] {
    chorus::BackendOptions options;
    options.devices = absl::GetFlag(FLAGS_devices);
    options.pool = &pool;
    options.make_kernel = chorus::MakeHostKernel;
    return chorus::OpenBackend(absl::GetFlag(FLAGS_backend), options);
  });
}
