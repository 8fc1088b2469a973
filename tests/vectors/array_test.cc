#include "tests/vectors/array.h"

#include <cmath>
#include <limits>

#include "gmock/gmock.h"

namespace chorus {
namespace vectors {
namespace {

Array Floats(DType dtype, std::vector<int64_t> shape, const std::vector<double>& values) {
  Array array;
  array.dtype = dtype;
  array.shape = std::move(shape);
  for (const double value : values) EXPECT_TRUE(AppendFloat(value, &array).ok()) << value;
  return array;
}

std::vector<double> Values(const Array& array) {
  std::vector<double> values;
  for (int64_t i = 0; i < array.size(); ++i) values.push_back(FloatAt(array, i));
  return values;
}

TEST(ArrayTest, FloatsReadBackExactly) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    const Array array = Floats(dtype, {4}, {0.5, -3, infinity, -infinity});
    EXPECT_EQ(array.bytes.size(), 4 * static_cast<size_t>(DTypeBytes(dtype)));
    EXPECT_THAT(Values(array), ::testing::ElementsAre(0.5, -3, infinity, -infinity));
    EXPECT_TRUE(std::isnan(FloatAt(Floats(dtype, {1}, {std::nan("")}), 0)));
  }
  EXPECT_EQ(FloatAt(Floats(DType::kF32, {}, {0.1}), 0), 0.1f);
}

TEST(ArrayTest, RefusesWhatADTypeHasNot) {
  Array array;
  array.dtype = DType::kF16;
  EXPECT_FALSE(AppendFloat(0.1, &array).ok());
  EXPECT_FALSE(AppendFloat(70000, &array).ok());
  array.dtype = DType::kBF16;
  EXPECT_FALSE(AppendFloat(257, &array).ok());
  array.dtype = DType::kF32;
  EXPECT_FALSE(AppendFloat(1e39, &array).ok());
  EXPECT_FALSE(AppendInteger(1, &array).ok());
  array.dtype = DType::kU8;
  EXPECT_FALSE(AppendInteger(256, &array).ok());
  EXPECT_FALSE(AppendInteger(-1, &array).ok());
  EXPECT_FALSE(AppendFloat(1, &array).ok());
  array.dtype = DType::kI8;
  EXPECT_FALSE(AppendInteger(128, &array).ok());
  array.dtype = DType::kBool;
  EXPECT_FALSE(AppendInteger(2, &array).ok());
  EXPECT_EQ(array.bytes, "");
}

TEST(ArrayTest, IntegersKeepAllTheirDigits) {
  Array array;
  array.dtype = DType::kI64;
  array.shape = {2};
  ASSERT_TRUE(AppendInteger(std::numeric_limits<int64_t>::max(), &array).ok());
  ASSERT_TRUE(AppendInteger(std::numeric_limits<int64_t>::max() - 1, &array).ok());
  EXPECT_EQ(TextAt(array, 0), "9223372036854775807");
  EXPECT_EQ(TextAt(array, 1), "9223372036854775806");
}

TEST(ArrayTest, ZerosAreEqualAndNansAreEqual) {
  const Array a = Floats(DType::kF32, {3}, {0.0, std::nan(""), 1});
  const Array b = Floats(DType::kF32, {3}, {-0.0, -std::nan(""), std::nan("")});
  EXPECT_TRUE(SameValue(a, b, 0));
  EXPECT_TRUE(SameValue(a, b, 1));
  EXPECT_FALSE(SameValue(a, b, 2));
  EXPECT_NE(a.element(0), b.element(0));
}

TEST(ArrayTest, IsTransposedAndUnexpanded) {
  const Array array = Floats(DType::kF16, {2, 3}, {1, 2, 3, 4, 5, 6});
  const Array transposed = Transposed(array);
  EXPECT_EQ(transposed.shape, (std::vector<int64_t>{3, 2}));
  EXPECT_THAT(Values(transposed), ::testing::ElementsAre(1, 4, 2, 5, 3, 6));
  EXPECT_EQ(Transposed(transposed).bytes, array.bytes);

  const Array rows = Unexpanded(Floats(DType::kF64, {3, 2}, {1, 2, 1, 2, 1, 2}));
  EXPECT_EQ(rows.shape, (std::vector<int64_t>{1, 2}));
  EXPECT_THAT(Values(rows), ::testing::ElementsAre(1, 2));
  const Array one = Unexpanded(Floats(DType::kF64, {2, 2}, {7, 7, 7, 7}));
  EXPECT_EQ(one.shape, (std::vector<int64_t>{1, 1}));
  EXPECT_EQ(Unexpanded(array).shape, array.shape);
  EXPECT_EQ(Unexpanded(Floats(DType::kF64, {0, 2}, {})).shape, (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(Unexpanded(Floats(DType::kF64, {}, {7})).size(), 1);
}

}  // namespace
}  // namespace vectors
}  // namespace chorus
