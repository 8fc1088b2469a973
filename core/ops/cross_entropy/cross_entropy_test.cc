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

using testing::CheckGradients;
using testing::InferText;
using testing::RankBuilder;
using testing::Value;
using Ints = std::vector<int64_t>;
using Values = std::vector<ValueIndex>;

// A constant, of those dimensions.
ValueIndex Labels(RankBuilder& b, const Ints& labels, const Ints& dims) {
  Values each;
  for (const int64_t label : labels) {
    Attributes attributes = TypeAttributes(TensorType(DType::kI32, {1}));
    attributes.push_back({"value", label});
    each.push_back(b.Op("fill", {}, attributes));
  }
  return b.Op("reshape", {b.Op("concat", each, {{"axis", int64_t{0}}})}, {{"dims", dims}});
}

const Attributes kIgnoring = {{"ignore_index", int64_t{-100}}};

TEST(CrossEntropyTest, ShapeTable) {
  const TensorType x(DType::kF32, {4, 10});
  const auto i = [](Ints dims) {
    TensorType type(DType::kU8, {});
    for (const int64_t size : dims) type.dims.emplace_back(size);
    return type;
  };
  EXPECT_EQ(InferText("cross_entropy", {x, i({4})}), "f32[4]");
  EXPECT_EQ(InferText("cross_entropy", {x, i({4})}, kIgnoring), "f32[4]");
  EXPECT_EQ(InferText("cross_entropy", {TensorType(DType::kF16, {2, 3, 0}), i({2, 3})}),
            "f16[2,3]");
  EXPECT_EQ(InferText("cross_entropy", {TensorType(DType::kF64, {10}), i({})}), "f64[]");
  const std::string label =
      "cross_entropy: expected an integer label for each row of f32[4,10] "
      "as input 1, got ";
  EXPECT_EQ(InferText("cross_entropy", {x, i({5})}), label + "u8[5]");
  EXPECT_EQ(InferText("cross_entropy", {x, i({4, 1})}), label + "u8[4,1]");
  EXPECT_EQ(InferText("cross_entropy", {x, TensorType(DType::kF32, {4})}), label + "f32[4]");
  EXPECT_EQ(InferText("cross_entropy", {TensorType(DType::kI64, {4, 10}), i({4})}),
            "cross_entropy: expected scores in floating point, of at least one dimension, as input "
            "0, got i64[4,10]");
  EXPECT_EQ(InferText("cross_entropy", {TensorType(DType::kF32, {}), i({})}),
            "cross_entropy: expected scores in floating point, of at least one dimension, as input "
            "0, got f32[]");
  EXPECT_EQ(InferText("cross_entropy", {x}), "cross_entropy: expected 2 inputs, got 1");
  EXPECT_EQ(InferText("cross_entropy_grad", {x, i({4}), TensorType(DType::kF32, {4})}),
            "f32[4,10]");
  EXPECT_EQ(InferText("cross_entropy_grad", {x, i({4}), TensorType(DType::kF32, {})}),
            "cross_entropy_grad: expected f32[4] as input 2, got f32[]");
}

TEST(CrossEntropyTest, GradientsEqualDifferences) {
  CheckGradients(1, {TensorType(DType::kF64, {2, 3, 4})}, [](RankBuilder& b, const Values& x) {
    return Values{b.Op("cross_entropy", {x[0], Labels(b, {0, 3, 2, 1, 1, 0}, {2, 3})})};
  });
  // Of one row without a batch, and what is made of losses.
  CheckGradients(1, {TensorType(DType::kF64, {5})}, [](RankBuilder& b, const Values& x) {
    return Values{b.Op("sin", {b.Op("cross_entropy", {x[0], Labels(b, {4}, {})})})};
  });
  CheckGradients(1, {TensorType(DType::kF64, {3, 4}), TensorType(DType::kF64, {3})},
                 [](RankBuilder& b, const Values& x) {
                   return Values{b.Op("cross_entropy_grad",
                                      {x[0], Labels(b, {2, -100, 0}, {3}), x[1]}, kIgnoring)};
                 });
}

// The weights of many classes, each rounded to a half type, add up to another number than 1.
TEST(CrossEntropyTest, SecondGradientsOfHalfTypesAreComputedInF32) {
  constexpr int64_t kClasses = 1009;
  const TensorType type(DType::kF16, {1, kClasses});
  testing::RankCase c;
  c.inputs = {testing::FromDoubles(type, std::vector<double>(kClasses, 0)),
              testing::FromDoubles(TensorType(DType::kF16, {1}), {0x1p15})};
  c.grads = {testing::FromDoubles(type, std::vector<double>(kClasses, 4))};
  const auto results = testing::RunBackward({c}, [](RankBuilder& b, const Values& x) {
    return Values{b.Op("cross_entropy_grad", {x[0], Labels(b, {0}, {1}), x[1]})};
  });
  ASSERT_EQ(results.size(), 1u);
  // What comes back is the same for all classes, so it moves no loss: 4 (1 - 1), and for each class
  // p g (4 - 4), where g times 4 is more than f16 has numbers for.
  EXPECT_NEAR(testing::ToDoubles(results[0].gradients[1])[0], 0, 2e-4);
  for (const double element : testing::ToDoubles(results[0].gradients[0])) {
    EXPECT_NEAR(element, 0, 1e-3);
  }
}

TEST(CrossEntropyTest, IgnoredRowsHaveNoGradientWhateverStandsThere) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  const auto body = [](RankBuilder& b, const Values& x) {
    return Values{b.Op("cross_entropy", {x[0], Labels(b, {1, -100, -100}, {3})}, kIgnoring)};
  };
  // Finite differences change what is ignored by nothing; NaN must not reach other rows.
  CheckGradients(1, {TensorType(DType::kF64, {3, 2})}, body,
                 [&](int32_t, std::vector<Value>* inputs) {
                   std::vector<double> x = testing::ToDoubles((*inputs)[0]);
                   x[2] = nan;
                   x[5] = inf;
                   (*inputs)[0] = testing::FromDoubles((*inputs)[0].type, x);
                 });
}

}  // namespace
}  // namespace chorus
