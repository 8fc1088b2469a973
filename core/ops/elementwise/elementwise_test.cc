#include <cstdint>
#include <string>
#include <vector>

#include "core/ops/op.h"
#include "core/ops/testing/gradient_check.h"
#include "core/ops/testing/rank_builder.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::CheckAdjoint;
using testing::CheckGradients;
using testing::InferText;
using testing::RankBuilder;
using Values = std::vector<ValueIndex>;

const TensorType kF64x5(DType::kF64, {5});

TEST(ElementwiseTest, ShapeTable) {
  const TensorType f32(DType::kF32, {2, 3});
  const TensorType i64(DType::kI64, {0});
  for (const char* op : {"add", "sub", "mul"}) {
    EXPECT_EQ(InferText(op, {f32, f32}), "f32[2,3]");
    EXPECT_EQ(InferText(op, {i64, i64}), "i64[0]");
    EXPECT_EQ(InferText(op, {f32}), std::string(op) + ": expected 2 inputs, got 1");
    EXPECT_EQ(InferText(op, {f32, i64}),
              std::string(op) +
                  ": expected inputs of one type, f32[2,3] or f32[], got i64[0] as input 1");
    EXPECT_EQ(InferText(op, {f32, TensorType(DType::kF32, {3, 2})}),
              std::string(op) +
                  ": expected inputs of one type, f32[2,3] or f32[], got f32[3,2] as input 1");
  }
  const TensorType scalar(DType::kF32, {});
  for (const char* op : {"add", "sub", "mul", "relu_grad"}) {
    EXPECT_EQ(InferText(op, {f32, scalar}), "f32[2,3]");
    EXPECT_EQ(InferText(op, {scalar, f32}), "f32[2,3]");
    EXPECT_EQ(InferText(op, {scalar, scalar}), "f32[]");
    EXPECT_EQ(
        InferText(op, {scalar, TensorType(DType::kF64, {3})}),
        std::string(op) + ": expected inputs of one type, f64[3] or f64[], got f32[] as input 0");
    EXPECT_EQ(InferText(op, {scalar, TensorType(DType::kF64, {})}),
              std::string(op) + ": expected inputs of one type, f32[], got f64[] as input 1");
    // One element is not 0-dim.
    EXPECT_EQ(InferText(op, {f32, TensorType(DType::kF32, {1})}),
              std::string(op) +
                  ": expected inputs of one type, f32[2,3] or f32[], got f32[1] as input 1");
  }
  EXPECT_EQ(InferText("neg", {i64}), "i64[0]");
  EXPECT_EQ(InferText("relu", {f32}), "f32[2,3]");
  EXPECT_EQ(InferText("sin", {f32}), "f32[2,3]");
  EXPECT_EQ(InferText("sin", {i64}), "sin: expected floating point, got i64[0]");
  EXPECT_EQ(InferText("cos", {i64}), "cos: expected floating point, got i64[0]");
  EXPECT_EQ(InferText("relu_grad", {f32, f32}), "f32[2,3]");
  EXPECT_EQ(InferText("relu_grad", {f32, i64}),
            "relu_grad: expected inputs of one type, f32[2,3] or f32[], got i64[0] as input 1");
}

TEST(ElementwiseTest, LinearOpsEqualTheirAdjoints) {
  CheckAdjoint(1, {kF64x5, kF64x5},
               [](RankBuilder& b, const Values& x) { return Values{b.Op("add", x)}; });
  CheckAdjoint(1, {kF64x5, kF64x5},
               [](RankBuilder& b, const Values& x) { return Values{b.Op("sub", x)}; });
  CheckAdjoint(1, {TensorType(DType::kF32, {2, 3})},
               [](RankBuilder& b, const Values& x) { return Values{b.Op("neg", x)}; });
}

TEST(ElementwiseTest, GradientsEqualDifferences) {
  for (const char* op : {"add", "sub", "mul"}) {
    SCOPED_TRACE(op);
    CheckGradients(1, {kF64x5, kF64x5},
                   [&](RankBuilder& b, const Values& x) { return Values{b.Op(op, x)}; });
  }
  for (const char* op : {"neg", "relu", "sin", "cos"}) {
    SCOPED_TRACE(op);
    CheckGradients(1, {kF64x5},
                   [&](RankBuilder& b, const Values& x) { return Values{b.Op(op, x)}; });
    // Squared, so that the second order by the inputs is not zero.
    CheckGradients(1, {kF64x5}, [&](RankBuilder& b, const Values& x) {
      const ValueIndex y = b.Op(op, {b.Op("mul", {x[0], x[0]})});
      return Values{b.Op("mul", {y, y})};
    });
  }
  CheckGradients(1, {kF64x5, kF64x5},
                 [](RankBuilder& b, const Values& x) { return Values{b.Op("relu_grad", x)}; });
}

TEST(ElementwiseTest, AZeroDimOperandsGradientIsTheSumOverAllElements) {
  const TensorType scalar(DType::kF64, {});
  for (const char* op : {"add", "sub"}) {
    for (const auto& types :
         {std::vector<TensorType>{kF64x5, scalar}, std::vector<TensorType>{scalar, kF64x5},
          std::vector<TensorType>{scalar, scalar}}) {
      CheckAdjoint(1, types, [&](RankBuilder& b, const Values& x) { return Values{b.Op(op, x)}; });
    }
  }
  for (const char* op : {"add", "sub", "mul", "relu_grad"}) {
    SCOPED_TRACE(op);
    for (const auto& types :
         {std::vector<TensorType>{kF64x5, scalar}, std::vector<TensorType>{scalar, kF64x5}}) {
      CheckGradients(1, types, [&](RankBuilder& b, const Values& x) {
        const ValueIndex y = b.Op(op, x);
        return Values{b.Op("mul", {y, y})};
      });
    }
  }
}

TEST(ElementwiseTest, OneValueUsedTwiceGetsBothGradients) {
  CheckGradients(1, {kF64x5}, [](RankBuilder& b, const Values& x) {
    return Values{b.Op("mul", {x[0], x[0]}), b.Op("sin", {b.Op("add", {x[0], x[0]})})};
  });
}

}  // namespace
}  // namespace chorus
