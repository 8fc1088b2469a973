#include <cstdint>
#include <limits>
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

Attributes Sized(Attributes attributes, const Ints& size) {
  for (size_t i = 0; i <= attributes.size(); ++i) {
    if (i == attributes.size() || attributes[i].name > "size") {
      attributes.insert(attributes.begin() + static_cast<std::ptrdiff_t>(i), {"size", size});
      break;
    }
  }
  return attributes;
}

TEST(ConvolutionTest, ShapeTable) {
  const TensorType x = Type({2, 6, 9, 8});
  const TensorType w = Type({4, 3, 3, 2});
  const Attributes all = {{"dilation", Ints{2, 1}},
                          {"groups", int64_t{2}},
                          {"padding", Ints{1, 0}},
                          {"stride", Ints{2, 3}}};
  // (9 + 2 - 5) / 2 + 1 and (8 - 2) / 3 + 1.
  EXPECT_EQ(InferText("convolution", {x, w}, all), "f32[2,4,4,3]");
  const TensorType y = Type({2, 4, 4, 3});
  EXPECT_EQ(InferText("convolution_data_grad", {y, w}, Sized(all, {9, 8})), "f32[2,6,9,8]");
  // What the last place leaves over.
  EXPECT_EQ(InferText("convolution_data_grad", {y, w}, Sized(all, {10, 10})), "f32[2,6,10,10]");
  EXPECT_EQ(InferText("convolution_weight_grad", {x, y}, Sized(all, {3, 2})), "f32[4,3,3,2]");
  EXPECT_EQ(InferText("convolution", {x, Type({4, 6, 3, 2})}), "f32[2,4,7,7]");
  EXPECT_EQ(InferText("convolution", {Type({0, 6, 9, 8}), Type({0, 6, 9, 8})}), "f32[0,0,1,1]");

  EXPECT_EQ(InferText("convolution", {x, w}),
            "convolution: expected x [n, groups in, h, w] and weights [out, in, kh, kw] with out a "
            "multiple of groups=1, got f32[2,6,9,8] and f32[4,3,3,2]");
  EXPECT_EQ(InferText("convolution", {x, Type({3, 3, 3, 2})}, all),
            "convolution: expected x [n, groups in, h, w] and weights [out, in, kh, kw] with out a "
            "multiple of groups=2, got f32[2,6,9,8] and f32[3,3,3,2]");
  EXPECT_EQ(InferText("convolution", {x, Type({4, 6, 10, 2})}),
            "convolution: expected an x of at least 10 along dimension 2, for the weights, got "
            "f32[2,6,9,8] and f32[4,6,10,2]");
  EXPECT_EQ(InferText("convolution", {x, Type({4, 6, 0, 2})}),
            "convolution: expected weights with one tap at least, got f32[4,6,0,2]");
  EXPECT_EQ(InferText("convolution", {x, Type({6, 3})}),
            "convolution: expected two tensors of four dimensions and one dtype, got f32[2,6,9,8] "
            "and f32[6,3]");
  EXPECT_EQ(InferText("convolution", {x, Type({4, 6, 3, 2}, DType::kF64)}),
            "convolution: expected two tensors of four dimensions and one dtype, got f32[2,6,9,8] "
            "and f64[4,6,3,2]");
  EXPECT_EQ(InferText("convolution", {Type({2, 6, 9, 8}, DType::kF16), w}),
            "convolution: input 0 is f16[2,6,9,8]; the op takes f32 and f64");
  const TensorType whole = Type({4, 6, 3, 2});
  EXPECT_EQ(InferText("convolution", {x, whole}, {{"groups", int64_t{0}}}),
            "convolution: expected x [n, groups in, h, w] and weights [out, in, kh, kw] with out a "
            "multiple of groups=0, got f32[2,6,9,8] and f32[4,6,3,2]");
  // Of no outputs and channels any number would be a divisor, and no number their product.
  EXPECT_EQ(
      InferText("convolution",
                {TensorType(DType::kF32, {2, 0, 9, 8}), TensorType(DType::kF32, {0, 0, 3, 2})},
                {{"groups", std::numeric_limits<int64_t>::max()}}),
      "convolution: expected x [n, groups in, h, w] and weights [out, in, kh, kw] with out a "
      "multiple of groups=9223372036854775807, got f32[2,0,9,8] and f32[0,0,3,2]");
  EXPECT_EQ(InferText("convolution", {x, whole}, {{"stride", Ints{1, 0}}}),
            "convolution: expected two numbers from 1 to 1048576 as 'stride', got [1,0]");
  EXPECT_EQ(InferText("convolution", {x, whole}, {{"dilation", Ints{1048577, 1}}}),
            "convolution: expected two numbers from 1 to 1048576 as 'dilation', got [1048577,1]");
  EXPECT_EQ(InferText("convolution", {x, whole}, {{"padding", Ints{0, -1}}}),
            "convolution: expected two numbers from 0 to 1048576 as 'padding', got [0,-1]");
  EXPECT_EQ(InferText("convolution", {x, whole}, {{"padding", Ints{1}}}),
            "convolution: expected two numbers from 0 to 1048576 as 'padding', got [1]");
}

TEST(ConvolutionTest, ShapesOfGradients) {
  const TensorType x = Type({2, 6, 9, 8});
  const TensorType w = Type({4, 6, 3, 2});
  const TensorType y = Type({2, 4, 7, 7});
  EXPECT_EQ(InferText("convolution_data_grad", {y, w}, {{"size", Ints{9, 9}}}),
            "convolution_data_grad: expected f32[2,4,7,8] as input 0, which a convolution of "
            "f32[2,6,9,9] by f32[4,6,3,2] gives, got f32[2,4,7,7]");
  EXPECT_EQ(InferText("convolution_weight_grad", {x, y}, {{"size", Ints{2, 2}}}),
            "convolution_weight_grad: expected f32[2,4,8,7] as input 1, which a convolution of "
            "f32[2,6,9,8] by f32[4,6,2,2] gives, got f32[2,4,7,7]");
  EXPECT_EQ(InferText("convolution_data_grad", {y, w}),
            "convolution_data_grad: expected a list of integers as 'size', got none");
  for (const int64_t groups : {0, 3, 5}) {
    EXPECT_NE(InferText("convolution_data_grad", {y, w}, {{"groups", groups}, {"size", Ints{9, 8}}})
                  .find("expected"),
              std::string::npos)
        << groups;
  }
  EXPECT_EQ(
      InferText("convolution_weight_grad", {x, y}, {{"groups", int64_t{4}}, {"size", Ints{3, 2}}}),
      "convolution_weight_grad: expected groups that divide the channels of f32[2,6,9,8], "
      "got 4");
  // Sizes whose product no number holds.
  const int64_t large = int64_t{1} << 40;
  EXPECT_NE(InferText("convolution_data_grad", {Type({0, large, 1, 1}), Type({large, large, 0, 1})},
                      {{"groups", large}, {"size", Ints{1, 1}}})
                .find("expected"),
            std::string::npos);
}

// As wide as what they are of may be.
TEST(ConvolutionTest, GradientsOfWideOnesAreOfTheirSize) {
  const int64_t wide = (int64_t{1} << 20) + 3;
  const TensorType x = Type({1, 1, 1, wide});
  const TensorType w = Type({1, 1, 1, 2});
  const TensorType y = Type({1, 1, 1, wide - 1});
  EXPECT_EQ(InferText("convolution", {x, w}), y.ToString());
  EXPECT_EQ(InferText("convolution_data_grad", {y, w}, {{"size", Ints{1, wide}}}), x.ToString());
  EXPECT_EQ(InferText("convolution_weight_grad", {x, w}, {{"size", Ints{1, wide - 1}}}),
            y.ToString());
  // What no tensor can be.
  const int64_t large = int64_t{1} << 40;
  EXPECT_NE(InferText("convolution_data_grad", {y, w}, {{"size", Ints{large, large}}})
                .find("f32[1,1,1099511627776,1099511627776]"),
            std::string::npos);
}

struct Sizes {
  Ints x, w, y;
  Attributes attributes;
};
const Sizes kSizes[] = {
    {{2, 2, 3, 4}, {3, 2, 2, 2}, {2, 3, 2, 3}, {}},
    {{1, 4, 5, 4},
     {2, 2, 2, 3},
     {1, 2, 3, 2},
     {{"dilation", Ints{2, 1}},
      {"groups", int64_t{2}},
      {"padding", Ints{1, 0}},
      {"stride", Ints{2, 1}}}},
    {{1, 2, 4, 5}, {2, 1, 2, 2}, {1, 2, 1, 2}, {{"groups", int64_t{2}}, {"stride", Ints{3, 2}}}},
};

TEST(ConvolutionTest, GradientsEqualDifferences) {
  for (const Sizes& s : kSizes) {
    SCOPED_TRACE(&s - kSizes);
    const auto check = [&](const char* op, const Ints& a, const Ints& b, const Ints& like) {
      SCOPED_TRACE(op);
      const Attributes attributes =
          like.empty() ? s.attributes : Sized(s.attributes, {like[2], like[3]});
      CheckGradients(1, {Type(a, DType::kF64), Type(b, DType::kF64)},
                     [&](RankBuilder& builder, const Values& in) {
                       return Values{builder.Op(op, in, attributes)};
                     });
    };
    check("convolution", s.x, s.w, {});
    check("convolution_data_grad", s.y, s.w, s.x);
    check("convolution_weight_grad", s.x, s.y, s.w);
  }
}

TEST(ConvolutionTest, EqualsItsAdjointInEachOperand) {
  for (const Sizes& s : kSizes) {
    SCOPED_TRACE(&s - kSizes);
    const auto filled = [&](RankBuilder& b, const Ints& sizes) {
      Attributes attributes = TypeAttributes(Type(sizes));
      attributes.push_back({"value", 3.0});
      return b.Op("fill", {}, attributes);
    };
    CheckAdjoint(1, {Type(s.x)}, [&](RankBuilder& b, const Values& in) {
      return Values{b.Op("convolution", {in[0], filled(b, s.w)}, s.attributes)};
    });
    CheckAdjoint(1, {Type(s.w)}, [&](RankBuilder& b, const Values& in) {
      return Values{b.Op("convolution", {filled(b, s.x), in[0]}, s.attributes)};
    });
  }
}

}  // namespace
}  // namespace chorus
