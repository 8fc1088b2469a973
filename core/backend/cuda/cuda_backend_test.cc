#include "core/backend/cuda/cuda_backend.h"

#include <memory>
#include <vector>

#include "core/backend/cuda/kernels/moves.h"
#include "core/backend/cuda/testing/fake_driver.h"
#include "core/backend/cuda/testing/test_kernel_factory.h"
#include "core/backend/cuda/testing/test_kernels.h"
#include "core/backend/testing/backend_conformance.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

std::vector<cuda::FakeKernel> Kernels() {
  using namespace cuda;  // NOLINT: the lists name their types without it
  return {CHORUS_MOVE_KERNELS(CHORUS_FAKE_KERNEL) CHORUS_TEST_KERNELS(CHORUS_FAKE_KERNEL)};
}

const cuda::Api* FakeApi() {
  static const auto& driver = *new cuda::FakeDriver([] {
    cuda::FakeDriverOptions options;
    options.seed = TestSeed();
    options.kernels = Kernels();
    return options;
  }());
  (void)driver;
  static const cuda::Api& api = *new cuda::Api(cuda::FakeDriver::api());
  return &api;
}

std::unique_ptr<Backend> Open(int devices, HostKernelFactory /*make_kernel*/) {
  static constexpr char kImage[] = "of a stand-in";
  CudaBackendOptions options;
  options.api = FakeApi();
  options.devices = devices;
  options.images = {{kImage, sizeof(kImage)}};
  options.make_kernel = &MakeCudaTestKernel;
  options.memory_bytes = kConformanceMemoryBytes;
  options.chunk_bytes = int64_t{4} << 20;
  auto backend = CreateCudaBackend(options);
  EXPECT_TRUE(backend.ok()) << backend.status();
  return *std::move(backend);
}

INSTANTIATE_TEST_SUITE_P(Fake, BackendConformance,
                         testing::Values(BackendConformanceParam{"adversarial", &Open}),
                         BackendConformanceName);

}  // namespace
}  // namespace chorus
