#include <cstdint>
#include <string>
#include <vector>

#include "core/autograd/testing/gradient_check.h"
#include "core/ops/op.h"
#include "core/ops/testing/rank_builder.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::CheckAdjoint;
using testing::CheckGradients;
using testing::InferText;
using testing::RankBuilder;
using Values = std::vector<ValueIndex>;

Attributes Along(int64_t axis, int64_t reverse) { return {{"axis", axis}, {"reverse", reverse}}; }

TEST(CumSumTest, ShapeTable) {
  const TensorType x(DType::kBF16, {2, 0, 5});
  EXPECT_EQ(InferText("cum_sum", {x}, {{"axis", int64_t{2}}}), "bf16[2,0,5]");
  EXPECT_EQ(InferText("cum_sum", {x}, Along(1, 1)), "bf16[2,0,5]");
  EXPECT_EQ(InferText("cum_sum", {x}, Along(3, 0)),
            "cum_sum: expected an axis within the 3 dimensions of bf16[2,0,5], got 3");
  EXPECT_EQ(InferText("cum_sum", {x}, Along(-1, 0)),
            "cum_sum: expected an axis within the 3 dimensions of bf16[2,0,5], got -1");
  EXPECT_EQ(InferText("cum_sum", {TensorType(DType::kF32, {})}, Along(0, 0)),
            "cum_sum: expected an axis within the 0 dimensions of f32[], got 0");
  EXPECT_EQ(InferText("cum_sum", {x}, Along(0, 2)), "cum_sum: expected 0 or 1 as 'reverse', got 2");
  EXPECT_EQ(InferText("cum_sum", {x}), "cum_sum: expected an integer as 'axis', got none");
  EXPECT_EQ(InferText("cum_sum", {TensorType(DType::kBool, {2})}, Along(0, 0)),
            "cum_sum: input 0 is bool[2]; the op takes f16, bf16, f32, f64, i8, u8, i16, i32 and "
            "i64");
}

TEST(CumSumTest, EqualsItsAdjointAndItsDifferences) {
  for (int64_t axis = 0; axis < 3; ++axis) {
    for (const int64_t reverse : {0, 1}) {
      SCOPED_TRACE(axis);
      SCOPED_TRACE(reverse);
      CheckAdjoint(1, {TensorType(DType::kF32, {2, 3, 4})}, [&](RankBuilder& b, const Values& x) {
        return Values{b.Op("cum_sum", x, Along(axis, reverse))};
      });
      CheckGradients(1, {TensorType(DType::kF64, {2, 3, 4})}, [&](RankBuilder& b, const Values& x) {
        const ValueIndex sums = b.Op("cum_sum", {b.Op("sin", x)}, Along(axis, reverse));
        return Values{b.Op("mul", {sums, sums})};
      });
    }
  }
}

}  // namespace
}  // namespace chorus
