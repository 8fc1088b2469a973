#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/autograd/testing/gradient_check.h"
#include "core/ops/host_kernels.h"
#include "core/ops/op.h"
#include "core/ops/random/philox.h"
#include "core/ops/registry.h"
#include "core/ops/testing/value.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::InferText;
using testing::Value;

const TensorType kI64(DType::kI64, {});

// The vectors that come with the authors' library, Random123.
TEST(PhiloxTest, KnownAnswers) {
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, 0, 0),
            (PhiloxBlock{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(Philox4x32({kOnes, kOnes, kOnes, kOnes}, kOnes, kOnes),
            (PhiloxBlock{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0),
            (PhiloxBlock{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(RandomTest, ShapeTable) {
  const TensorType f32(DType::kF32, {2, 3});
  const Attributes attributes = TypeAttributes(f32);
  EXPECT_EQ(InferText("random_uniform", {kI64, kI64}, attributes), "f32[2,3]");
  EXPECT_EQ(InferText("random_normal", {kI64, kI64}, attributes), "f32[2,3]");
  EXPECT_EQ(InferText("random_bits", {kI64, kI64}, TypeAttributes(TensorType(DType::kU8, {}))),
            "u8[]");
  EXPECT_EQ(InferText("random_bits", {kI64, kI64}, attributes),
            "random_bits: expected an integer 'dtype', got f32");
  EXPECT_EQ(InferText("random_bits", {kI64, kI64}, TypeAttributes(TensorType(DType::kBool, {}))),
            "random_bits: expected an integer 'dtype', got bool");
  EXPECT_EQ(InferText("random_normal", {kI64, kI64}, TypeAttributes(kI64)),
            "random_normal: expected a floating-point 'dtype', got i64");
  EXPECT_EQ(InferText("random_uniform", {f32, kI64}, attributes),
            "random_uniform: expected i64[] as the seed, input 0, got f32[2,3]");
  EXPECT_EQ(InferText("random_uniform", {kI64, f32}, attributes),
            "random_uniform: expected i64[] as the offset, input 1, got f32[2,3]");
  EXPECT_EQ(InferText("random_uniform", {kI64, kI64}),
            "random_uniform: expected a list of integers as 'dims', got none");
}

// By the kernel, in pieces that end at every `step`-th unit.
Value Draw(const std::string& op, const TensorType& type, int64_t seed, int64_t offset,
           int64_t step = 1 << 20) {
  const std::vector<const TensorType*> types = {&kI64, &kI64};
  const Attributes attributes = TypeAttributes(type);
  NodeView node;
  node.op = op;
  node.attributes = attributes;
  node.inputs = types;
  const auto outputs = InferTypes(node);
  EXPECT_TRUE(outputs.ok()) << outputs.status();
  const auto kernel = MakeHostKernel(node, *outputs);
  EXPECT_TRUE(kernel.ok()) << kernel.status();
  Value value = testing::Zeros(type);
  for (int64_t begin = 0; begin < (*kernel)->units(); begin += step) {
    const int64_t end = std::min((*kernel)->units(), begin + step);
    EXPECT_TRUE((*kernel)->Run({{&seed, &offset}, {&value.bytes[0]}, {}}, begin, end).ok());
  }
  return value;
}

TEST(RandomTest, BitsAreThoseOfPhilox) {
  const auto words =
      testing::Elements<int32_t>(Draw("random_bits", TensorType(DType::kI32, {7}), 0, 0));
  EXPECT_EQ(static_cast<uint32_t>(words[0]), 0x6627e8d5);
  EXPECT_EQ(static_cast<uint32_t>(words[3]), 0x9b00dbd8);
  const int64_t seed = 0x299f31d0a4093822;
  const int64_t offset = 0x0370734413198a2e;
  const PhiloxBlock second = Philox4x32({1, 0, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0);
  const auto seeded =
      testing::Elements<int32_t>(Draw("random_bits", TensorType(DType::kI32, {7}), seed, offset));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(static_cast<uint32_t>(seeded[4 + i]), second[i]);
  const auto longs =
      testing::Elements<int64_t>(Draw("random_bits", TensorType(DType::kI64, {3}), seed, offset));
  EXPECT_EQ(static_cast<uint64_t>(longs[2]), uint64_t{second[1]} << 32 | second[0]);
  const auto bytes =
      testing::Elements<uint8_t>(Draw("random_bits", TensorType(DType::kU8, {5}), seed, offset));
  EXPECT_EQ(bytes[4], static_cast<uint8_t>(second[0]));
}

TEST(RandomTest, AnElementDependsOnItsPlaceSeedAndOffsetAlone) {
  const struct {
    const char* op;
    DType dtype;
  } cases[] = {{"random_bits", DType::kI8},     {"random_bits", DType::kI64},
               {"random_uniform", DType::kF16}, {"random_uniform", DType::kBF16},
               {"random_uniform", DType::kF32}, {"random_uniform", DType::kF64},
               {"random_normal", DType::kF16},  {"random_normal", DType::kBF16},
               {"random_normal", DType::kF32},  {"random_normal", DType::kF64}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.op);
    const Value whole = Draw(c.op, TensorType(c.dtype, {1031}), 3, 4);
    for (const int64_t step : {1, 2, 100}) {
      EXPECT_EQ(Draw(c.op, TensorType(c.dtype, {1031}), 3, 4, step), whole) << step;
    }
    // Of another shape the same numbers, as far as they go.
    for (const int64_t size : {0, 1, 2, 3, 4, 5, 6, 7}) {
      const Value part = Draw(c.op, TensorType(c.dtype, {size, 1}), 3, 4);
      EXPECT_EQ(part.bytes, whole.bytes.substr(0, part.bytes.size())) << size;
    }
    EXPECT_FALSE(Draw(c.op, TensorType(c.dtype, {1031}), 4, 3) == whole);
    EXPECT_FALSE(Draw(c.op, TensorType(c.dtype, {1031}), 3, 5) == whole);
    EXPECT_FALSE(Draw(c.op, TensorType(c.dtype, {1031}), 3, 4 + (int64_t{1} << 32)) == whole);
    EXPECT_FALSE(Draw(c.op, TensorType(c.dtype, {1031}), 3 + (int64_t{1} << 32), 4) == whole);
  }
}

// Bounds of five standard deviations of the mean, of numbers that never change.
TEST(RandomTest, UniformNumbersAreEven) {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    SCOPED_TRACE(DTypeName(dtype));
    const int64_t n = 40000;
    const std::vector<double> x =
        testing::ToDoubles(Draw("random_uniform", TensorType(dtype, {n}), 1, 2));
    double sum = 0, squares = 0;
    std::vector<int> counts(8);
    for (const double v : x) {
      ASSERT_GE(v, 0);
      ASSERT_LT(v, 1);
      sum += v;
      squares += v * v;
      ++counts[static_cast<size_t>(v * 8)];
    }
    // They are multiples of a step: the mean is half of one below 1/2.
    const double step = dtype == DType::kF16 ? 0x1p-11 : dtype == DType::kBF16 ? 0x1p-8 : 0;
    EXPECT_NEAR(sum / n, (1 - step) / 2, 5 * std::sqrt(1.0 / 12 / n));
    EXPECT_NEAR(squares / n, 1.0 / 3 - step / 2, 5 * std::sqrt(4.0 / 45 / n) + step * step);
    for (const int count : counts) EXPECT_NEAR(count, n / 8.0, 5 * std::sqrt(n * 7.0 / 64));
  }
}

TEST(RandomTest, NormalNumbersAreNormal) {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    SCOPED_TRACE(DTypeName(dtype));
    const int64_t n = 40000;
    const std::vector<double> x =
        testing::ToDoubles(Draw("random_normal", TensorType(dtype, {n}), 1, 2));
    double moments[5] = {}, products = 0;
    int within = 0;
    for (int64_t i = 0; i < n; ++i) {
      double power = 1;
      for (double& moment : moments) {
        moment += power / n;
        power *= x[i];
      }
      products += i > 0 ? x[i] * x[i - 1] / n : 0;
      within += std::abs(x[i]) < 1 ? 1 : 0;
    }
    const double root = std::sqrt(static_cast<double>(n));
    EXPECT_NEAR(moments[1], 0, 5 / root);
    EXPECT_NEAR(moments[2], 1, 5 * std::sqrt(2.0) / root);
    EXPECT_NEAR(moments[3], 0, 5 * std::sqrt(15.0) / root);
    EXPECT_NEAR(moments[4], 3, 5 * std::sqrt(96.0) / root);
    EXPECT_NEAR(products, 0, 5 / root) << "neighbours";
    // bf16 has numbers of 2^-8 below 1.
    EXPECT_NEAR(within / static_cast<double>(n), 0.6827, 5 * 0.466 / root + 0.001);
  }
}

}  // namespace
}  // namespace chorus
