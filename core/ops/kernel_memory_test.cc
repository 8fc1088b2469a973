// Kernels allocate nothing as they run, but for what libraries pack, which has a bound: what they
// need beside their operands is their workspace, which is reserved and charged with the run.
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <dnnl.hpp>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "core/base/counting_malloc.h"
#include "core/ops/host_kernels.h"
#include "core/ops/registry.h"
#include "core/ops/testing/value.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::Value;

struct Case {
  const char* op;
  std::vector<TensorType> inputs;
  Attributes attributes;
};

TensorType Type(DType dtype, const std::vector<int64_t>& sizes) {
  TensorType type(dtype, {});
  for (const int64_t size : sizes) type.dims.emplace_back(size);
  return type;
}

// One of each family of kernels; those that add up in wider numbers than they give.
std::vector<Case> Cases() {
  const TensorType bf16 = Type(DType::kBF16, {40, 300});
  const TensorType f32 = Type(DType::kF32, {40, 300});
  const TensorType i64 = Type(DType::kI64, {40, 300});
  const TensorType indices = Type(DType::kI32, {40});
  const Attributes rows = {{"axis", int64_t{0}}};
  const Attributes columns = {{"axis", int64_t{1}}};
  return {
      {"avg_pool", {Type(DType::kBF16, {2, 3, 9, 300})}, {{"kernel", std::vector<int64_t>{3, 3}}}},
      {"max_pool_index",
       {Type(DType::kF32, {2, 3, 9, 300})},
       {{"kernel", std::vector<int64_t>{3, 3}}}},
      {"add", {bf16, bf16}, {}},
      {"tanh", {f32}, {}},
      {"cast", {bf16}, {{"dtype", std::string("f64")}}},
      {"eq", {i64, i64}, {}},
      {"softmax", {bf16}, rows},
      {"log_softmax", {bf16}, columns},
      {"softmax_grad", {bf16, bf16}, rows},
      {"moments", {f32}, {{"rows", std::vector<int64_t>{0, 1}}}},
      {"normalize_grad",
       {f32, Type(DType::kF32, {2, 40}), Type(DType::kF32, {300}), f32},
       {{"epsilon", 1e-5},
        {"rows", std::vector<int64_t>{0, 1}},
        {"weights", std::vector<int64_t>{1, 2}}}},
      {"normalize_weight_grad",
       {f32, Type(DType::kF32, {2, 300}), f32},
       {{"epsilon", 1e-5},
        {"rows", std::vector<int64_t>{1, 2}},
        {"weights", std::vector<int64_t>{1, 2}}}},
      {"cross_entropy", {bf16, indices}, {}},
      {"cross_entropy_grad", {f32, indices, Type(DType::kF32, {40})}, {}},
      {"sum", {bf16}, {{"axes", std::vector<int64_t>{0}}}},
      {"mean", {bf16}, {{"axes", std::vector<int64_t>{1}}}},
      {"max", {i64}, {}},
      {"expand", {Type(DType::kF32, {1, 300})}, {{"dims", std::vector<int64_t>{40, 300}}}},
      {"take", {f32, indices}, rows},
      {"scatter_add", {bf16, indices}, {{"axis", int64_t{0}}, {"size", int64_t{50}}}},
      {"one_hot", {indices}, {{"depth", int64_t{9}}, {"dtype", std::string("f32")}}},
      {"arg_max", {bf16}, rows},
      {"arg_sort", {bf16}, rows},
      {"arg_sort", {i64}, {{"axis", int64_t{1}}, {"descending", int64_t{1}}, {"k", int64_t{20}}}},
      {"arg_sort", {f32}, columns},
      {"cum_sum", {bf16}, rows},
      {"product", {bf16, bf16, bf16}, {}},
      {"transpose", {f32}, {{"perm", std::vector<int64_t>{1, 0}}}},
      {"concat", {f32, f32}, rows},
      {"pack_rows", {f32, Type(DType::kI64, {1})}, {{"parts", int64_t{4}}}},
      {"random_normal", {Type(DType::kI64, {}), Type(DType::kI64, {})}, TypeAttributes(bf16)},
  };
}

// What the kernel takes as it runs, at most at a time.
void MostBytesOf(const Case& c, int64_t* most) {
  std::vector<Value> inputs;
  for (const TensorType& type : c.inputs) inputs.push_back(testing::Zeros(type));
  std::vector<const TensorType*> types;
  std::vector<const void*> pointers;
  for (const Value& input : inputs) {
    types.push_back(&input.type);
    pointers.push_back(input.bytes.data());
  }
  NodeView node;
  node.op = c.op;
  node.attributes = c.attributes;
  node.inputs = types;
  const auto outputs = InferTypes(node);
  ASSERT_TRUE(outputs.ok()) << outputs.status();
  const auto kernel = MakeHostKernel(node, *outputs);
  ASSERT_TRUE(kernel.ok()) << kernel.status();
  Value result = testing::Zeros((*outputs)[0]);
  std::vector<void*> out = {&result.bytes[0]};
  std::vector<float> workspace(static_cast<size_t>((*kernel)->workspace_bytes()) / sizeof(float));
  const HostBuffers buffers = {pointers, out,
                               absl::MakeSpan(reinterpret_cast<char*>(workspace.data()),
                                              static_cast<size_t>((*kernel)->workspace_bytes()))};
  const MallocUse use;
  const absl::Status status = (*kernel)->RunAll(buffers);
  *most = use.most_bytes();
  EXPECT_EQ(use.bytes(), 0) << c.op;
  EXPECT_TRUE(status.ok()) << status;
}

TEST(KernelMemoryTest, KernelsAllocateNothingAsTheyRun) {
  for (const Case& c : Cases()) {
    int64_t most = -1;
    MostBytesOf(c, &most);
    EXPECT_EQ(most, 0) << c.op << " of " << c.inputs[0].ToString();
  }
}

// Copies of parts of the factors in an order that suits the processor, by sgemm and by Eigen: what
// is charged for no run, a processor has at a time. It is as large as caches are.
constexpr int64_t kMostPackedBytes = 4 << 20;

TEST(KernelMemoryTest, ProductsPackABoundedPartOfTheirFactors) {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64, DType::kI64}) {
    // The largest right factors are twice as large and more.
    for (const auto& [m, k, n] : std::vector<std::array<int64_t, 3>>{
             {40, 300, 7}, {600, 300, 280}, {257, 3001, 1500}, {3, 1500, 3001}}) {
      const Case c = {"matmul", {Type(dtype, {m, k}), Type(dtype, {k, n})}, {}};
      int64_t most = -1;
      MostBytesOf(c, &most);
      EXPECT_LE(most, kMostPackedBytes) << c.inputs[0].ToString() << " " << c.inputs[1].ToString();
    }
  }
}

// But for what oneDNN packs for its sgemm, by which some of its convolutions go: which ones, and
// what else they do, depends on the processor. Operands are larger than what is packed.
void ConvolutionsAllocateALittle() {
  using Ints = std::vector<int64_t>;
  const struct {
    Ints x, w, y;
    Attributes attributes;
  } sizes[] = {
      {{5, 32, 3, 3}, {32, 32, 3, 3}, {5, 32, 1, 1}, {}},
      {{23, 32, 60, 60}, {32, 32, 3, 3}, {23, 32, 58, 58}, {}},
      {{19, 32, 50, 50},
       {32, 1, 3, 3},
       {19, 32, 50, 50},
       {{"groups", int64_t{32}}, {"padding", Ints{1, 1}}}},
      {{2, 32, 8, 9}, {32, 32, 1, 1}, {2, 32, 4, 3}, {{"stride", Ints{2, 3}}}},
      {{61, 32, 49, 49}, {32, 32, 1, 1}, {61, 32, 25, 17}, {{"stride", Ints{2, 3}}}},
      {{61, 32, 49, 49},
       {32, 32, 1, 1},
       {61, 32, 25, 26},
       {{"padding", Ints{0, 1}}, {"stride", Ints{2, 2}}}},
  };
  for (const auto& s : sizes) {
    const TensorType x = Type(DType::kF32, s.x);
    const TensorType w = Type(DType::kF32, s.w);
    const TensorType y = Type(DType::kF32, s.y);
    const struct {
      const char* op;
      std::vector<const TensorType*> inputs;
      TensorType output;
    } cases[] = {{"convolution", {&x, &w}, y},
                 {"convolution_data_grad", {&y, &w}, x},
                 {"convolution_weight_grad", {&x, &y}, w}};
    for (const auto& c : cases) {
      const std::string what = std::string(c.op) + " of " + x.ToString() + " by " + w.ToString();
      NodeView node;
      node.op = c.op;
      node.attributes = s.attributes;
      node.inputs = c.inputs;
      const auto kernel = MakeHostKernel(node, {c.output});
      ASSERT_TRUE(kernel.ok()) << kernel.status();
      // It is oneDNN's, for operands are reordered there.
      EXPECT_GT((*kernel)->workspace_bytes(), 0) << what;
      const Value a = testing::Zeros(*c.inputs[0]), b = testing::Zeros(*c.inputs[1]);
      Value result = testing::Zeros(c.output);
      std::vector<float> workspace(static_cast<size_t>((*kernel)->workspace_bytes()) /
                                   sizeof(float));
      const void* const in[] = {a.bytes.data(), b.bytes.data()};
      void* const out[] = {&result.bytes[0]};
      const HostBuffers buffers = {in, out,
                                   absl::MakeSpan(reinterpret_cast<char*>(workspace.data()),
                                                  workspace.size() * sizeof(float))};
      for (const bool is_first : {true, false}) {
        constexpr int64_t kBooks = 4096;  // of a call
        const MallocUse use;
        EXPECT_TRUE((*kernel)->RunAll(buffers).ok()) << what;
        EXPECT_LE(use.most_bytes(), kBooks + kMostPackedBytes) << what;
        // A thread keeps its stream, the library the books of code that it writes in a first call.
        EXPECT_LE(use.bytes(), is_first ? kBooks : 0) << what;
      }
    }
  }
}

struct Processor {
  const char* name;
  dnnl::cpu_isa isa;
};
std::ostream& operator<<(std::ostream& os, const Processor& p) { return os << p.name; }
class ConvolutionMemoryTest : public ::testing::TestWithParam<Processor> {};

// A process of its own for each of the processors that this one can be taken for, for oneDNN asks
// once which it has.
TEST_P(ConvolutionMemoryTest, TheyAllocateALittleWhateverTheirSize) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        EXPECT_EQ(dnnl::set_max_cpu_isa(GetParam().isa), dnnl::status::success);
        ConvolutionsAllocateALittle();
        std::fflush(nullptr);
        std::_Exit(HasFailure() ? 1 : 0);
      },
      ::testing::ExitedWithCode(0), "");
}

INSTANTIATE_TEST_SUITE_P(Processors, ConvolutionMemoryTest,
                         ::testing::Values(Processor{"Sse41", dnnl::cpu_isa::sse41},
                                           Processor{"Avx", dnnl::cpu_isa::avx},
                                           Processor{"Avx2", dnnl::cpu_isa::avx2},
                                           Processor{"Avx512", dnnl::cpu_isa::avx512_core},
                                           Processor{"ThisOne", dnnl::cpu_isa::all}),
                         [](const auto& info) { return std::string(info.param.name); });

// Scratch is reserved with each run: it must not grow with the number of products.
TEST(KernelMemoryTest, AWorkspaceHasABound) {
  const auto workspace_of = [](DType dtype, int64_t batch, int64_t m, int64_t n, int64_t k) {
    const TensorType a = Type(dtype, {batch, m, k}), b = Type(dtype, {batch, k, n});
    const std::vector<const TensorType*> types = {&a, &b};
    NodeView node;
    node.op = "matmul";
    node.inputs = types;
    const auto kernel = MakeHostKernel(node, {Type(dtype, {batch, m, n})});
    EXPECT_TRUE(kernel.ok());
    return (*kernel)->workspace_bytes();
  };
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kI64}) {
    EXPECT_EQ(workspace_of(dtype, 2, 300, 300, 300), 0);
  }
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    // Tiles of the left factor, the right one and the sums, in whole lines of 64 bytes.
    EXPECT_EQ(workspace_of(dtype, 1, 3, 5, 7), (3 * 7 + 7 * 5 + 3 * 5 + 9) * 4);
    EXPECT_EQ(workspace_of(dtype, 1, 257, 5, 7), 2 * (256 * 7 + 7 * 5 + 256 * 5 + 13) * 4);
    EXPECT_EQ(workspace_of(dtype, 1, 1, 1, 0), 0);
    constexpr int64_t kMost = 64 * 3 * 256 * 256 * 4;
    EXPECT_EQ(workspace_of(dtype, 1, 1 << 14, 1 << 10, 1 << 10), kMost);
    EXPECT_EQ(workspace_of(dtype, 100, 1 << 14, 1 << 10, 1 << 10), kMost);
  }
}

// Of a sort: what is chosen of a row, in each of some units, or nothing.
TEST(KernelMemoryTest, ASortTakesWhatItGivesAFewTimesAtMost) {
  const auto workspace_of = [](DType dtype, const std::vector<int64_t>& sizes, int64_t axis,
                               int64_t k) {
    const TensorType x = Type(dtype, sizes);
    const std::vector<const TensorType*> types = {&x};
    NodeView node;
    node.op = "arg_sort";
    const Attributes attributes = {{"axis", axis}, {"k", k}};
    node.attributes = attributes;
    node.inputs = types;
    const auto outputs = InferTypes(node);
    EXPECT_TRUE(outputs.ok()) << outputs.status();
    const auto kernel = MakeHostKernel(node, *outputs);
    EXPECT_TRUE(kernel.ok());
    return (*kernel)->workspace_bytes();
  };
  for (const DType dtype : {DType::kBool, DType::kF16, DType::kF32, DType::kI32}) {
    EXPECT_EQ(workspace_of(dtype, {1000, 300}, 1, 300), 0);
    EXPECT_EQ(workspace_of(dtype, {30, 5}, 0, 30), 5 * 30 * 8);
    EXPECT_EQ(workspace_of(dtype, {1 << 20, 1 << 10}, 0, 50), 64 * 50 * 8);
  }
  for (const DType dtype : {DType::kF64, DType::kI64}) {
    EXPECT_EQ(workspace_of(dtype, {5, 30}, 1, 30), 5 * 30 * 16);
    EXPECT_EQ(workspace_of(dtype, {1 << 20, 1 << 10}, 1, 50), 64 * 50 * 16);
  }
  // An index that a key leaves no room for.
  const int64_t rows = int64_t{1} << 32;
  EXPECT_EQ(workspace_of(DType::kF32, {rows}, 0, 50), 0);
  EXPECT_EQ(workspace_of(DType::kF32, {rows + 1}, 0, 50), 50 * 16);
  EXPECT_EQ(workspace_of(DType::kF16, {rows + 1}, 0, 50), 0);
}

}  // namespace
}  // namespace chorus
