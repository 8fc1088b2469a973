// A GPU of the stand-in driver without kernels, for tests of what the backend is made of.
//
// Threads: one. Ownership: it has the driver and the GPU; streams are its own. Errors: end the
// test.
#ifndef CHORUS_CORE_BACKEND_CUDA_TESTING_FAKE_GPU_H_
#define CHORUS_CORE_BACKEND_CUDA_TESTING_FAKE_GPU_H_

#include <memory>
#include <vector>

#include "core/cuda/cuda_api.h"
#include "core/cuda/gpu.h"
#include "core/cuda/testing/fake_driver.h"
#include "gtest/gtest.h"

namespace chorus {
namespace testing {

class FakeGpu {
 public:
  FakeGpu() : driver_(cuda::FakeDriverOptions()), api_(cuda::FakeDriver::api()) {
    static constexpr char kImage[] = "of a stand-in";
    gpu_ = *CudaGpu::Open(&api_, 0, {{kImage, sizeof(kImage)}}, {});
    gpu_->Enter();
  }
  ~FakeGpu() {
    for (const cuda::Stream stream : streams_) {
      api_.StreamSynchronize(stream);
      api_.StreamDestroy(stream);
    }
  }

  cuda::FakeDriver& driver() { return driver_; }
  const cuda::Api& api() const { return api_; }
  const CudaGpu* get() const { return gpu_.get(); }
  cuda::Stream NewStream() {
    cuda::Stream stream = nullptr;
    EXPECT_EQ(api_.StreamCreateWithPriority(&stream, cuda::kStreamNonBlocking, 0),
              cuda::Result::kSuccess);
    streams_.push_back(stream);
    return stream;
  }

 private:
  cuda::FakeDriver driver_;
  const cuda::Api api_;
  std::unique_ptr<CudaGpu> gpu_;
  std::vector<cuda::Stream> streams_;
};

}  // namespace testing
}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_CUDA_TESTING_FAKE_GPU_H_
