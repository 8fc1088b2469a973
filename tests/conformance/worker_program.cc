// The worker of the suite: worker_program BACKEND DEVICES SEED FAULTS, with a backend of backends.h
// and a script of core/backend/fault/fault_script.h, or none. At a SIGUSR1 the stand-in for a GPU's
// driver loses its context.
#include <signal.h>

#include <iostream>
#include <memory>
#include <string>
#include <utility>

#include "core/backend/backend.h"
#include "core/backend/cuda/testing/test_gpu.h"
#include "core/backend/fault/fault_backend.h"
#include "core/base/thread_pool.h"
#include "core/worker/worker_main.h"
#include "tests/conformance/backends.h"

int main(int argc, char** argv) {
  if (argc != 5) {
    std::cerr << "expected a backend, how many devices, a seed, and a script of faults\n";
    return 2;
  }
  signal(SIGUSR1, [](int) { chorus::LoseTestGpu(); });
  chorus::ThreadPool pool(2);
  return chorus::worker::WorkerMain([&]() -> absl::StatusOr<std::unique_ptr<chorus::Backend>> {
    std::unique_ptr<chorus::Backend> backend =
        chorus::conformance::MakeBackend(argv[1], std::stoi(argv[2]), std::stoull(argv[3]), &pool);
    return chorus::WithFaults(std::move(backend), argv[4]);
  });
}
