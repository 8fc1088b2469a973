#include <cmath>
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
using Ints = std::vector<int64_t>;
using Values = std::vector<ValueIndex>;

Attributes With(const Ints& rows, const Ints& weights, int64_t center = 1,
                AttributeValue epsilon = 0.1) {
  return {{"center", center}, {"epsilon", epsilon}, {"rows", rows}, {"weights", weights}};
}
Attributes OfMoments(const Ints& rows, int64_t center = 1) {
  return {{"center", center}, {"rows", rows}};
}

TEST(NormTest, ShapeTable) {
  const TensorType x(DType::kF32, {2, 0, 5});
  const TensorType channels(DType::kF32, {0});
  EXPECT_EQ(InferText("moments", {x}, OfMoments({1, 2})), "f32[2,0]");
  EXPECT_EQ(InferText("moments", {x}, OfMoments({0, 2})), "f32[2,2,0]");
  EXPECT_EQ(InferText("moments", {x}, OfMoments({0, 0})), "f32[2]");
  const TensorType moments(DType::kF32, {2, 0});
  const Attributes batch = With({1, 2}, {1, 2});
  EXPECT_EQ(InferText("normalize", {x, moments, channels, channels}, batch), "f32[2,0,5]");
  EXPECT_EQ(InferText("normalize_grad", {x, moments, channels, x}, batch), "f32[2,0,5]");
  EXPECT_EQ(InferText("normalize_weight_grad", {x, moments, x}, batch), "f32[0]");
  const TensorType pairs(DType::kF32, {2, 2});
  EXPECT_EQ(InferText("normalize_weight_grad", {x, pairs, x}, With({0, 1}, {1, 3})), "f32[0,5]");
}

TEST(NormTest, RefusesWhatDoesNotFit) {
  const TensorType x(DType::kF32, {2, 3, 5});
  const TensorType channels(DType::kF32, {3});
  const TensorType moments(DType::kF32, {2, 3});
  for (const Ints& range : {Ints{1}, Ints{2, 1}, Ints{-1, 1}, Ints{1, 4}, Ints{1, 2, 3}}) {
    const std::string text = InferText("moments", {x}, OfMoments(range));
    EXPECT_EQ(text.find("moments: expected the first axis and the end of a range within the 3 "
                        "dimensions of f32[2,3,5] as 'rows', got ["),
              0)
        << text;
  }
  EXPECT_EQ(InferText("moments", {x}, OfMoments({0, 3})),
            "moments: expected a dimension of f32[2,3,5] that is not in 'rows', got all");
  EXPECT_EQ(InferText("moments", {x}, OfMoments({0, 1}, 2)),
            "moments: expected 0 or 1 as 'center', got 2");
  EXPECT_EQ(InferText("moments", {TensorType(DType::kBF16, {2, 3})}, OfMoments({0, 1})),
            "moments: input 0 is bf16[2,3]; the op takes f32 and f64");
  const auto normalize = [&](const std::vector<TensorType>& inputs, const Attributes& attributes) {
    return InferText("normalize", inputs, attributes);
  };
  EXPECT_EQ(normalize({x, channels, channels, channels}, With({1, 2}, {1, 2})),
            "normalize: expected f32[2,3] as input 1, got f32[3]");
  EXPECT_EQ(normalize({x, moments, x, channels}, With({1, 2}, {1, 2})),
            "normalize: expected f32[3] as input 2, got f32[2,3,5]");
  EXPECT_EQ(normalize({x, moments, channels, x}, With({1, 2}, {1, 2})),
            "normalize: expected f32[3] as input 3, got f32[2,3,5]");
  EXPECT_EQ(normalize({x, moments, channels, channels}, With({1, 2}, {2, 4})),
            "normalize: expected the first axis and the end of a range within the 3 dimensions of "
            "f32[2,3,5] as 'weights', got [2,4]");
  EXPECT_EQ(normalize({x, moments, channels, channels}, With({1, 2}, {1, 2}, 1, -0.5)),
            "normalize: expected a double of at least 0 as 'epsilon', got -0.5");
  EXPECT_EQ(normalize({x, moments, channels, channels}, With({1, 2}, {1, 2}, 1, std::nan(""))),
            "normalize: expected a double of at least 0 as 'epsilon', got nan");
  EXPECT_EQ(normalize({x, moments, channels, channels}, With({1, 2}, {1, 2}, 1, int64_t{1})),
            "normalize: expected a double of at least 0 as 'epsilon', got an integer");
  EXPECT_EQ(InferText("normalize_grad", {x, moments, channels, channels}, With({1, 2}, {1, 2})),
            "normalize_grad: expected f32[2,3,5] as input 3, got f32[3]");
  EXPECT_EQ(InferText("normalize_weight_grad", {x, moments, channels}, With({1, 2}, {1, 2})),
            "normalize_weight_grad: expected f32[2,3,5] as input 2, got f32[3]");
}

struct Norm {
  Ints rows;
  Ints weights;
  std::vector<Dim> weight_sizes;
};
// Of x [2, 3, 4]: a batch norm, layer norms, one with weights that belong to neither, one without.
const Norm kNorms[] = {
    {{1, 2}, {1, 2}, {3}}, {{0, 1}, {1, 3}, {3, 4}}, {{0, 2}, {2, 3}, {4}},
    {{0, 1}, {1, 2}, {3}}, {{2, 3}, {1, 2}, {3}},    {{0, 0}, {0, 3}, {2, 3, 4}},
    {{0, 1}, {1, 1}, {}},
};

TEST(NormTest, GradientsEqualDifferences) {
  const TensorType x(DType::kF64, {2, 3, 4});
  for (const Norm& norm : kNorms) {
    for (const int64_t center : {0, 1}) {
      SCOPED_TRACE(::testing::PrintToString(norm.rows) + ::testing::PrintToString(norm.weights) +
                   std::to_string(center));
      const Attributes attributes = With(norm.rows, norm.weights, center);
      const TensorType weight(DType::kF64, norm.weight_sizes);
      CheckGradients(1, {x}, [&](RankBuilder& b, const Values& in) {
        return Values{b.Op("moments", in, OfMoments(norm.rows, center))};
      });
      // moments is what it is said to be, so the gradient is that of both.
      CheckGradients(1, {x, weight, weight}, [&](RankBuilder& b, const Values& in) {
        const ValueIndex moments = b.Op("moments", {in[0]}, OfMoments(norm.rows, center));
        return Values{b.Op("normalize", {in[0], moments, in[1], in[2]}, attributes)};
      });
      CheckGradients(1, {x, weight, x}, [&](RankBuilder& b, const Values& in) {
        const ValueIndex moments = b.Op("moments", {in[0]}, OfMoments(norm.rows, center));
        return Values{b.Op("normalize_grad", {in[0], moments, in[1], in[2]}, attributes),
                      b.Op("normalize_weight_grad", {in[0], moments, in[2]}, attributes)};
      });
    }
  }
}

// Who uses the moments for more than the norm gets the gradient of that beside the norm's.
TEST(NormTest, MomentsHaveAGradientOfTheirOwn) {
  const TensorType x(DType::kF64, {2, 3, 4});
  const TensorType weight(DType::kF64, {3});
  CheckGradients(1, {x, weight}, [&](RankBuilder& b, const Values& in) {
    const ValueIndex moments = b.Op("moments", {in[0]}, OfMoments({1, 2}));
    return Values{
        b.Op("sin", {moments}),
        b.Op("sin", {b.Op("normalize", {in[0], moments, in[1], in[1]}, With({1, 2}, {1, 2}))})};
  });
}

}  // namespace
}  // namespace chorus
