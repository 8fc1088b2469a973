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

TEST(SoftmaxTest, ShapeTable) {
  for (const std::string op : {"softmax", "log_softmax"}) {
    const TensorType x(DType::kBF16, {2, 0, 5});
    EXPECT_EQ(InferText(op, {x}, Axis(2)), "bf16[2,0,5]");
    EXPECT_EQ(InferText(op, {x}, Axis(3)),
              op + ": expected an axis within the 3 dimensions of bf16[2,0,5], got 3");
    EXPECT_EQ(InferText(op, {x}, Axis(-1)),
              op + ": expected an axis within the 3 dimensions of bf16[2,0,5], got -1");
    EXPECT_EQ(InferText(op, {TensorType(DType::kF32, {})}, Axis(0)),
              op + ": expected an axis within the 0 dimensions of f32[], got 0");
    EXPECT_EQ(InferText(op, {x}), op + ": expected an integer as 'axis', got none");
    EXPECT_EQ(InferText(op, {TensorType(DType::kI32, {2})}, Axis(0)),
              op + ": input 0 is i32[2]; the op takes f16, bf16, f32 and f64");
  }
}

TEST(SoftmaxTest, ShapesOfCenter) {
  for (const std::string op : {"center", "center_grad", "softmax_grad"}) {
    const TensorType x(DType::kBF16, {2, 0, 5});
    EXPECT_EQ(InferText(op, {x, x}, Axis(2)), "bf16[2,0,5]");
    EXPECT_EQ(InferText(op, {x, x}, Axis(3)),
              op + ": expected an axis within the 3 dimensions of bf16[2,0,5], got 3");
    EXPECT_EQ(InferText(op, {x, TensorType(DType::kBF16, {2, 0})}, Axis(0)),
              op + ": expected bf16[2,0,5] as input 1, got bf16[2,0]");
    EXPECT_EQ(InferText(op, {x}, Axis(0)), op + ": expected 2 inputs, got 1");
  }
}

TEST(SoftmaxTest, GradientsOfCenterEqualDifferences) {
  const TensorType x(DType::kF64, {2, 3, 4});
  for (const std::string op : {"center", "center_grad"}) {
    for (int64_t axis = 0; axis < 3; ++axis) {
      SCOPED_TRACE(op);
      SCOPED_TRACE(axis);
      CheckGradients(1, {x, x}, [&](RankBuilder& b, const Values& in) {
        return Values{b.Op(op, in, Axis(axis))};
      });
      CheckGradients(1, {x}, [&](RankBuilder& b, const Values& in) {
        return Values{b.Op("sin", {b.Op(op, {b.Op("sin", {in[0]}), in[0]}, Axis(axis))})};
      });
    }
  }
}

TEST(SoftmaxTest, GradientsOfSoftmaxGradEqualDifferences) {
  const TensorType x(DType::kF64, {2, 3, 4});
  for (int64_t axis = 0; axis < 3; ++axis) {
    SCOPED_TRACE(axis);
    CheckGradients(1, {x, x}, [&](RankBuilder& b, const Values& in) {
      return Values{
          b.Op("softmax_grad", {b.Op("softmax", {in[0]}, Axis(axis)), in[1]}, Axis(axis))};
    });
  }
}

TEST(SoftmaxTest, GradientsEqualDifferences) {
  for (const std::string op : {"softmax", "log_softmax"}) {
    for (int64_t axis = 0; axis < 3; ++axis) {
      SCOPED_TRACE(op);
      SCOPED_TRACE(axis);
      CheckGradients(1, {TensorType(DType::kF64, {2, 3, 4})}, [&](RankBuilder& b, const Values& x) {
        return Values{b.Op(op, x, Axis(axis))};
      });
    }
    CheckGradients(1, {TensorType(DType::kF64, {3, 1})}, [&](RankBuilder& b, const Values& x) {
      return Values{b.Op(op, x, Axis(1)), b.Op("sin", {b.Op(op, x, Axis(0))})};
    });
  }
}

}  // namespace
}  // namespace chorus
