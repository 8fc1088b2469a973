#include "core/cuda/gpu.h"

#include <chrono>
#include <future>
#include <string>
#include <vector>

#include "core/cuda/testing/fake_driver.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

// A driver that loads a kernel when it is asked for it, and takes as long as the test likes.
std::promise<void>* asked = nullptr;
std::shared_future<void>* loads = nullptr;
cuda::Result GetFunctionSlowly(cuda::Function* function, cuda::Module module, const char* name) {
  asked->set_value();
  loads->wait();
  return cuda::FakeDriver::api().ModuleGetFunction(function, module, name);
}

// Copies ask whether memory is pinned, with a lock that all work of the GPU needs.
TEST(GpuTest, WhetherMemoryIsPinnedIsKnownWhileTheDriverLoadsAKernel) {
  cuda::FakeDriverOptions options;
  options.kernels.resize(1);
  options.kernels[0].name = "slow";
  const cuda::FakeDriver driver(std::move(options));
  cuda::Api api = cuda::FakeDriver::api();
  std::promise<void> is_asked;
  std::promise<void> may_load;
  std::shared_future<void> may_load_future = may_load.get_future().share();
  asked = &is_asked;
  loads = &may_load_future;
  api.ModuleGetFunction = &GetFunctionSlowly;
  constexpr char kImage[] = "of a stand-in";
  const auto gpu = *CudaGpu::Open(&api, 0, {{kImage, sizeof(kImage)}}, {});
  std::vector<char> memory(4096);
  ASSERT_TRUE(gpu->Pin(memory.data(), 4096).ok());

  auto found = std::async(std::launch::async, [&] { return gpu->Find("slow").ok(); });
  is_asked.get_future().wait();
  auto pinned =
      std::async(std::launch::async, [&] { return gpu->IsPinned(memory.data() + 96, 4000); });
  EXPECT_EQ(pinned.wait_for(std::chrono::seconds(10)), std::future_status::ready);
  may_load.set_value();
  EXPECT_TRUE(found.get());
  EXPECT_TRUE(pinned.get());
  EXPECT_FALSE(gpu->IsPinned(memory.data() + 97, 4000));
  // It is not asked again: its promise would throw.
  EXPECT_TRUE(gpu->Find("slow").ok());
  gpu->Unpin(memory.data());
  EXPECT_FALSE(gpu->IsPinned(memory.data(), 1));
}

}  // namespace
}  // namespace chorus
