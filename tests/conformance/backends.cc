#include "tests/conformance/backends.h"

#include <cstdlib>
#include <iostream>
#include <utility>

#include "core/backend/backends.h"
#include "core/backend/cuda/testing/test_gpu.h"
#include "core/base/thread_pool.h"
#include "core/ops/cuda_kernels.h"
#include "core/ops/host_kernels.h"

namespace chorus {
namespace conformance {

const std::vector<TestBackend>& TestBackends() {
  static const auto* const backends = [] {
    auto* const all = new std::vector<TestBackend>;
    for (const absl::string_view backend : BackendNames()) {
      const std::string name(backend);
      all->push_back({name, name, name == "host" ? kMaxDevices : 1});
    }
    // What no other backend has: results that are shared, and nothing that comes in order by luck.
    all->push_back({"sim_shared", "sim", kMaxDevices});
    // As a node of several GPUs with several devices each.
    all->push_back({"sim_pairs", "sim", 2});
    return all;
  }();
  return *backends;
}

TestBackend CudaTestBackend() { return {"cuda", "cuda", kMaxDevices}; }

std::unique_ptr<Backend> MakeBackend(const std::string& name, int devices, uint64_t seed,
                                     ThreadPool* pool) {
  if (name == CudaTestBackend().name) {
    CudaBackendOptions options;
    options.devices = devices;
    options.make_kernel = &MakeCudaKernel;
    options.memory_bytes = int64_t{1} << 30;
    options.chunk_bytes = int64_t{16} << 20;
    return OpenTestGpu(options, seed);
  }
  for (const TestBackend& test : TestBackends()) {
    if (test.name != name) continue;
    BackendOptions options;
    options.devices = devices;
    options.pool = pool;
    options.make_kernel = MakeHostKernel;
    options.seed = seed;
    options.devices_per_domain = test.devices_per_domain;
    // One chunk of an all_reduce of two ranks is kChunkElements of f32, read twice, written once.
    options.chunk_bytes = 3 * 4 * kChunkElements;
    absl::StatusOr<std::unique_ptr<Backend>> backend = OpenBackend(test.backend, options);
    if (backend.ok()) return *std::move(backend);
    std::cerr << backend.status() << std::endl;
  }
  std::cerr << "no backend " << name << std::endl;
  std::abort();
}

}  // namespace conformance
}  // namespace chorus
