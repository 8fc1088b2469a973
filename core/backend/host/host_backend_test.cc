#include "core/backend/host/host_backend.h"

#include "core/backend/testing/backend_conformance.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

ThreadPool* Pool() {
  static ThreadPool pool(3);
  return &pool;
}

HostBackendOptions Options(int devices, HostKernelFactory make_kernel) {
  HostBackendOptions options;
  options.devices = devices;
  options.pool = Pool();
  options.make_kernel = make_kernel;
  options.memory_bytes = kConformanceMemoryBytes;
  return options;
}

std::unique_ptr<Backend> Open(int devices, HostKernelFactory make_kernel) {
  return CreateHostBackend(Options(devices, make_kernel));
}

// Everything beyond a few items goes to the pool, in chunks of two cache lines.
std::unique_ptr<Backend> OpenAllOnPool(int devices, HostKernelFactory make_kernel) {
  HostBackendOptions options = Options(devices, make_kernel);
  options.inline_bytes = 0;
  options.chunk_bytes = 128;
  return CreateHostBackend(options);
}

INSTANTIATE_TEST_SUITE_P(Host, BackendConformance,
                         testing::Values(BackendConformanceParam{"default", &Open},
                                         BackendConformanceParam{"all_on_pool", &OpenAllOnPool}),
                         BackendConformanceName);

}  // namespace
}  // namespace chorus
