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

// An x and weights of these types, the y that they give, and what the three ops say of them.
struct Convolutions {
  std::vector<std::string> ops = {"convolution", "convolution_data_grad",
                                  "convolution_weight_grad"};
  TensorType x;
  TensorType w;
  Attributes attributes;

  // Those of an op: it has two, and the size of its result.
  std::vector<TensorType> InputsOf(const std::string& op, const TensorType& y) const {
    if (op == ops[0]) return {x, w};
    if (op == ops[1]) return {y, w};
    return {x, y};
  }
  Attributes AttributesOf(const std::string& op) const {
    Attributes all = attributes;
    const TensorType& like = op == ops[1] ? x : w;
    if (op != ops[0]) {
      all.insert(all.end() - 1,
                 {"size", std::vector<int64_t>{like.dims[2].size, like.dims[3].size}});
    }
    return all;
  }
  // None where they do not fit.
  absl::StatusOr<TensorType> Y() const {
    const TensorType* const types[] = {&x, &w};
    NodeView node;
    node.op = ops[0];
    node.inputs = types;
    node.attributes = attributes;
    const auto outputs = InferTypes(node);
    if (!outputs.ok()) return outputs.status();
    return (*outputs)[0];
  }
};
Convolutions ConvolutionsOf(const std::vector<int64_t>& x, const std::vector<int64_t>& w,
                            const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                            const std::vector<int64_t>& dilation, int64_t groups) {
  Convolutions c;
  c.x = TensorType(DType::kF64, {x[0], x[1], x[2], x[3]});
  c.w = TensorType(DType::kF64, {w[0], w[1], w[2], w[3]});
  c.attributes = {
      {"dilation", dilation}, {"groups", groups}, {"padding", padding}, {"stride", stride}};
  return c;
}

// The adjoint in x takes places apart by what strides and dilations have in common.
TEST_F(CudaKernelsTest, ConvolutionsOfAnyStrideAndDilation) {
  SCOPED_TRACE(kSeed);
  std::mt19937_64 random(kSeed);
  const auto upto = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  int fit = 0;
  for (int n = 0; n < 400; ++n) {
    const int64_t groups = upto(1, 3);
    const int64_t in = upto(1, 3), out = upto(1, 6);
    const Convolutions c =
        ConvolutionsOf({upto(1, 3), groups * in, upto(1, 20), upto(1, 20)},
                       {groups * out, in, upto(1, 4), upto(1, 4)}, {upto(1, 12), upto(1, 12)},
                       {upto(0, 6), upto(0, 6)}, {upto(1, 9), upto(1, 9)}, groups);
    const auto y = c.Y();
    if (!y.ok()) continue;
    ++fit;
    for (const std::string& op : c.ops) {
      std::vector<Value> inputs;
      std::string what = op;
      for (const TensorType& type : c.InputsOf(op, *y)) {
        inputs.push_back(testing::RandomNormal(type, &random));
        what += " " + type.ToString();
      }
      for (const char* name : {"dilation", "padding", "stride"}) {
        for (const int64_t number : IntsAttribute(c.attributes, name)) {
          what += " " + std::to_string(number);
        }
      }
      const Outcome outcome = Run(op, inputs, c.AttributesOf(op));
      ASSERT_TRUE(outcome.status.ok()) << what << ": " << outcome.status;
      testing::ExpectNear(outcome.value, Expected(op, inputs, c.AttributesOf(op)), what);
    }
  }
  EXPECT_GT(fit, 200);
}

// A NaN or an infinity reaches what it is a part of and nothing else: padding is nothing that could
// be multiplied by it.
TEST_F(CudaKernelsTest, ConvolutionsKeepNanWhereItBelongs) {
  for (const int64_t channels : {1, 3, 6}) {
    const Convolutions c =
        ConvolutionsOf({2, channels, 6, 6}, {channels, channels, 3, 3}, {1, 1}, {1, 1}, {1, 1}, 1);
    for (const std::string& op : c.ops) {
      const std::vector<TensorType> types = c.InputsOf(op, *c.Y());
      for (const double value :
           {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
        // In either operand: in a corner, within, and at the end.
        for (size_t poisoned = 0; poisoned < 2; ++poisoned) {
          const auto count = static_cast<size_t>(types[poisoned].num_elements());
          for (const size_t at : {size_t{0}, size_t{8}, size_t{14}, count - 1}) {
            if (at >= count) continue;
            std::vector<Value> inputs;
            for (size_t i = 0; i < 2; ++i) {
              std::vector<double> elements(static_cast<size_t>(types[i].num_elements()), 0.5);
              if (i == poisoned) elements[at] = value;
              inputs.push_back(testing::MakeValue<double>(types[i], elements));
            }
            const Outcome outcome = Run(op, inputs, c.AttributesOf(op));
            ASSERT_TRUE(outcome.status.ok()) << outcome.status;
            testing::ExpectNear(outcome.value, Expected(op, inputs, c.AttributesOf(op)), op);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace chorus
