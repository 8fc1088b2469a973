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
  EXPECT_EQ(InferText("fill", {}, Fill(Ints{2}, "f16", 1.0)), "f16[2]");
  EXPECT_EQ(InferText("fill", {}, Fill(Ints{2}, "c64", int64_t{1})),
            "fill: output 0 is c64[2]; this build computes with f16, bf16, f32, f64, i8, u8, i16, "
            "i32, i64 and bool");
  EXPECT_EQ(InferText("fill", {}, Fill(Ints{2}, "u8", int64_t{255})), "u8[2]");
  EXPECT_EQ(InferText("fill", {}, Fill(Ints{2}, "u8", int64_t{256})),
            "fill: expected from 0 to 255 as 'value' of u8, got 256");
  EXPECT_EQ(InferText("fill", {}, Fill(Ints{2}, "i8", int64_t{-129})),
            "fill: expected from -128 to 127 as 'value' of i8, got -129");
  EXPECT_EQ(InferText("fill", {}, Fill(Ints{2}, "bool", int64_t{2})),
            "fill: expected from 0 to 1 as 'value' of bool, got 2");
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
