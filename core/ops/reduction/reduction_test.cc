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
using Ints = std::vector<int64_t>;

const TensorType kF64x5(DType::kF64, {5});
const TensorType kF32x5(DType::kF32, {5});
const TensorType kI64x5(DType::kI64, {5});
const TensorType kF64(DType::kF64, {});
const TensorType kF32(DType::kF32, {});

ValueIndex Fill(RankBuilder& b, const TensorType& type, double value) {
  Attributes attributes = TypeAttributes(type);
  attributes.push_back({"value", value});
  return b.Op("fill", {}, attributes);
}

TEST(ReductionTest, ShapeTable) {
  EXPECT_EQ(InferText("share", {kF64x5, kF32x5}), "f64[5]");
  EXPECT_EQ(InferText("share", {kF32x5, kF32x5}), "f32[5]");
  EXPECT_EQ(InferText("share", {kF64x5, kF64x5}), "share: expected f32[5] as input 1, got f64[5]");
  EXPECT_EQ(InferText("share", {kF64x5, kF32}), "share: expected f32[5] as input 1, got f32[]");
  EXPECT_EQ(InferText("share", {kI64x5, kF32x5}), "share: expected floating point, got i64[5]");
  EXPECT_EQ(InferText("share", {kF64x5}), "share: expected 2 inputs, got 1");
  EXPECT_EQ(InferText("holds", {kF64x5, kF64x5}), "f32[5]");
  EXPECT_EQ(InferText("holds", {kF64x5, kF64}), "f32[5]");
  EXPECT_EQ(InferText("holds", {kI64x5, kI64x5}), "holds: expected floating point, got i64[5]");
  EXPECT_EQ(InferText("holds", {kF64x5, kF32x5}),
            "holds: expected inputs of one type, f64[5] or f64[], got f32[5] as input 1");
  EXPECT_EQ(InferText("scale", {kF64x5, kF64}), "f64[5]");
  EXPECT_EQ(InferText("scale", {kF32, kF32}), "f32[]");
  EXPECT_EQ(InferText("scale", {kF64x5, kF32}), "scale: expected f64[] as input 1, got f32[]");
  EXPECT_EQ(InferText("scale", {kF32x5, kF32x5}), "scale: expected f32[] as input 1, got f32[5]");
  EXPECT_EQ(InferText("scale", {kI64x5, kF32}), "scale: expected floating point, got i64[5]");
  EXPECT_EQ(InferText("product", {kF64x5}), "f64[5]");
  EXPECT_EQ(InferText("product", {kF64x5, kF64x5, kF64x5}), "f64[5]");
  EXPECT_EQ(InferText("product", {kF64x5, kF64x5, kF32x5}),
            "product: expected f64[5] as input 2, got f32[5]");
  EXPECT_EQ(InferText("product", {}), "product: expected at least 1 inputs, got 0");
  EXPECT_EQ(InferText("product", {kI64x5}), "product: expected floating point, got i64[5]");
}

TEST(ReductionTest, ShareAndScaleEqualTheirAdjoints) {
  for (const double holders : {1.0, 2.0, 4.0}) {
    CheckAdjoint(1, {kF64x5}, [&](RankBuilder& b, const Values& x) {
      return Values{b.Op("share", {x[0], Fill(b, kF32x5, holders)})};
    });
  }
  CheckAdjoint(1, {kF32x5}, [](RankBuilder& b, const Values& x) {
    return Values{b.Op("scale", {x[0], Fill(b, kF32, 0.25)})};
  });
}

TEST(ReductionTest, AProductsGradientsEqualDifferences) {
  for (const int n : {1, 2, 3, 5}) {
    CheckGradients(1, std::vector<TensorType>(n, kF64x5), [](RankBuilder& b, const Values& x) {
      const ValueIndex y = b.Op("product", x);
      return Values{b.Op("mul", {y, b.Op("sin", {x[0]})})};
    });
  }
}

}  // namespace
}  // namespace chorus
