#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/autograd/testing/gradient_check.h"
#include "core/ops/op.h"
#include "core/ops/testing/rank_builder.h"
#include "core/ops/testing/value.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::CheckAdjoint;
using testing::CheckGradients;
using testing::InferText;
using testing::RankBuilder;
using Values = std::vector<ValueIndex>;

const TensorType kF64x5(DType::kF64, {5});
const TensorType kF64(DType::kF64, {});
const TensorType kBool(DType::kBool, {});
const TensorType kBoolx5(DType::kBool, {5});

Attributes To(const std::string& dtype) { return {{"dtype", dtype}}; }

TEST(CompareTest, ShapeTable) {
  const TensorType i64(DType::kI64, {2, 3});
  for (const char* op : {"eq", "ne", "lt", "le", "gt", "ge"}) {
    EXPECT_EQ(InferText(op, {kF64x5, kF64x5}), "bool[5]");
    EXPECT_EQ(InferText(op, {kF64, kF64x5}), "bool[5]");
    EXPECT_EQ(InferText(op, {kF64, kF64}), "bool[]");
    EXPECT_EQ(InferText(op, {i64, i64}), "bool[2,3]");
    EXPECT_EQ(InferText(op, {kBoolx5, kBool}), "bool[5]");
    EXPECT_EQ(InferText(op, {kF64x5, i64}),
              std::string(op) +
                  ": expected inputs of one type, f64[5] or f64[], got i64[2,3] as input 1");
  }
  EXPECT_EQ(InferText("logical_and", {kBoolx5, kBool}), "bool[5]");
  EXPECT_EQ(InferText("logical_not", {kBoolx5}), "bool[5]");
  EXPECT_EQ(InferText("logical_or", {kF64x5, kF64x5}),
            "logical_or: input 0 is f64[5]; the op takes bool");
}

TEST(WhereTest, ShapeTable) {
  EXPECT_EQ(InferText("where", {kBoolx5, kF64x5, kF64x5}), "f64[5]");
  EXPECT_EQ(InferText("where", {kBool, kF64x5, kF64}), "f64[5]");
  EXPECT_EQ(InferText("where", {kBoolx5, kF64, kF64}), "f64[5]");
  EXPECT_EQ(InferText("where", {kBool, kF64, kF64}), "f64[]");
  EXPECT_EQ(InferText("where", {kBoolx5, kBoolx5, kBool}), "bool[5]");
  EXPECT_EQ(InferText("where", {kF64x5, kF64x5, kF64x5}),
            "where: expected bool[5] or bool[] as input 0, got f64[5]");
  EXPECT_EQ(InferText("where", {TensorType(DType::kBool, {4}), kF64x5, kF64}),
            "where: expected bool[5] or bool[] as input 0, got bool[4]");
  EXPECT_EQ(InferText("where", {kF64, kF64, kF64}), "where: expected bool[] as input 0, got f64[]");
  EXPECT_EQ(InferText("where", {kBoolx5, kF64x5, TensorType(DType::kF64, {4})}),
            "where: expected inputs of one type, f64[5] or f64[], got f64[4] as input 2");
}

TEST(CastTest, ShapeTable) {
  EXPECT_EQ(InferText("cast", {kF64x5}, To("bf16")), "bf16[5]");
  EXPECT_EQ(InferText("cast", {kBool}, To("i64")), "i64[]");
  EXPECT_EQ(InferText("cast", {kF64x5}), "cast: expected a text as 'dtype', got none");
  EXPECT_EQ(InferText("cast", {kF64x5}, To("float")),
            "cast: expected the name of a dtype as 'dtype', got another text");
  EXPECT_EQ(InferText("cast", {kF64x5}, To("c64")).substr(0, 24), "cast: output 0 is c64[5]");
}

TEST(WhereTest, GradientsEqualDifferences) {
  for (const auto& types :
       {std::vector<TensorType>{kF64x5, kF64x5}, std::vector<TensorType>{kF64x5, kF64},
        std::vector<TensorType>{kF64, kF64x5}}) {
    CheckGradients(1, types, [](RankBuilder& b, const Values& x) {
      const ValueIndex y = b.Op("where", {b.Op("gt", x), x[0], b.Op("sin", {x[1]})});
      return Values{b.Op("mul", {y, y})};
    });
  }
  // A condition alone may have the shape.
  CheckGradients(1, {kF64x5, kF64, kF64}, [](RankBuilder& b, const Values& x) {
    const ValueIndex y = b.Op("where", {b.Op("lt", {x[0], x[1]}), x[1], x[2]});
    return Values{b.Op("mul", {b.Op("mul", {y, y}), x[0]})};
  });
}

TEST(WhereTest, WhatIsNotTakenStaysOutOfTheGradient) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  const TensorType type(DType::kF64, {4});
  testing::RankCase c;
  c.inputs = {testing::FromDoubles(type, {nan, 1, 2, inf}),
              testing::FromDoubles(type, {1, nan, inf, 2}),
              testing::FromDoubles(TensorType(DType::kF64, {4}), {-1, 1, -1, 1})};
  c.grads = {testing::FromDoubles(type, {3, nan, inf, 4})};
  const auto results = testing::RunBackward({c}, [](RankBuilder& b, const Values& x) {
    Attributes zero = TypeAttributes(TensorType(DType::kF64, {}));
    zero.push_back({"value", 0.0});
    return Values{b.Op("where", {b.Op("gt", {x[2], b.Op("fill", {}, zero)}), x[0], x[1]})};
  });
  ASSERT_EQ(results.size(), 1u);
  EXPECT_EQ(testing::ToDoubles(results[0].outputs[0]), (std::vector<double>{1, 1, inf, inf}));
  const std::vector<double> a = testing::ToDoubles(results[0].gradients[0]);
  const std::vector<double> b = testing::ToDoubles(results[0].gradients[1]);
  EXPECT_EQ(a[0], 0);
  EXPECT_TRUE(a[1] != a[1]);
  EXPECT_EQ(a[2], 0);
  EXPECT_EQ(a[3], 4);
  EXPECT_EQ(b, (std::vector<double>{3, 0, inf, 0}));
  EXPECT_EQ(testing::ToDoubles(results[0].gradients[2]), (std::vector<double>{0, 0, 0, 0}));
}

TEST(CastTest, EqualsItsAdjoint) {
  for (const char* dtype : {"f32", "f64", "f16", "bf16"}) {
    CheckAdjoint(1, {kF64x5}, [&](RankBuilder& b, const Values& x) {
      return Values{b.Op("cast", x, To(dtype))};
    });
  }
}

TEST(CastTest, ThroughAnIntegerThereIsNoGradient) {
  CheckGradients(1, {kF64x5}, [](RankBuilder& b, const Values& x) {
    const ValueIndex whole = b.Op("cast", {b.Op("cast", x, To("i64"))}, To("f64"));
    return Values{b.Op("sin", {b.Op("add", {b.Op("mul", {x[0], x[0]}), whole})})};
  });
}

}  // namespace
}  // namespace chorus
