// Every kernel for GPUs against the naive evaluator, on the stand-in driver.

#include "core/ops/cuda_kernels.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/backend/cuda/testing/fake_driver.h"
#include "core/ops/cuda_kernel_bodies.h"
#include "core/ops/registry.h"
#include "core/ops/testing/evaluator.h"
#include "core/ops/testing/kernel_cases.h"
#include "core/ops/testing/value.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::KernelCase;
using testing::Value;

constexpr uint64_t kSeed = 7;

std::vector<cuda::FakeKernel> Kernels() {
  using namespace cuda;  // NOLINT: the lists name their types without it
  return {
#define CHORUS_FAMILY(Name) CHORUS_KERNELS_OF_##Name(CHORUS_FAKE_KERNEL)
      CHORUS_CUDA_KERNEL_BODIES(CHORUS_FAMILY)
#undef CHORUS_FAMILY
  };
}

// A GPU of the stand-in, and one stream.
class CudaKernelsTest : public ::testing::Test {
 protected:
  CudaKernelsTest() : driver_(Options()), api_(cuda::FakeDriver::api()) {
    static constexpr char kImage[] = "of a stand-in";
    const KernelImage image = {kImage, sizeof(kImage)};
    auto gpu = CudaGpu::Open(&api_, 0, {image});
    EXPECT_TRUE(gpu.ok()) << gpu.status();
    gpu_ = *std::move(gpu);
    gpu_->Enter();
    EXPECT_EQ(api_.StreamCreateWithPriority(&stream_, cuda::kStreamNonBlocking, 0),
              cuda::Result::kSuccess);
  }
  ~CudaKernelsTest() override {
    api_.StreamSynchronize(stream_);
    api_.StreamDestroy(stream_);
  }

  static cuda::FakeDriverOptions Options() {
    cuda::FakeDriverOptions options;
    options.seed = kSeed;
    options.order = cuda::FakeOrder::kEager;  // one stream has one order
    options.kernels = Kernels();
    return options;
  }

  // Memory of the GPU with exactly these bytes in it, behind `beside` others.
  cuda::DevicePtr Upload(const std::string& bytes, size_t beside = 0) {
    cuda::DevicePtr memory = 0;
    if (bytes.empty()) return 0;
    EXPECT_EQ(api_.MemAlloc(&memory, bytes.size() + beside), cuda::Result::kSuccess);
    allocated_.push_back(memory);
    EXPECT_EQ(api_.MemcpyHtoDAsync(memory + beside, bytes.data(), bytes.size(), stream_),
              cuda::Result::kSuccess);
    return memory + beside;
  }

  struct Outcome {
    absl::Status status;
    Value value;
  };
  // What the op's first output is. Operands are `beside` elements beside where they would lie.
  Outcome Run(const std::string& op, const std::vector<Value>& inputs, const Attributes& attributes,
              size_t beside = 0) {
    std::vector<const TensorType*> types;
    for (const Value& input : inputs) types.push_back(&input.type);
    NodeView node;
    node.op = op;
    node.attributes = attributes;
    node.inputs = types;
    const auto outputs = InferTypes(node);
    if (!outputs.ok()) return {outputs.status(), {}};
    auto kernel = MakeCudaKernel(*gpu_, node, *outputs);
    if (!kernel.ok()) return {kernel.status(), {}};
    KernelCall call;
    call.kernel = kernel->get();
    for (const Value& input : inputs) {
      call.inputs.push_back(
          Upload(input.bytes, beside * static_cast<size_t>(DTypeBytes(input.type.dtype))));
    }
    std::vector<std::string> results;
    for (const TensorType& type : *outputs) {
      results.emplace_back(static_cast<size_t>(type.num_bytes()), '\xff');
      call.outputs.push_back(
          Upload(results.back(), beside * static_cast<size_t>(DTypeBytes(type.dtype))));
    }
    call.workspace = Upload(std::string(static_cast<size_t>((*kernel)->workspace_bytes()), '\xff'));
    const cuda::DevicePtr word = Upload(std::string(sizeof(uint64_t), '\xff'));
    absl::Status status = (*kernel)->Enqueue(call, {word, 0}, *gpu_, stream_);
    uint64_t told = 0;
    api_.MemcpyDtoHAsync(&told, word, sizeof(told), stream_);
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i].empty()) continue;
      api_.MemcpyDtoHAsync(&results[i][0], call.outputs[i], results[i].size(), stream_);
    }
    EXPECT_EQ(api_.StreamSynchronize(stream_), cuda::Result::kSuccess);
    for (const cuda::DevicePtr memory : allocated_) api_.MemFree(memory);
    allocated_.clear();
    if (told != ~uint64_t{0}) {
      EXPECT_TRUE((*kernel)->reports());
      status.Update((*kernel)->Failure(told));
    }
    return {status, Value{(*outputs)[0], results[0]}};
  }

  static Value Expected(const std::string& op, const std::vector<Value>& inputs,
                        const Attributes& attributes) {
    std::vector<const TensorType*> types;
    std::vector<const Value*> values;
    for (const Value& input : inputs) {
      types.push_back(&input.type);
      values.push_back(&input);
    }
    NodeView node;
    node.op = op;
    node.attributes = attributes;
    node.inputs = types;
    const auto outputs = InferTypes(node);
    EXPECT_TRUE(outputs.ok()) << outputs.status();
    const auto expected = testing::EvaluateLocal(node, values, *outputs);
    EXPECT_TRUE(expected.ok()) << expected.status();
    return (*expected)[0];
  }

  cuda::FakeDriver driver_;
  const cuda::Api api_;
  std::unique_ptr<CudaGpu> gpu_;
  cuda::Stream stream_ = nullptr;
  std::vector<cuda::DevicePtr> allocated_;
};

TEST_F(CudaKernelsTest, EqualTheNaiveEvaluatorWhereverOperandsLie) {
  SCOPED_TRACE(kSeed);
  std::mt19937_64 random(kSeed);
  std::set<std::string> taken;
  for (const DType dtype : testing::AllDTypes()) {
    for (const KernelCase& c : testing::KernelCases()) {
      if (!HasCudaKernel(c.op) || !testing::Takes(c, dtype)) continue;
      taken.insert(c.op);
      std::string what = c.op + " " + std::string(DTypeName(dtype));
      const std::vector<Value> inputs = testing::InputsOf(c, dtype, &random);
      for (const Value& input : inputs) what += " " + input.type.ToString();
      const Outcome outcome = Run(c.op, inputs, c.attributes);
      ASSERT_TRUE(outcome.status.ok()) << what << ": " << outcome.status;
      testing::ExpectNear(outcome.value, Expected(c.op, inputs, c.attributes), what);
      const Outcome displaced = Run(c.op, inputs, c.attributes, 1);
      ASSERT_TRUE(displaced.status.ok()) << what << ": " << displaced.status;
      EXPECT_EQ(displaced.value, outcome.value) << what;
    }
  }
  std::string text;
  for (const std::string& op : taken) text += op + " ";
  std::printf("ops: %s\n", text.c_str());
}

// Half types are added up as floats, integers wrap, and the order of a sum is that of its products.
TEST_F(CudaKernelsTest, MatmulRoundsOnceWrapsAndKeepsItsOrder) {
  std::vector<double> terms(600, 0);
  terms[0] = terms[599] = 0.25;
  terms[300] = 512;
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    const Value row = testing::FromDoubles(TensorType(dtype, {1, 600}), terms);
    const Value ones =
        testing::FromDoubles(TensorType(dtype, {600, 1}), std::vector<double>(600, 1));
    const Outcome outcome = Run("matmul", {row, ones}, {});
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    // In f16 a quarter more than 512 is 512; in bf16 so is a half.
    EXPECT_EQ(testing::ToDoubles(outcome.value)[0], dtype == DType::kF16 ? 512.5 : 512);
  }
  const int64_t large = (int64_t{1} << 62) + 3;
  const Outcome wrapped = Run("matmul",
                              {testing::MakeValue<int64_t>({1, 3}, {large, -5, large}),
                               testing::MakeValue<int64_t>({3, 1}, {4, large, 3})},
                              {});
  const auto u = static_cast<uint64_t>(large);
  EXPECT_EQ(testing::Elements<int64_t>(wrapped.value),
            (std::vector<int64_t>{static_cast<int64_t>(u * 4 - u * 5 + u * 3)}));
  const Outcome ordered = Run("matmul",
                              {testing::MakeValue<float>({1, 4}, {1, 3e8f, -3e8f, 1}),
                               testing::MakeValue<float>({4, 1}, {1, 1, 1, 1})},
                              {});
  EXPECT_EQ(testing::Elements<float>(ordered.value), (std::vector<float>{1}));
}

// Rows and columns that a tile has beyond the matrix are others, computed again: what they hold
// reaches nothing.
TEST_F(CudaKernelsTest, MatmulKeepsNanInItsRowAndColumn) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  constexpr int64_t kSize = 6;
  for (int flags = 0; flags < 4; ++flags) {
    const Attributes attributes = {{"transpose_a", int64_t{flags & 1}},
                                   {"transpose_b", int64_t{flags >> 1}}};
    std::vector<double> a(kSize * kSize, 1);
    a[kSize * kSize - 1] = nan;
    const Value left = testing::MakeValue<double>({kSize, kSize}, a);
    const Value right =
        testing::MakeValue<double>({kSize, kSize}, std::vector<double>(kSize * kSize, 2));
    const Outcome outcome = Run("matmul", {left, right}, attributes);
    const std::vector<double> c = testing::Elements<double>(outcome.value);
    for (size_t i = 0; i < c.size(); ++i) {
      if (i / kSize == kSize - 1) {
        EXPECT_TRUE(std::isnan(c[i])) << flags << " " << i;
      } else {
        EXPECT_EQ(c[i], 2 * kSize) << flags << " " << i;
      }
    }
  }
}

}  // namespace
}  // namespace chorus
