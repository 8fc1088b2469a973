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

const TensorType kX(DType::kF32, {2, 5});

Attributes Slice(int64_t axis, int64_t begin, int64_t end) {
  return {{"axis", axis}, {"begin", begin}, {"end", end}};
}
Attributes Pad(int64_t after, int64_t axis, int64_t before) {
  return {{"after", after}, {"axis", axis}, {"before", before}};
}

TEST(SliceTest, ShapeTable) {
  EXPECT_EQ(InferText("slice", {kX}, Slice(1, 1, 4)), "f32[2,3]");
  EXPECT_EQ(InferText("slice", {kX}, Slice(0, 2, 2)), "f32[0,5]");
  EXPECT_EQ(InferText("slice", {kX}, Slice(1, 0, 6)),
            "slice: expected 0 <= begin <= end <= 5 along axis 1 of f32[2,5], got [0,6)");
  EXPECT_EQ(InferText("slice", {kX}, Slice(1, -1, 2)),
            "slice: expected 0 <= begin <= end <= 5 along axis 1 of f32[2,5], got [-1,2)");
  EXPECT_EQ(InferText("slice", {kX}, Slice(1, 3, 2)),
            "slice: expected 0 <= begin <= end <= 5 along axis 1 of f32[2,5], got [3,2)");
  EXPECT_EQ(InferText("slice", {kX}, Slice(2, 0, 1)),
            "slice: expected an axis within the 2 dimensions of f32[2,5], got 2");
  EXPECT_EQ(InferText("slice", {TensorType(DType::kF32, {})}, Slice(0, 0, 0)),
            "slice: expected an axis within the 0 dimensions of f32[], got 0");
  EXPECT_EQ(InferText("pad", {kX}, Pad(1, 1, 2)), "f32[2,8]");
  EXPECT_EQ(InferText("pad", {kX}, Pad(-1, 1, 2)),
            "pad: expected 'before' and 'after' from 0 to 1099511627776, got 2 and -1");
  EXPECT_EQ(InferText("pad", {kX}, Pad(int64_t{1} << 62, 1, int64_t{1} << 62)).substr(0, 30),
            "pad: expected 'before' and 'af");
  EXPECT_EQ(InferText("concat", {kX, kX, TensorType(DType::kF32, {1, 5})}, {{"axis", int64_t{0}}}),
            "f32[5,5]");
  EXPECT_EQ(InferText("concat", {kX, TensorType(DType::kF32, {2, 4})}, {{"axis", int64_t{0}}}),
            "concat: expected inputs like f32[2,5] but for axis 0, got f32[2,4] as input 1");
  EXPECT_EQ(InferText("concat", {kX, TensorType(DType::kF32, {2})}, {{"axis", int64_t{1}}}),
            "concat: expected inputs like f32[2,5] but for axis 1, got f32[2] as input 1");
  EXPECT_EQ(InferText("concat", {kX, TensorType(DType::kF64, {2, 5})}, {{"axis", int64_t{1}}}),
            "concat: expected inputs like f32[2,5] but for axis 1, got f64[2,5] as input 1");
  EXPECT_EQ(InferText("concat", {}, {{"axis", int64_t{1}}}),
            "concat: expected at least 1 inputs, got 0");
  const TensorType count(DType::kI64, {1});
  for (const std::string op : {"pack_rows", "unpack_rows"}) {
    const auto text = [&](const TensorType& x, const TensorType& counts, int64_t parts) {
      return InferText(op, {x, counts}, {{"parts", parts}});
    };
    EXPECT_EQ(text(kX, count, 2), "f32[2,5]");
    EXPECT_EQ(text(TensorType(DType::kF32, {0, 5}), count, 3), "f32[0,5]");
    const std::string rows =
        op + ": expected a tensor with rows that are as many in each of its 'parts', got ";
    EXPECT_EQ(text(kX, count, 3), rows + "f32[2,5] and 3 parts");
    EXPECT_EQ(text(kX, count, 0), rows + "f32[2,5] and 0 parts");
    EXPECT_EQ(text(kX, count, -2), rows + "f32[2,5] and -2 parts");
    EXPECT_EQ(text(TensorType(DType::kF32, {}), count, 1), rows + "f32[] and 1 parts");
    EXPECT_EQ(text(kX, TensorType(DType::kI64, {2}), 2),
              op + ": expected i64[1] as input 1, the rows that count, got i64[2]");
    EXPECT_EQ(text(kX, TensorType(DType::kI32, {1}), 2),
              op + ": expected i64[1] as input 1, the rows that count, got i32[1]");
  }
}

TEST(SliceTest, PackedRowsEqualTheirAdjoints) {
  for (const int64_t rows : {1, 2, 3}) {
    for (const char* op : {"pack_rows", "unpack_rows"}) {
      const auto apply = [&](RankBuilder& b, const Values& x) {
        Attributes attributes = TypeAttributes(TensorType(DType::kI64, {1}));
        attributes.push_back({"value", rows});
        return Values{b.Op(op, {x[0], b.Op("fill", {}, attributes)}, {{"parts", int64_t{2}}})};
      };
      const TensorType x(DType::kF64, {6, 2});
      CheckAdjoint(1, {x}, apply);
      CheckGradients(1, {x}, [&](RankBuilder& b, const Values& values) {
        return apply(b, {b.Op("mul", {values[0], values[0]})});
      });
    }
  }
}

TEST(SliceTest, EqualTheirAdjoints) {
  for (int64_t axis = 0; axis < 2; ++axis) {
    CheckAdjoint(1, {kX}, [&](RankBuilder& b, const Values& x) {
      return Values{b.Op("slice", x, Slice(axis, 1, 2))};
    });
    CheckAdjoint(1, {kX}, [&](RankBuilder& b, const Values& x) {
      return Values{b.Op("pad", x, Pad(2, axis, 1))};
    });
    CheckAdjoint(1, {kX, kX, kX}, [&](RankBuilder& b, const Values& x) {
      return Values{b.Op("concat", x, {{"axis", axis}})};
    });
  }
}

TEST(SliceTest, GradientsEqualDifferences) {
  CheckGradients(1, {TensorType(DType::kF64, {2, 5})}, [](RankBuilder& b, const Values& x) {
    const ValueIndex left = b.Op("slice", x, Slice(1, 0, 2));
    const ValueIndex right = b.Op("slice", x, Slice(1, 2, 5));
    const ValueIndex both = b.Op("concat", {b.Op("sin", {right}), left}, {{"axis", int64_t{1}}});
    return Values{b.Op("mul", {both, x[0]}), b.Op("pad", {b.Op("cos", {left})}, Pad(1, 0, 0))};
  });
}

}  // namespace
}  // namespace chorus
