#include "core/backend/host/host_backend.h"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "core/backend/testing/backend_conformance.h"
#include "core/backend/testing/device_rig.h"
#include "core/base/mutex.h"
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

// Of which every unit fails, the first one behind another.
class AllFails : public HostKernel {
 public:
  AllFails() : HostKernel(/*units=*/64, /*cost_per_unit=*/1 << 20) {}
  absl::Status Run(const HostBuffers&, int64_t begin, int64_t) const override {
    const MutexLock lock(&mutex_);
    if (begin > 0) {
      others_have_failed_ = true;
      changed_.SignalAll();
    }
    while (!others_have_failed_) changed_.Wait(&mutex_);
    return absl::AbortedError(absl::StrCat("unit ", begin));
  }

 private:
  mutable Mutex mutex_;
  mutable CondVar changed_;
  mutable bool others_have_failed_ ABSL_GUARDED_BY(mutex_) = false;
};

TEST(HostBackendTest, AKernelFailsWithItsFirstFailureWhicheverThreadIsFirst) {
  DeviceRig rig(
      OpenAllOnPool(1, [](const NodeView&, absl::Span<const TensorType>) -> HostKernelOrError {
        return std::unique_ptr<HostKernel>(std::make_unique<AllFails>());
      }));
  const TensorType type(DType::kF32, {1});
  const TensorType* const inputs[] = {&type};
  NodeView node;
  node.op = "test_fail";
  node.inputs = inputs;
  const auto kernel = rig.backend()->device(0)->MakeKernel(node, {type});
  ASSERT_TRUE(kernel.ok()) << kernel.status();
  KernelCall call;
  call.kernel = kernel->get();
  call.inputs = {rig.Upload(0, std::vector<float>{1})};
  call.outputs = {rig.Upload(0, std::vector<float>{2})};
  rig.stream(0)->Launch(std::move(call));
  EXPECT_EQ(rig.Synchronize(0), absl::AbortedError("unit 0"));
}

}  // namespace
}  // namespace chorus
