#include "core/backend/cuda/testing/test_gpu.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "core/backend/cuda/kernels/kernel_image.h"
#include "core/backend/cuda/kernels/moves.h"
#include "core/backend/cuda/testing/test_kernel_factory.h"
#include "core/backend/cuda/testing/test_kernels.h"
#include "core/cuda/cublaslt_api.h"
#include "core/cuda/cudnn_api.h"
#include "core/cuda/testing/fake_blas.h"
#include "core/cuda/testing/fake_dnn.h"
#include "core/cuda/testing/fake_driver.h"
#include "core/cuda/testing/test_driver.h"
#include "core/ops/cuda_kernel_bodies.h"
#include "core/ops/cuda_kernels.h"

namespace chorus {
namespace {

[[noreturn]] void Die(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  std::exit(3);
}

std::vector<cuda::FakeKernel> Kernels() {
  using namespace cuda;  // the lists name their types without it
  return {CHORUS_MOVE_KERNELS(CHORUS_FAKE_KERNEL) CHORUS_TEST_KERNELS(CHORUS_FAKE_KERNEL)
#define CHORUS_FAMILY(Name) CHORUS_KERNELS_OF_##Name(CHORUS_FAKE_KERNEL)
              CHORUS_CUDA_KERNEL_BODIES(CHORUS_FAMILY)
#undef CHORUS_FAMILY
  };
}

// Both stand until the process ends.
struct TestDriver {
  std::unique_ptr<cuda::FakeDriver> fake;  // null: it is the machine's
  cuda::Api api;
};

std::atomic<bool> test_gpu_is_lost{false};

const cuda::Api* TestApi(uint64_t seed) {
  static const TestDriver* const driver = [seed] {
    if (TestsRunOnADriver()) {
      auto loaded = cuda::LoadApi({});
      if (!loaded.ok()) Die(loaded.status());
      return new TestDriver{nullptr, *loaded};
    }
    cuda::FakeDriverOptions options;
    options.seed = seed;
    options.memory_bytes = int64_t{4} << 30;
    options.kernels = Kernels();
    options.fault = [](const char*) {
      constexpr auto kIllegalAddress = static_cast<cuda::Result>(700);
      return test_gpu_is_lost ? kIllegalAddress : cuda::Result::kSuccess;
    };
    auto fake = std::make_unique<cuda::FakeDriver>(std::move(options));
    return new TestDriver{std::move(fake), cuda::FakeDriver::api()};
  }();
  return &driver->api;
}

}  // namespace

std::unique_ptr<Backend> OpenTestGpu(CudaBackendOptions options, uint64_t seed) {
  options.api = TestApi(seed);
  options.images = {{cuda::kernel_image(), cuda::kernel_image_bytes()}, TestKernelImage()};
  for (const KernelImage& image : CudaKernelImages()) options.images.push_back(image);
  if (!TestsRunOnADriver()) {
    // It has all kernels whatever is loaded, also where there is no compiler for them.
    static constexpr char kImage[] = "of a stand-in";
    options.images = {{kImage, sizeof(kImage)}};
  }
  if (TestsRunOnADriver()) {
    options.libraries = {[] { return cuda::LoadBlasApi({}); }, [] { return cuda::LoadDnnApi({}); }};
  } else {
    options.libraries = {cuda::FakeBlasApi, cuda::FakeDnnApi};
  }
  auto backend = CreateCudaBackend(options);
  if (!backend.ok()) Die(backend.status());
  return *std::move(backend);
}

void AwaitTestGpu() {
  const cuda::Api& api = *TestApi(/*seed=*/0);  // that of the first call
  const absl::Status done = cuda::ToStatus(api, api.CtxSynchronize(), "cuCtxSynchronize");
  if (!done.ok()) Die(done);
}

void LoseTestGpu() { test_gpu_is_lost = true; }

}  // namespace chorus
