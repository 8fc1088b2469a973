#include "core/cuda/dnn.h"

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/cuda/cudnn_api.h"
#include "core/cuda/gpu.h"
#include "core/cuda/testing/fake_dnn.h"
#include "core/cuda/testing/fake_driver.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using Gives = DnnProblem::Gives;

// Of x [n, c, size, size] and 3 x 3 weights for as many channels.
DnnProblem Square(int64_t n, int64_t c, int64_t size, Gives gives = Gives::kY,
                  cuda::DnnType type = cuda::DnnType::kF32) {
  DnnProblem problem;
  problem.gives = gives;
  problem.type = type;
  problem.x = problem.y = {n, c, size, size};
  problem.w = {c, c, 3, 3};
  problem.padding = {1, 1};
  return problem;
}

// What an engine wants, and behind it room for each of the operands.
int64_t WorkspaceFor(const DnnProblem& problem, int64_t engine_bytes) {
  int64_t end = engine_bytes;
  for (const auto& sizes : {problem.x, problem.w, problem.y}) {
    const int64_t elements = sizes[0] * sizes[1] * sizes[2] * sizes[3];
    end = (end + 255) / 256 * 256 + elements * (problem.type == cuda::DnnType::kF64 ? 8 : 4);
  }
  return end + 256 - 64;
}

class DnnTest : public ::testing::Test {
 protected:
  DnnTest() : driver_(Options()), api_(cuda::FakeDriver::api()) {}
  static cuda::FakeDriverOptions Options() {
    cuda::FakeDriverOptions options;
    options.order = cuda::FakeOrder::kEager;
    return options;
  }

  std::unique_ptr<CudaGpu> Open(CudaDnn::Load load) {
    static constexpr char kImage[] = "of a stand-in";
    auto gpu = CudaGpu::Open(&api_, 0, {{kImage, sizeof(kImage)}}, {nullptr, std::move(load)});
    EXPECT_TRUE(gpu.ok()) << gpu.status();
    return *std::move(gpu);
  }
  static absl::StatusOr<cuda::DnnApi> Load() {
    ++loads;
    return cuda::FakeDnnApi();
  }

  static inline int loads = 0;
  cuda::FakeDriver driver_;
  const cuda::Api api_;
};

TEST_F(DnnTest, OpensTheLibraryOnceAndWhenItIsWanted) {
  loads = 0;
  const cuda::FakeDnnCounts before = cuda::CountsOfFakeDnn();
  {
    const auto gpu = Open(Load);
    // Without elements or terms there is nothing to ask.
    EXPECT_EQ(*gpu->MakeConvolution(Square(0, 2, 4)), nullptr);
    EXPECT_EQ(*gpu->MakeConvolution(Square(2, 0, 4)), nullptr);
    EXPECT_EQ(*gpu->MakeConvolution(Square(2, 2, 0)), nullptr);
    EXPECT_EQ(loads, 0);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&gpu] { EXPECT_NE(*gpu->MakeConvolution(Square(2, 3, 4)), nullptr); });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(loads, 1);
    EXPECT_EQ(cuda::CountsOfFakeDnn().handles_made, before.handles_made + 1);
    EXPECT_EQ(cuda::CountsOfFakeDnn().alive, before.alive + 1) << "beside the handle";
  }
  EXPECT_EQ(cuda::CountsOfFakeDnn().alive, before.alive);
}

TEST_F(DnnTest, SaysOnceThatThereIsNoLibrary) {
  const auto gpu = Open([]() -> absl::StatusOr<cuda::DnnApi> {
    return MakeError(Reason::kWrongState, "no libcudnn.so.9");
  });
  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(*gpu->MakeConvolution(Square(2, 2, 4)), nullptr);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "cuda backend: convolutions without cuDNN: no libcudnn.so.9\n");
}

// Of what it is asked for, a library that knows no engine; one that cannot give a handle.
TEST_F(DnnTest, SaysOnceThatAConvolutionIsRefused) {
  const auto gpu = Open([]() -> absl::StatusOr<cuda::DnnApi> {
    cuda::DnnApi api = cuda::FakeDnnApi();
    api.GetAttribute = [](cuda::DnnDescriptor, cuda::DnnAttribute, cuda::DnnAttributeType, int64_t,
                          int64_t* count, void*) {
      *count = 0;
      return cuda::DnnStatus::kSuccess;
    };
    return api;
  });
  const int64_t before = cuda::CountsOfFakeDnn().alive;
  ::testing::internal::CaptureStderr();
  for (const int64_t channels : {2, 3}) {
    EXPECT_EQ(*gpu->MakeConvolution(Square(4, channels, 8)), nullptr);
  }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "cuda backend: not by cuDNN, as perhaps others: y of a convolution of f32 4x2x8x8 and "
            "2x2x3x3, stride 1x1, padding 1x1, dilation 1x1: FAKE (3000)\n");
  EXPECT_EQ(cuda::CountsOfFakeDnn().alive, before + 1) << "beside the handle";
}

TEST_F(DnnTest, SaysThatTheLibraryGivesNoHandle) {
  const auto gpu = Open([]() -> absl::StatusOr<cuda::DnnApi> {
    cuda::DnnApi api = cuda::FakeDnnApi();
    api.Create = [](cuda::DnnHandle*) { return cuda::DnnStatus::kNotSupported; };
    return api;
  });
  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 2; ++i) EXPECT_EQ(*gpu->MakeConvolution(Square(2, 2, 4)), nullptr);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "cuda backend: convolutions without cuDNN: a stand-in gives no handle: FAKE (3000)\n");
}

// The stand-in's first sound engine, which alone wants so much workspace, of each operation and
// type: f64 is known to its second heuristic only.
TEST_F(DnnTest, TakesTheFirstEngineThatIsSound) {
  const auto gpu = Open(Load);
  for (const auto type : {cuda::DnnType::kF32, cuda::DnnType::kF64}) {
    for (const Gives gives : {Gives::kY, Gives::kX, Gives::kW}) {
      const DnnProblem problem = Square(2, 3, 16, gives, type);
      const auto convolution = *gpu->MakeConvolution(problem);
      ASSERT_NE(convolution, nullptr) << problem.Text();
      const int64_t elements = gives == Gives::kW ? 3 * 3 * 9 : 2 * 3 * 16 * 16;
      EXPECT_EQ(convolution->workspace_bytes(), WorkspaceFor(problem, 4 * elements))
          << problem.Text();
    }
  }
}

// Whatever the library has no memory for, or the GPU fails at, says nothing of the problem: nothing
// else is chosen for that, and the next time it is what it always is.
TEST_F(DnnTest, WhatPassesChoosesNoOtherEngine) {
  static int until_refused = 0;  // calls
  static cuda::DnnStatus refusal;
  static const auto refuses = [] { return --until_refused == 0; };
  const auto gpu = Open([]() -> absl::StatusOr<cuda::DnnApi> {
    cuda::DnnApi api = cuda::FakeDnnApi();
    api.CreateDescriptor = [](cuda::DnnDescriptorType type, cuda::DnnDescriptor* descriptor) {
      return refuses() ? refusal : cuda::FakeDnnApi().CreateDescriptor(type, descriptor);
    };
    api.SetAttribute = [](cuda::DnnDescriptor descriptor, cuda::DnnAttribute attribute,
                          cuda::DnnAttributeType type, int64_t count, const void* elements) {
      return refuses()
                 ? refusal
                 : cuda::FakeDnnApi().SetAttribute(descriptor, attribute, type, count, elements);
    };
    api.GetAttribute = [](cuda::DnnDescriptor descriptor, cuda::DnnAttribute attribute,
                          cuda::DnnAttributeType type, int64_t wanted, int64_t* count,
                          void* elements) {
      return refuses() ? refusal
                       : cuda::FakeDnnApi().GetAttribute(descriptor, attribute, type, wanted, count,
                                                         elements);
    };
    api.Finalize = [](cuda::DnnDescriptor descriptor) {
      return refuses() ? refusal : cuda::FakeDnnApi().Finalize(descriptor);
    };
    return api;
  });
  const DnnProblem problem = Square(2, 3, 16);
  const int64_t alive = cuda::CountsOfFakeDnn().alive;
  const std::pair<cuda::DnnStatus, Reason> refusals[] = {
      {cuda::DnnStatus::kNoHostMemory, Reason::kOutOfMemory},
      {cuda::DnnStatus::kNoDeviceMemory, Reason::kOutOfMemory},
      {static_cast<cuda::DnnStatus>(5003), Reason::kExecFailed}};
  for (const auto& [status, reason] : refusals) {
    refusal = status;
    int call = 1;
    for (; call < 1000; ++call) {
      SCOPED_TRACE(call);
      until_refused = call;
      const auto refused = gpu->MakeConvolution(problem);
      if (until_refused > 0) break;  // it makes fewer
      ASSERT_EQ(ErrorOf(refused.status()).reason, reason) << refused.status();
      const auto convolution = gpu->MakeConvolution(problem);
      ASSERT_TRUE(convolution.ok()) << convolution.status();
      ASSERT_EQ((*convolution)->workspace_bytes(),
                WorkspaceFor(problem, int64_t{4} * 2 * 3 * 16 * 16));
    }
    EXPECT_GT(call, 100) << "it reaches the engines";
    EXPECT_LT(call, 1000);
  }
  EXPECT_EQ(cuda::CountsOfFakeDnn().alive, alive + 1) << "beside the handle";
}

// What all of it says is compared with the naive evaluator in core/ops/cuda_kernels_test.cc.
// Operands that are aligned to their elements alone go by way of the workspace: the stand-in
// refuses them.
TEST_F(DnnTest, RunsOnTheStreamThatItIsGivenWhereverOperandsLie) {
  const auto gpu = Open(Load);
  gpu->Enter();
  // One channel, one place, and so one product.
  DnnProblem problem;
  problem.x = problem.w = problem.y = {1, 1, 1, 1};
  const auto convolution = *gpu->MakeConvolution(problem);
  ASSERT_NE(convolution, nullptr);
  cuda::DevicePtr memory = 0;
  ASSERT_EQ(api_.MemAlloc(&memory, 4096), cuda::Result::kSuccess);
  const cuda::DevicePtr x = memory, w = memory + 4, y = memory + 8;
  for (int i = 1; i <= 2; ++i) {
    cuda::Stream stream = nullptr;
    ASSERT_EQ(api_.StreamCreateWithPriority(&stream, cuda::kStreamNonBlocking, 0),
              cuda::Result::kSuccess);
    const float factors[] = {3.0f * static_cast<float>(i), 5.0f};
    ASSERT_EQ(api_.MemcpyHtoDAsync(x, factors, sizeof(factors), stream), cuda::Result::kSuccess);
    const absl::Status enqueued = convolution->Enqueue(api_, x, w, y, memory + 64, stream);
    ASSERT_TRUE(enqueued.ok()) << enqueued;
    float product = 0;
    ASSERT_EQ(api_.MemcpyDtoHAsync(&product, y, sizeof(product), stream), cuda::Result::kSuccess);
    ASSERT_EQ(api_.StreamSynchronize(stream), cuda::Result::kSuccess);
    EXPECT_EQ(product, 15.0f * static_cast<float>(i));
    ASSERT_EQ(api_.StreamDestroy(stream), cuda::Result::kSuccess);
  }
  // Refused by the library, here for want of a stream.
  const absl::Status refused = convolution->Enqueue(api_, x, x, x, memory + 64, nullptr);
  EXPECT_EQ(ErrorOf(refused).reason, Reason::kExecFailed);
  EXPECT_EQ(ErrorOf(refused).message, "cudnnBackendExecute: FAKE (2000)");
  api_.MemFree(memory);
}

// The stand-in refuses a handle that two threads use.
TEST_F(DnnTest, ManyThreadsMakeAndRunThem) {
  const auto gpu = Open(Load);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([this, &gpu] {
      gpu->Enter();
      cuda::Stream stream = nullptr;
      cuda::DevicePtr memory = 0;
      ASSERT_EQ(api_.StreamCreateWithPriority(&stream, cuda::kStreamNonBlocking, 0),
                cuda::Result::kSuccess);
      ASSERT_EQ(api_.MemAlloc(&memory, 1 << 16), cuda::Result::kSuccess);
      for (int n = 0; n < 50; ++n) {
        const auto convolution = *gpu->MakeConvolution(Square(1, 2, 4));
        ASSERT_NE(convolution, nullptr);
        const absl::Status status =
            convolution->Enqueue(api_, memory, memory + 1024, memory + 2048, memory + 4096, stream);
        ASSERT_TRUE(status.ok()) << status;
        ASSERT_EQ(api_.StreamSynchronize(stream), cuda::Result::kSuccess);
      }
      api_.MemFree(memory);
      api_.StreamDestroy(stream);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace chorus
