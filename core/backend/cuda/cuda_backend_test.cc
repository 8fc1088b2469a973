// The suite on the stand-in driver, or on this machine's GPU (testing/test_gpu.h).
#include "core/backend/cuda/cuda_backend.h"

#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/backend/backend_options.h"
#include "core/backend/cuda/testing/test_gpu.h"
#include "core/backend/cuda/testing/test_kernel_factory.h"
#include "core/backend/testing/backend_conformance.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

std::unique_ptr<Backend> Open(int devices, HostKernelFactory /*make_kernel*/) {
  CudaBackendOptions options;
  options.devices = devices;
  options.make_kernel = &MakeCudaTestKernel;
  options.memory_bytes = kConformanceMemoryBytes;
  options.chunk_bytes = int64_t{4} << 20;
  return OpenTestGpu(options, TestSeed());
}

INSTANTIATE_TEST_SUITE_P(Gpu, BackendConformance,
                         testing::Values(BackendConformanceParam{"default", &Open}),
                         BackendConformanceName);

TEST(CudaBackendTest, SoManyDevicesThereMayBe) {
  for (const int devices : {-1, 0, kMaxDevices + 1}) {
    CudaBackendOptions options;
    options.devices = devices;
    const absl::Status status = CreateCudaBackend(options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat("got ", devices))) << status;
  }
}

}  // namespace
}  // namespace chorus
