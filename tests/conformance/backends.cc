#include "tests/conformance/backends.h"

#include <cstdlib>
#include <iostream>
#include <utility>

#include "core/backend/backends.h"
#include "core/base/thread_pool.h"
#include "core/ops/host_kernels.h"

namespace chorus {
namespace conformance {

std::unique_ptr<Backend> MakeBackend(const std::string& name, int devices, uint64_t seed,
                                     ThreadPool* pool) {
  BackendOptions options;
  options.devices = devices;
  options.pool = pool;
  options.make_kernel = MakeHostKernel;
  options.seed = seed;
  // One chunk of an all_reduce of two ranks is kChunkElements of f32, read twice and written once.
  options.chunk_bytes = 3 * 4 * kChunkElements;
  absl::StatusOr<std::unique_ptr<Backend>> backend = OpenBackend(name, options);
  if (backend.ok()) return *std::move(backend);
  std::cerr << backend.status() << std::endl;
  std::abort();
}

}  // namespace conformance
}  // namespace chorus
