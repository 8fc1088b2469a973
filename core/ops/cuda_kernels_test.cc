// Every kernel for GPUs against the naive evaluator, on the stand-in driver.

#include "core/ops/cuda_kernels.h"

#include <cstring>
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

}  // namespace
}  // namespace chorus
