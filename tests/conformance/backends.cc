#include "tests/conformance/backends.h"

#include "core/backend/backend.h"
#include "core/backend/host/host_backend.h"
#include "core/backend/sim/sim_backend.h"
#include "core/base/thread_pool.h"
#include "core/ops/host_kernels.h"

namespace chorus {
namespace conformance {

std::unique_ptr<Backend> MakeBackend(BackendKind kind, int devices, uint64_t seed,
                                     ThreadPool* pool) {
  if (kind == BackendKind::kSim) {
    SimBackendOptions sim;
    sim.devices = devices;
    sim.seed = seed;
    sim.make_kernel = MakeHostKernel;
    return CreateSimBackend(sim);
  }
  HostBackendOptions host;
  host.devices = devices;
  host.pool = pool;
  host.make_kernel = MakeHostKernel;
  // One chunk of an all_reduce of two ranks is kChunkElements of f32, read twice and written once.
  host.chunk_bytes = 3 * 4 * kChunkElements;
  host.inline_bytes = host.chunk_bytes;
  return CreateHostBackend(host);
}

}  // namespace conformance
}  // namespace chorus
