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

TensorType Type(const Ints& sizes, DType dtype = DType::kF32) {
  TensorType type(dtype, {});
  for (const int64_t size : sizes) type.dims.emplace_back(size);
  return type;
}

TEST(PoolTest, ShapeTable) {
  const TensorType x = Type({2, 3, 9, 8}, DType::kBF16);
  const Attributes all = {{"kernel", Ints{3, 2}}, {"padding", Ints{1, 0}}, {"stride", Ints{2, 3}}};
  EXPECT_EQ(InferText("avg_pool", {x}, all), "bf16[2,3,5,3]");
  EXPECT_EQ(InferText("max_pool_index", {x}, all), "i32[2,3,5,3]");
  Attributes sized = all;
  sized.insert(sized.begin() + 2, {"size", Ints{9, 8}});
  EXPECT_EQ(InferText("avg_pool_grad", {Type({2, 3, 5, 3})}, sized), "f32[2,3,9,8]");
  EXPECT_EQ(InferText("avg_pool_grad", {Type({2, 3, 5, 4})}, sized),
            "avg_pool_grad: expected f32[2,3,5,3], which f32[2,3,9,8] gives, got f32[2,3,5,4]");
  EXPECT_EQ(InferText("avg_pool_grad", {Type({2, 3})}, sized),
            "avg_pool_grad: expected x [n, channels, h, w], got f32[2,3]");
  EXPECT_EQ(InferText("max_pool_index", {x}, {{"dilation", Ints{4, 1}}, {"kernel", Ints{3, 8}}}),
            "i32[2,3,1,1]");
  for (const std::string op : {"avg_pool", "max_pool_index"}) {
    EXPECT_EQ(InferText(op, {x}), op + ": expected a list of integers as 'kernel', got none");
    EXPECT_EQ(InferText(op, {Type({3, 9, 8})}, all),
              op + ": expected x [n, channels, h, w], got f32[3,9,8]");
    EXPECT_EQ(InferText(op, {x}, {{"kernel", Ints{10, 1}}}),
              op + ": expected an x of at least 10 along dimension 2, got bf16[2,3,9,8]");
    EXPECT_EQ(InferText(op, {x}, {{"kernel", Ints{0, 1}}}),
              op + ": expected two numbers from 1 to 1048576 as 'kernel', got [0,1]");
    EXPECT_EQ(InferText(op, {x}, {{"kernel", Ints{2, 3}}, {"padding", Ints{0, 2}}}),
              op + ": expected at most half a window of padding, 1 along dimension 3, got 2");
    // All padding.
    EXPECT_EQ(
        InferText(op, {Type({1, 1, 0, 1})}, {{"kernel", Ints{2, 1}}, {"padding", Ints{1, 0}}}),
        op + ": expected an x of at least 1 along dimension 2, got f32[1,1,0,1]");
  }
  EXPECT_EQ(InferText("max_pool_index", {Type({1, 1, 1, 4})},
                      {{"dilation", Ints{2, 1}}, {"kernel", Ints{2, 1}}, {"padding", Ints{1, 0}}}),
            "max_pool_index: expected an x of at least 2 along dimension 2, got f32[1,1,1,4]");
  EXPECT_EQ(InferText("avg_pool", {x}, {{"count_padding", int64_t{2}}, {"kernel", Ints{2, 3}}}),
            "avg_pool: expected 0 or 1 as 'count_padding', got 2");
  EXPECT_EQ(InferText("avg_pool", {Type({1, 1, 2, 2}, DType::kI32)}, {{"kernel", Ints{2, 2}}}),
            "avg_pool: input 0 is i32[1,1,2,2]; the op takes f16, bf16, f32 and f64");
  EXPECT_EQ(InferText("max_pool_index", {Type({1, 1, 1 << 16, 1 << 15}, DType::kI8)},
                      {{"kernel", Ints{2, 2}}}),
            "max_pool_index: expected at most 2147483647 elements of a channel, got "
            "i8[1,1,65536,32768]");
}

TEST(PoolTest, IndicesAreOneForEachPlace) {
  const TensorType x = Type({2, 3, 9, 8}, DType::kBF16);
  const Attributes window = {
      {"kernel", Ints{3, 2}}, {"padding", Ints{1, 0}}, {"stride", Ints{2, 3}}};
  Attributes sized = window;
  sized.insert(sized.begin() + 2, {"size", Ints{9, 8}});
  const TensorType g = Type({2, 3, 5, 3}, DType::kBF16);
  const TensorType index = Type({2, 3, 5, 3}, DType::kI32);
  EXPECT_EQ(InferText("max_pool_take", {x, index}, window), "bf16[2,3,5,3]");
  EXPECT_EQ(InferText("max_pool_grad", {g, index}, sized), "bf16[2,3,9,8]");
  EXPECT_EQ(InferText("max_pool_take", {x, Type({2, 3, 5, 3}, DType::kI64)}, window),
            "max_pool_take: expected i32[2,3,5,3] as input 1, got i64[2,3,5,3]");
  EXPECT_EQ(InferText("max_pool_grad", {g, Type({2, 3, 5, 2}, DType::kI32)}, sized),
            "max_pool_grad: expected i32[2,3,5,3] as input 1, got i32[2,3,5,2]");
  EXPECT_EQ(InferText("max_pool_grad", {Type({2, 3, 5, 4}), index}, sized),
            "max_pool_grad: expected f32[2,3,5,3], which f32[2,3,9,8] gives, got f32[2,3,5,4]");
}

struct Sizes {
  Ints x, y;
  Attributes attributes;
};
const Sizes kSizes[] = {
    {{2, 1, 3, 4}, {2, 1, 2, 2}, {{"kernel", Ints{2, 3}}}},
    {{1, 2, 5, 4},
     {1, 2, 3, 2},
     {{"count_padding", int64_t{1}},
      {"kernel", Ints{3, 2}},
      {"padding", Ints{1, 1}},
      {"stride", Ints{2, 3}}}},
    {{1, 1, 4, 3},
     {1, 1, 3, 1},
     {{"count_padding", int64_t{0}},
      {"kernel", Ints{2, 2}},
      {"padding", Ints{1, 0}},
      {"stride", Ints{2, 2}}}},
};

Attributes Sized(Attributes attributes, const Ints& x) {
  size_t at = 0;
  while (at < attributes.size() && attributes[at].name < "size") ++at;
  attributes.insert(attributes.begin() + static_cast<std::ptrdiff_t>(at),
                    {"size", Ints{x[2], x[3]}});
  return attributes;
}

TEST(PoolTest, GradientsOfWideOnesAreOfTheirSize) {
  const int64_t wide = (int64_t{1} << 20) + 4;
  const TensorType x = Type({1, 1, 1, wide});
  const Attributes attributes = {{"kernel", Ints{1, 2}}, {"stride", Ints{1, 2}}};
  const TensorType y = Type({1, 1, 1, wide / 2});
  EXPECT_EQ(InferText("avg_pool", {x}, attributes), y.ToString());
  EXPECT_EQ(InferText("avg_pool_grad", {y}, Sized(attributes, {1, 1, 1, wide})), x.ToString());
  const int64_t large = int64_t{1} << 40;
  EXPECT_NE(InferText("avg_pool_grad", {y}, Sized(attributes, {1, 1, large, large}))
                .find("f32[1,1,1099511627776,1099511627776]"),
            std::string::npos);
}

TEST(PoolTest, GradientsEqualDifferences) {
  for (const Sizes& s : kSizes) {
    SCOPED_TRACE(&s - kSizes);
    EXPECT_EQ(InferText("avg_pool", {Type(s.x)}, s.attributes), Type(s.y).ToString());
    CheckGradients(1, {Type(s.x, DType::kF64)}, [&](RankBuilder& b, const Values& in) {
      return Values{b.Op("sin", {b.Op("avg_pool", in, s.attributes)})};
    });
    CheckGradients(1, {Type(s.y, DType::kF64)}, [&](RankBuilder& b, const Values& in) {
      return Values{b.Op("sin", {b.Op("avg_pool_grad", in, Sized(s.attributes, s.x))})};
    });
  }
}

TEST(PoolTest, GradientsOfTheLargestEqualDifferences) {
  for (const Ints& dilation : {Ints{1, 1}, Ints{1, 2}}) {
    const Attributes window = {{"dilation", dilation},
                               {"kernel", Ints{3, 2}},
                               {"padding", Ints{1, 1}},
                               {"stride", Ints{2, 1}}};
    const Ints x = {1, 2, 5, 4};
    const Ints y = {1, 2, 3, dilation[1] == 1 ? 5 : 4};
    CheckGradients(1, {Type(x, DType::kF64)}, [&](RankBuilder& b, const Values& in) {
      const ValueIndex index = b.Op("max_pool_index", in, window);
      return Values{b.Op("sin", {b.Op("max_pool_take", {in[0], index}, window)})};
    });
    CheckGradients(
        1, {Type(y, DType::kF64), Type(x, DType::kF64)}, [&](RankBuilder& b, const Values& in) {
          const ValueIndex index = b.Op("max_pool_index", {in[1]}, window);
          return Values{b.Op("sin", {b.Op("max_pool_grad", {in[0], index}, Sized(window, x))})};
        });
  }
}

TEST(PoolTest, TheLargestEqualTheirAdjoint) {
  const Attributes window = {{"kernel", Ints{2, 3}}, {"stride", Ints{1, 2}}};
  CheckAdjoint(1, {Type({1, 2, 3, 7})}, [&](RankBuilder& b, const Values& in) {
    return Values{b.Op("max_pool_take", {in[0], b.Op("max_pool_index", in, window)}, window)};
  });
}

TEST(PoolTest, AveragesEqualTheirAdjoint) {
  // Windows of powers of two: quotients are exact.
  const Attributes attributes = {
      {"count_padding", int64_t{1}}, {"kernel", Ints{2, 4}}, {"padding", Ints{1, 0}}};
  CheckAdjoint(1, {Type({1, 2, 3, 5})}, [&](RankBuilder& b, const Values& in) {
    return Values{b.Op("avg_pool", in, attributes)};
  });
}

}  // namespace
}  // namespace chorus
