#include "core/cuda/blas.h"

#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/cuda/cublaslt_api.h"
#include "core/cuda/gpu.h"
#include "core/cuda/testing/fake_blas.h"
#include "core/cuda/testing/fake_driver.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using ::testing::HasSubstr;

BlasProblem Square(int64_t side, cuda::BlasType type = cuda::BlasType::kF32) {
  BlasProblem problem;
  problem.type = type;
  problem.rows = problem.columns = problem.depth = side;
  return problem;
}

// What the stand-in's algorithm wants: two parts of each sum.
int64_t PartsOf(const BlasProblem& problem) {
  const int64_t sum_bytes = problem.type == cuda::BlasType::kF64 ? 8 : 4;
  return 2 * problem.batch * problem.rows * problem.columns * sum_bytes;
}

class BlasTest : public ::testing::Test {
 protected:
  BlasTest() : driver_(cuda::FakeDriverOptions()), api_(cuda::FakeDriver::api()) {}

  std::unique_ptr<CudaGpu> Open(CudaBlas::Load load) {
    static constexpr char kImage[] = "of a stand-in";
    auto gpu = CudaGpu::Open(&api_, 0, {{kImage, sizeof(kImage)}}, {std::move(load), nullptr});
    EXPECT_TRUE(gpu.ok()) << gpu.status();
    return *std::move(gpu);
  }
  static absl::StatusOr<cuda::BlasApi> Load() {
    ++loads;
    return cuda::FakeBlasApi();
  }

  static inline int loads = 0;
  cuda::FakeDriver driver_;
  const cuda::Api api_;
};

TEST_F(BlasTest, OpensTheLibraryOnceAndWhenItIsWanted) {
  loads = 0;
  const cuda::FakeBlasCounts before = cuda::CountsOfFakeBlas();
  {
    const auto gpu = Open(Load);
    // Without elements or terms there is nothing to ask.
    for (int64_t BlasProblem::*size :
         {&BlasProblem::batch, &BlasProblem::rows, &BlasProblem::columns, &BlasProblem::depth}) {
      BlasProblem empty = Square(4);
      empty.*size = 0;
      EXPECT_EQ(gpu->MakeProduct(empty), nullptr);
    }
    EXPECT_EQ(loads, 0);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&gpu] { EXPECT_NE(gpu->MakeProduct(Square(4)), nullptr); });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(loads, 1);
    EXPECT_EQ(cuda::CountsOfFakeBlas().handles_made, before.handles_made + 1);
    EXPECT_EQ(cuda::CountsOfFakeBlas().alive, before.alive + 1) << "beside the handle";
  }
  EXPECT_EQ(cuda::CountsOfFakeBlas().alive, before.alive);
}

TEST_F(BlasTest, SaysOnceThatThereIsNoLibrary) {
  int asked = 0;
  const auto gpu = Open([&asked]() -> absl::StatusOr<cuda::BlasApi> {
    ++asked;
    return MakeError(Reason::kWrongState, "no libcublasLt.so.13");
  });
  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(gpu->MakeProduct(Square(4)), nullptr);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "cuda backend: matrix products without cuBLASLt: no libcublasLt.so.13\n");
  EXPECT_EQ(asked, 1);
}

TEST_F(BlasTest, SaysOnceThatAProductIsRefused) {
  const auto gpu = Open([]() -> absl::StatusOr<cuda::BlasApi> {
    cuda::BlasApi api = cuda::FakeBlasApi();
    api.MatmulAlgoGetHeuristic = [](cuda::BlasHandle, cuda::BlasMatmul, cuda::BlasLayout,
                                    cuda::BlasLayout, cuda::BlasLayout, cuda::BlasLayout,
                                    cuda::BlasChoice, int, cuda::BlasHeuristic*, int* count) {
      *count = 0;
      return cuda::BlasStatus::kSuccess;
    };
    return api;
  });
  const int64_t alive = cuda::CountsOfFakeBlas().alive;
  ::testing::internal::CaptureStderr();
  BlasProblem problem = Square(4, cuda::BlasType::kBF16);
  problem.batch = 3;
  problem.transpose_b = true;
  EXPECT_EQ(gpu->MakeProduct(problem), nullptr);
  EXPECT_EQ(gpu->MakeProduct(Square(5)), nullptr);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "cuda backend: not by cuBLASLt, as perhaps others: 3 products of bf16 4 x 4 x 4, B^T: "
            "FAKE (15)\n");
  EXPECT_EQ(cuda::CountsOfFakeBlas().alive, alive + 1) << "beside the handle";
}

TEST_F(BlasTest, SaysThatALibraryCannotBeOpened) {
  const auto gpu = Open([]() -> absl::StatusOr<cuda::BlasApi> {
    cuda::BlasApi api = cuda::FakeBlasApi();
    api.Create = [](cuda::BlasHandle*) { return cuda::BlasStatus::kNotSupported; };
    return api;
  });
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(gpu->MakeProduct(Square(4)), nullptr);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("a stand-in gives no handle: FAKE (15)"));
}

TEST_F(BlasTest, HasRoomForOperandsWhoseRowsAreAligned) {
  const auto gpu = Open(Load);
  constexpr int64_t kAligning = 192;  // from 64 bytes to 256
  // Rows of 12 bytes are as aligned as their elements.
  const BlasProblem odd = Square(3);
  EXPECT_EQ(gpu->MakeProduct(odd)->workspace_bytes(), PartsOf(odd) + kAligning);
  // 256 bytes for each operand and 512 for the parts.
  EXPECT_EQ(gpu->MakeProduct(Square(8))->workspace_bytes(),
            PartsOf(Square(8)) + 3 * 256 + kAligning);
  // Only b's rows are: 4 columns of it, and of c.
  BlasProblem mixed = Square(4);
  mixed.depth = 5;
  EXPECT_EQ(gpu->MakeProduct(mixed)->workspace_bytes(), 256 + 256 + 64 + kAligning);
  // The parts of sums do not fit below the bound, and stay in one piece.
  const BlasProblem large = Square(2100);
  EXPECT_EQ(gpu->MakeProduct(large)->workspace_bytes(), 2 * 17640192 + 17640000 + kAligning);
}

// Three times one A by a B each, added to what stood there, wherever C lies.
TEST_F(BlasTest, AddsToWhatStandsThere) {
  const auto gpu = Open(Load);
  gpu->Enter();
  cuda::Stream stream = nullptr;
  ASSERT_EQ(api_.StreamCreateWithPriority(&stream, cuda::kStreamNonBlocking, 0),
            cuda::Result::kSuccess);
  BlasProblem problem;
  problem.batch = 3;
  problem.rows = 2;
  problem.columns = 4;
  problem.depth = 1;
  problem.one_a = true;
  const auto product = gpu->MakeProduct(problem);
  ASSERT_NE(product, nullptr);
  const float a[2] = {1, 10};
  float b[12];
  float c[24];
  for (int i = 0; i < 12; ++i) b[i] = static_cast<float>(i);
  for (int i = 0; i < 24; ++i) c[i] = 1000;
  const auto upload = [&](const void* from, size_t bytes, size_t beside) {
    cuda::DevicePtr memory = 0;
    EXPECT_EQ(api_.MemAlloc(&memory, bytes + beside), cuda::Result::kSuccess);
    EXPECT_EQ(api_.MemcpyHtoDAsync(memory + beside, from, bytes, stream), cuda::Result::kSuccess);
    return memory + beside;
  };
  const std::vector<char> zeros(static_cast<size_t>(product->workspace_bytes()));
  for (const size_t beside : {size_t{0}, sizeof(float)}) {
    const cuda::DevicePtr to = upload(c, sizeof(c), beside);
    const cuda::DevicePtr at_a = upload(a, sizeof(a), 0);
    const cuda::DevicePtr at_b = upload(b, sizeof(b), 0);
    const cuda::DevicePtr workspace = upload(zeros.data(), zeros.size(), 0);
    for (int times = 0; times < 2; ++times) {
      const absl::Status done =
          product->Enqueue(api_, at_a, at_b, to, workspace, stream, /*adds=*/true);
      ASSERT_TRUE(done.ok()) << done;
    }
    float got[24];
    ASSERT_EQ(api_.MemcpyDtoHAsync(got, to, sizeof(got), stream), cuda::Result::kSuccess);
    ASSERT_EQ(api_.StreamSynchronize(stream), cuda::Result::kSuccess);
    for (int n = 0; n < 3; ++n) {
      for (int row = 0; row < 2; ++row) {
        for (int column = 0; column < 4; ++column) {
          EXPECT_EQ(got[(n * 2 + row) * 4 + column], 1000 + 2 * a[row] * b[n * 4 + column])
              << "product " << n << ", " << row << ", " << column;
        }
      }
    }
    // Each begins its allocation, but the one that lies beside it.
    for (const cuda::DevicePtr memory : {to - beside, at_a, at_b, workspace}) {
      EXPECT_EQ(api_.MemFree(memory), cuda::Result::kSuccess);
    }
  }
  EXPECT_EQ(api_.StreamDestroy(stream), cuda::Result::kSuccess);
}

TEST_F(BlasTest, KeepsNoRoomForWhatIsAligned) {
  const auto gpu = Open(Load);
  BlasProblem problem = Square(8);
  problem.aligned_b = problem.aligned_c = true;
  const auto product = gpu->MakeProduct(problem);
  EXPECT_EQ(product->workspace_bytes(), PartsOf(problem) + 256 + 192) << "a's";
  for (const auto& at : {std::make_pair(260, 256), std::make_pair(256, 260)}) {
    const absl::Status refused =
        product->Enqueue(api_, 256, static_cast<cuda::DevicePtr>(at.first),
                         static_cast<cuda::DevicePtr>(at.second), 256, nullptr);
    EXPECT_EQ(ErrorOf(refused).reason, Reason::kInternal);
  }
}

TEST_F(BlasTest, TellsOfAProductThatFails) {
  const auto gpu = Open([]() -> absl::StatusOr<cuda::BlasApi> {
    cuda::BlasApi api = cuda::FakeBlasApi();
    api.Matmul = [](cuda::BlasHandle, cuda::BlasMatmul, const void*, const void*, cuda::BlasLayout,
                    const void*, cuda::BlasLayout, const void*, const void*, cuda::BlasLayout,
                    void*, cuda::BlasLayout, const cuda::BlasAlgorithm*, void*, size_t,
                    cuda::Stream) { return static_cast<cuda::BlasStatus>(13); };
    return api;
  });
  const auto product = gpu->MakeProduct(Square(4));
  const absl::Status failed = product->Enqueue(api_, 256, 256, 256, 256, nullptr);
  EXPECT_EQ(ErrorOf(failed).reason, Reason::kExecFailed);
  EXPECT_EQ(ErrorOf(failed).message, "cublasLtMatmul: FAKE (13)");
}

}  // namespace
}  // namespace chorus
