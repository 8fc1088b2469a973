// The conformance suite of backends, on this machine's GPU. Exit status 3, and one line, where
// there is none.
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "core/backend/cuda/cuda_backend.h"
#include "core/backend/cuda/kernels/kernel_image.h"
#include "core/backend/cuda/testing/test_kernel_factory.h"
#include "core/backend/testing/backend_conformance.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

const cuda::Api& DriverApi() {
  static const cuda::Api& api = *[] {
    auto loaded = cuda::LoadApi({});
    if (!loaded.ok()) {
      std::fprintf(stderr, "%s\n", std::string(loaded.status().message()).c_str());
      std::exit(3);
    }
    return new cuda::Api(*loaded);
  }();
  return api;
}

std::unique_ptr<Backend> Open(int devices, HostKernelFactory /*make_kernel*/) {
  CudaBackendOptions options;
  options.api = &DriverApi();
  options.devices = devices;
  options.images = {{cuda::kernel_image(), cuda::kernel_image_bytes()}, TestKernelImage()};
  options.make_kernel = &MakeCudaTestKernel;
  options.memory_bytes = kConformanceMemoryBytes;
  options.chunk_bytes = int64_t{64} << 20;
  auto backend = CreateCudaBackend(options);
  if (!backend.ok()) {
    std::fprintf(stderr, "%s\n", std::string(backend.status().message()).c_str());
    std::exit(3);
  }
  return *std::move(backend);
}

INSTANTIATE_TEST_SUITE_P(Gpu, BackendConformance,
                         testing::Values(BackendConformanceParam{"driver", &Open}),
                         BackendConformanceName);

}  // namespace
}  // namespace chorus
