#include <cstdint>
#include <string>
#include <vector>

#include "core/ops/op.h"
#include "core/ops/testing/gradient_check.h"
#include "core/ops/testing/rank_builder.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::CheckGradients;
using testing::InferText;
using testing::RankBuilder;
using Values = std::vector<ValueIndex>;
using Ints = std::vector<int64_t>;

Attributes Fill(const Ints& dims, const std::string& dtype, AttributeValue value) {
  return {{"dims", dims}, {"dtype", dtype}, {"value", value}};
}

TEST(FillTest, ShapeTable) {
  EXPECT_EQ(InferText("fill", {}, Fill(Ints{2, 3}, "f32", 1.5)), "f32[2,3]");
  EXPECT_EQ(InferText("fill", {}, Fill(Ints{}, "i64", int64_t{7})), "i64[]");
  EXPECT_EQ(InferText("fill", {}, Fill(Ints{2}, "f32", int64_t{1})),
            "fill: expected a double as 'value', got an integer");
  EXPECT_EQ(InferText("fill", {}, Fill(Ints{2}, "i64", 1.0)),
            "fill: expected an integer as 'value', got a double");
  EXPECT_EQ(InferText("fill", {}, Fill(Ints{2}, "f31", 1.0)),
            "fill: expected the name of a dtype as 'dtype', got another text");
  EXPECT_EQ(InferText("fill", {}, Fill(Ints{2}, "f16", 1.0)),
            "fill: output 0 is f16[2]; this build computes with f32, f64 and i64");
  EXPECT_EQ(InferText("fill", {}, Fill(Ints{-2}, "f32", 1.0)),
            "fill: expected a valid type as output 0, got f32[-2] has a negative dimension, -2");
  EXPECT_EQ(InferText("fill", {}), "fill: expected a list of integers as 'dims', got none");
  EXPECT_EQ(InferText("fill", {TensorType(DType::kF32, {})}, Fill(Ints{2}, "f32", 1.0)),
            "fill: expected 0 inputs, got 1");
}

TEST(FillTest, IsAConstantToItsUsers) {
  CheckGradients(1, {TensorType(DType::kF64, {3})}, [](RankBuilder& b, const Values& x) {
    return Values{b.Op("mul", {x[0], b.Op("fill", {}, Fill(Ints{3}, "f64", 2.5))})};
  });
}

}  // namespace
}  // namespace chorus
