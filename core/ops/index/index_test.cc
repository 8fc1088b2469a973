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
using Ints = std::vector<int64_t>;
using Values = std::vector<ValueIndex>;

TensorType Type(DType dtype, const Ints& dims) {
  TensorType type(dtype, {});
  for (const int64_t size : dims) type.dims.emplace_back(size);
  return type;
}
TensorType F32(const Ints& dims) { return Type(DType::kF32, dims); }
TensorType I16(const Ints& dims) { return Type(DType::kI16, dims); }

Attributes Axis(int64_t axis) { return {{"axis", axis}}; }
Attributes AxisAndSize(int64_t axis, int64_t size) { return {{"axis", axis}, {"size", size}}; }

TEST(IndexTest, ShapeTableOfOneHot) {
  const auto infer = [](const TensorType& indices, int64_t depth, const std::string& dtype) {
    return InferText("one_hot", {indices}, {{"depth", depth}, {"dtype", dtype}});
  };
  EXPECT_EQ(infer(I16({2, 3}), 10, "bf16"), "bf16[2,3,10]");
  EXPECT_EQ(infer(I16({}), 0, "bool"), "bool[0]");
  EXPECT_EQ(infer(F32({2}), 3, "f32"), "one_hot: expected integers as input 0, got f32[2]");
  EXPECT_EQ(infer(I16({2}), -1, "f32"),
            "one_hot: expected 'depth' from 0 to 1099511627776, got -1");
  EXPECT_EQ(infer(I16({2}), 3, "f33"),
            "one_hot: expected the name of a dtype as 'dtype', got another text");
}

TEST(IndexTest, ShapeTableOfTake) {
  const TensorType x = F32({4, 5, 6});
  EXPECT_EQ(InferText("take", {x, I16({2, 3})}, Axis(0)), "f32[2,3,5,6]");
  EXPECT_EQ(InferText("take", {x, I16({2, 3})}, Axis(1)), "f32[4,2,3,6]");
  EXPECT_EQ(InferText("take", {x, I16({})}, Axis(2)), "f32[4,5]");
  EXPECT_EQ(InferText("take", {Type(DType::kBool, {4}), I16({0})}, Axis(0)), "bool[0]");
  EXPECT_EQ(InferText("take", {x, I16({2})}, Axis(3)),
            "take: expected an axis with 1 of the 3 dimensions of f32[4,5,6] from it on, got 3");
  EXPECT_EQ(InferText("take", {x, I16({2})}, Axis(-1)),
            "take: expected an axis with 1 of the 3 dimensions of f32[4,5,6] from it on, got -1");
  EXPECT_EQ(InferText("take", {F32({}), I16({2})}, Axis(0)),
            "take: expected an axis with 1 of the 0 dimensions of f32[] from it on, got 0");
  EXPECT_EQ(InferText("take", {x, F32({2})}, Axis(0)),
            "take: expected integers as input 1, got f32[2]");
  EXPECT_EQ(InferText("take", {x, Type(DType::kBool, {2})}, Axis(0)),
            "take: expected integers as input 1, got bool[2]");
}

TEST(IndexTest, ShapeTableOfScatterAdd) {
  const TensorType x = F32({4, 5, 6});
  EXPECT_EQ(InferText("scatter_add", {x, I16({4, 5})}, AxisAndSize(0, 9)), "f32[9,6]");
  EXPECT_EQ(InferText("scatter_add", {x, I16({5})}, AxisAndSize(1, 0)), "f32[4,0,6]");
  EXPECT_EQ(InferText("scatter_add", {x, I16({})}, AxisAndSize(3, 2)), "f32[4,5,6,2]");
  EXPECT_EQ(InferText("scatter_add", {x, I16({5})}, AxisAndSize(0, 9)),
            "scatter_add: expected the dimensions of input 1, i16[5], from axis 0 on, got "
            "f32[4,5,6]");
  EXPECT_EQ(InferText("scatter_add", {x, I16({6, 7})}, AxisAndSize(2, 9)),
            "scatter_add: expected an axis with 2 of the 3 dimensions of f32[4,5,6] from it on, "
            "got 2");
  EXPECT_EQ(InferText("scatter_add", {F32({4}), I16({4, 1})}, AxisAndSize(0, 9)),
            "scatter_add: expected an axis with 2 of the 1 dimensions of f32[4] from it on, got 0");
  EXPECT_EQ(InferText("scatter_add", {x, F32({4})}, AxisAndSize(0, 9)),
            "scatter_add: expected integers as input 1, got f32[4]");
  EXPECT_EQ(InferText("scatter_add", {x, I16({4})}, AxisAndSize(0, -1)),
            "scatter_add: expected 'size' from 0 to 1099511627776, got -1");
  EXPECT_EQ(InferText("scatter_add", {Type(DType::kBool, {4}), I16({4})}, AxisAndSize(0, 9)),
            "scatter_add: input 0 is bool[4]; the op takes f16, bf16, f32, f64, i8, u8, i16, i32 "
            "and i64");
}

TEST(IndexTest, ShapeTableOfTheirFormsAlongAnAxis) {
  const TensorType x = F32({4, 5, 6});
  EXPECT_EQ(InferText("take_along", {x, I16({4, 2, 6})}, Axis(1)), "f32[4,2,6]");
  EXPECT_EQ(InferText("take_along", {x, I16({4, 2, 5})}, Axis(1)),
            "take_along: expected indices with the dimensions of f32[4,5,6] but for axis 1, got "
            "i16[4,2,5]");
  EXPECT_EQ(InferText("take_along", {x, I16({4})}, Axis(1)),
            "take_along: expected indices with the dimensions of f32[4,5,6] but for axis 1, got "
            "i16[4]");
  EXPECT_EQ(InferText("take_along", {x, I16({4, 2, 6})}, Axis(3)),
            "take_along: expected an axis with 1 of the 3 dimensions of f32[4,5,6] from it on, got "
            "3");
  EXPECT_EQ(InferText("take_along", {x, F32({4, 2, 6})}, Axis(1)),
            "take_along: expected integers as input 1, got f32[4,2,6]");
  EXPECT_EQ(InferText("scatter_add_along", {x, I16({4, 5, 6})}, AxisAndSize(1, 9)), "f32[4,9,6]");
  EXPECT_EQ(InferText("scatter_add_along", {x, I16({4, 9, 6})}, AxisAndSize(1, 9)),
            "scatter_add_along: expected an index for each element of f32[4,5,6], got i16[4,9,6]");
  EXPECT_EQ(InferText("scatter_add_along", {x, I16({4, 5, 6})}, AxisAndSize(1, -1)),
            "scatter_add_along: expected 'size' from 0 to 1099511627776, got -1");
}

TEST(IndexTest, ShapeTableOfArgMax) {
  for (const std::string op : {"arg_max", "arg_min"}) {
    EXPECT_EQ(InferText(op, {F32({4, 5, 6})}, Axis(1)), "i64[4,6]");
    EXPECT_EQ(InferText(op, {Type(DType::kBool, {4})}, Axis(0)), "i64[]");
    EXPECT_EQ(InferText(op, {F32({4, 5, 6})}, {{"axis", int64_t{1}}, {"keep_dims", int64_t{1}}}),
              "i64[4,1,6]");
    EXPECT_EQ(InferText(op, {F32({4})}, {{"axis", int64_t{0}}, {"keep_dims", int64_t{2}}}),
              op + ": expected 0 or 1 as 'keep_dims', got 2");
    EXPECT_EQ(InferText(op, {F32({0, 4})}, Axis(0)),
              op + ": expected at least one element along axis 0, got f32[0,4]");
    EXPECT_EQ(InferText(op, {F32({0, 4})}, Axis(1)), "i64[0]");
    EXPECT_EQ(InferText(op, {F32({4})}, Axis(1)),
              op + ": expected an axis with 1 of the 1 dimensions of f32[4] from it on, got 1");
  }
}

// A constant, of those dimensions.
ValueIndex Indices(RankBuilder& b, const Ints& indices, const Ints& dims) {
  Values each;
  for (const int64_t index : indices) {
    Attributes attributes = TypeAttributes(TensorType(DType::kI64, {1}));
    attributes.push_back({"value", index});
    each.push_back(b.Op("fill", {}, attributes));
  }
  return b.Op("reshape", {b.Op("concat", each, {{"axis", int64_t{0}}})}, {{"dims", dims}});
}

// Indices repeat, and leave some out.
TEST(IndexTest, EqualTheirAdjoints) {
  CheckAdjoint(1, {F32({4, 3})}, [](RankBuilder& b, const Values& x) {
    return Values{b.Op("take", {x[0], Indices(b, {3, 0, 3, 1}, {2, 2})}, Axis(0))};
  });
  CheckAdjoint(1, {F32({2, 4, 3})}, [](RankBuilder& b, const Values& x) {
    return Values{b.Op("take", {x[0], Indices(b, {2, 2, 0}, {3})}, Axis(1))};
  });
  CheckAdjoint(1, {F32({4, 3})}, [](RankBuilder& b, const Values& x) {
    return Values{b.Op("take", {x[0], Indices(b, {2}, {})}, Axis(1))};
  });
  CheckAdjoint(1, {F32({2, 2, 3})}, [](RankBuilder& b, const Values& x) {
    return Values{b.Op("scatter_add", {x[0], Indices(b, {3, 0, 3, 1}, {2, 2})}, AxisAndSize(0, 5))};
  });
  CheckAdjoint(1, {F32({2, 3})}, [](RankBuilder& b, const Values& x) {
    return Values{b.Op("take_along", {x[0], Indices(b, {2, 2, 0, 1}, {2, 2})}, Axis(1))};
  });
  CheckAdjoint(1, {F32({2, 2})}, [](RankBuilder& b, const Values& x) {
    return Values{
        b.Op("scatter_add_along", {x[0], Indices(b, {2, 2, 0, 1}, {2, 2})}, AxisAndSize(0, 4))};
  });
}

TEST(IndexTest, GradientsEqualDifferences) {
  CheckGradients(1, {Type(DType::kF64, {4, 3})}, [](RankBuilder& b, const Values& x) {
    const ValueIndex rows = b.Op("take", {x[0], Indices(b, {3, 0, 3}, {3})}, Axis(0));
    const ValueIndex sums =
        b.Op("scatter_add", {b.Op("sin", {rows}), Indices(b, {1, 1, 0}, {3})}, AxisAndSize(1, 2));
    const ValueIndex along =
        b.Op("take_along", {b.Op("cos", {x[0]}), Indices(b, {1, 0, 2, 2}, {4, 1})}, Axis(1));
    const ValueIndex back =
        b.Op("scatter_add_along", {b.Op("sin", {along}), Indices(b, {1, 1, 0, 1}, {4, 1})},
             AxisAndSize(0, 3));
    return Values{b.Op("mul", {sums, sums}), b.Op("mul", {back, back})};
  });
}

}  // namespace
}  // namespace chorus
