// The worker of the suite: worker_program BACKEND DEVICES SEED, with a backend of backends.h.
#include <iostream>
#include <string>

#include "core/backend/backend.h"
#include "core/base/thread_pool.h"
#include "core/worker/worker_main.h"
#include "tests/conformance/backends.h"

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "expected a backend, how many devices, and a seed\n";
    return 2;
  }
  chorus::ThreadPool pool(2);
  return chorus::worker::WorkerMain([&]() -> absl::StatusOr<std::unique_ptr<chorus::Backend>> {
    return chorus::conformance::MakeBackend(argv[1], std::stoi(argv[2]), std::stoull(argv[3]),
                                            &pool);
  });
}
