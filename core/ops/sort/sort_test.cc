#include <cstdint>
#include <string>
#include <vector>

#include "core/autograd/testing/gradient_check.h"
#include "core/ops/op.h"
#include "core/ops/testing/rank_builder.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::CheckGradients;
using testing::InferText;
using testing::RankBuilder;
using Values = std::vector<ValueIndex>;

Attributes Axis(int64_t axis) { return {{"axis", axis}}; }
Attributes First(int64_t axis, int64_t k) { return {{"axis", axis}, {"k", k}}; }

TEST(SortTest, ShapeTable) {
  const TensorType x(DType::kBF16, {4, 0, 6});
  EXPECT_EQ(InferText("arg_sort", {x}, Axis(0)), "i64[4,0,6]");
  EXPECT_EQ(InferText("arg_sort", {x}, Axis(1)), "i64[4,0,6]");
  EXPECT_EQ(InferText("arg_sort", {TensorType(DType::kBool, {3})}, Axis(0)), "i64[3]");
  EXPECT_EQ(InferText("arg_sort", {x}, First(2, 0)), "i64[4,0,0]");
  EXPECT_EQ(InferText("arg_sort", {x}, First(2, 5)), "i64[4,0,5]");
  EXPECT_EQ(InferText("arg_sort", {x}, First(2, 6)), "i64[4,0,6]");
  EXPECT_EQ(InferText("arg_sort", {x}, First(2, 7)),
            "arg_sort: expected 'k' from 0 to 6, the elements along axis 2 of bf16[4,0,6], got 7");
  EXPECT_EQ(InferText("arg_sort", {x}, First(2, -1)),
            "arg_sort: expected 'k' from 0 to 6, the elements along axis 2 of bf16[4,0,6], got -1");
  EXPECT_EQ(InferText("arg_sort", {x}, Axis(3)),
            "arg_sort: expected an axis within the 3 dimensions of bf16[4,0,6], got 3");
  EXPECT_EQ(InferText("arg_sort", {x}, Axis(-1)),
            "arg_sort: expected an axis within the 3 dimensions of bf16[4,0,6], got -1");
  EXPECT_EQ(InferText("arg_sort", {TensorType(DType::kF32, {})}, Axis(0)),
            "arg_sort: expected an axis within the 0 dimensions of f32[], got 0");
  EXPECT_EQ(InferText("arg_sort", {x}), "arg_sort: expected an integer as 'axis', got none");
  EXPECT_EQ(InferText("arg_sort", {x}, {{"axis", int64_t{0}}, {"descending", int64_t{2}}}),
            "arg_sort: expected 0 or 1 as 'descending', got 2");
}

TEST(SortTest, GradientsOfWhatIsSortedEqualDifferences) {
  for (int64_t axis = 0; axis < 3; ++axis) {
    for (const int64_t descending : {0, 1}) {
      for (const int64_t k : {1, 2}) {
        SCOPED_TRACE(axis);
        SCOPED_TRACE(descending);
        SCOPED_TRACE(k);
        CheckGradients(
            1, {TensorType(DType::kF64, {2, 3, 4})}, [&](RankBuilder& b, const Values& x) {
              const ValueIndex order =
                  b.Op("arg_sort", x, {{"axis", axis}, {"descending", descending}, {"k", k}});
              const ValueIndex sorted = b.Op("take_along", {x[0], order}, Axis(axis));
              return Values{b.Op("mul", {sorted, b.Op("sin", {sorted})})};
            });
      }
    }
  }
}

}  // namespace
}  // namespace chorus
