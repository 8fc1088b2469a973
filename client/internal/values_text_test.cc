#include "client/internal/values_text.h"

#include <cmath>
#include <limits>
#include <numeric>

#include "core/tensor/half.h"
#include "gtest/gtest.h"

namespace chorus {
namespace internal {
namespace {

template <typename T>
std::string Text(DType dtype, const std::vector<int64_t>& shape, const std::vector<T>& values) {
  return ValuesText(dtype, shape, reinterpret_cast<const char*>(values.data()));
}

std::string Counted(const std::vector<int64_t>& shape) {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  std::vector<int64_t> values(static_cast<size_t>(elements));
  std::iota(values.begin(), values.end(), 0);
  return Text(DType::kI64, shape, values);
}

TEST(ValuesTextTest, EachDtypeHasItsNumbers) {
  using Limits = std::numeric_limits<int64_t>;
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(Text<float>(DType::kF32, {6}, {0.1f, -0.0f, 1e30f, inf, -inf, -std::nanf("")}),
            "[0.1, -0, 1e+30, inf, -inf, nan]");
  EXPECT_EQ(Text<double>(DType::kF64, {2}, {1.0 / 3, -2}), "[0.3333333333333333, -2]");
  EXPECT_EQ(Text<F16>(DType::kF16, {2}, {F16(1.5f), F16(-3.0f)}), "[1.5, -3]");
  EXPECT_EQ(Text<BF16>(DType::kBF16, {1}, {BF16(0.25f)}), "[0.25]");
  EXPECT_EQ(Text<int8_t>(DType::kI8, {2}, {-128, 65}), "[-128, 65]");
  EXPECT_EQ(Text<uint8_t>(DType::kU8, {2}, {255, 65}), "[255, 65]");
  EXPECT_EQ(Text<int16_t>(DType::kI16, {1}, {-300}), "[-300]");
  EXPECT_EQ(Text<int32_t>(DType::kI32, {1}, {70000}), "[70000]");
  EXPECT_EQ(Text<int64_t>(DType::kI64, {1}, {Limits::min()}), "[-9223372036854775808]");
  EXPECT_EQ(Text<uint8_t>(DType::kBool, {3}, {0, 1, 2}), "[false, true, true]");
}

TEST(ValuesTextTest, EachDimensionHasItsBrackets) {
  EXPECT_EQ(Counted({}), "0");
  EXPECT_EQ(Counted({1}), "[0]");
  EXPECT_EQ(Counted({2, 3}), "[[0, 1, 2],\n [3, 4, 5]]");
  EXPECT_EQ(Counted({1, 1, 1}), "[[[0]]]");
  EXPECT_EQ(Counted({2, 2, 1}), "[[[0],\n  [1]],\n\n [[2],\n  [3]]]");
  EXPECT_EQ(Text<float>(DType::kF32, {2, 2}, {1, -2.5, 10, 3}), "[[   1, -2.5],\n [  10,    3]]");
  EXPECT_EQ(Counted({0}), "[]");
  EXPECT_EQ(Counted({3, 0, 2}), "[]");
}

TEST(ValuesTextTest, BeyondAThousandElementsTheMiddleIsLeftOut) {
  EXPECT_EQ(Counted({1000}).find("..."), std::string::npos);
  EXPECT_EQ(Counted({1001}), "[0, 1, 2, ..., 998, 999, 1000]");
  EXPECT_EQ(Counted({501, 2}),
            "[[   0,    1],\n [   2,    3],\n [   4,    5],\n ...,\n [ 996,  997],\n [ 998,  999],"
            "\n [1000, 1001]]");
  EXPECT_EQ(Counted({2, 600}),
            "[[   0,    1,    2, ...,  597,  598,  599],\n"
            " [ 600,  601,  602, ..., 1197, 1198, 1199]]");
  // Six are not shorter as two edges.
  EXPECT_EQ(Counted({200, 6}).find("4, ...,"), std::string::npos);
}

TEST(ValuesTextTest, OfManyDimensionsLessIsShown) {
  const std::string text = Counted(std::vector<int64_t>(9, 3));
  EXPECT_EQ(text.substr(0, 24), "[[[[[[[[[    0, ...,    ");
  EXPECT_LT(text.size(), 20000u);
}

}  // namespace
}  // namespace internal
}  // namespace chorus
