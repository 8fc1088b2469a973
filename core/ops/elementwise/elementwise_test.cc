#include <cmath>
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

TEST(ElementwiseTest, ShapeTable) {
  const TensorType f32(DType::kF32, {2, 3});
  const TensorType i64(DType::kI64, {0});
  for (const char* op : {"add", "sub", "mul"}) {
    EXPECT_EQ(InferText(op, {f32, f32}), "f32[2,3]");
    EXPECT_EQ(InferText(op, {i64, i64}), "i64[0]");
    EXPECT_EQ(InferText(op, {f32}), std::string(op) + ": expected 2 inputs, got 1");
    EXPECT_EQ(InferText(op, {f32, i64}),
              std::string(op) +
                  ": expected inputs of one type, f32[2,3] or f32[], got i64[0] as input 1");
    EXPECT_EQ(InferText(op, {f32, TensorType(DType::kF32, {3, 2})}),
              std::string(op) +
                  ": expected inputs of one type, f32[2,3] or f32[], got f32[3,2] as input 1");
  }
  const TensorType scalar(DType::kF32, {});
  for (const char* op : {"add", "sub", "mul", "relu_grad"}) {
    EXPECT_EQ(InferText(op, {f32, scalar}), "f32[2,3]");
    EXPECT_EQ(InferText(op, {scalar, f32}), "f32[2,3]");
    EXPECT_EQ(InferText(op, {scalar, scalar}), "f32[]");
    EXPECT_EQ(
        InferText(op, {scalar, TensorType(DType::kF64, {3})}),
        std::string(op) + ": expected inputs of one type, f64[3] or f64[], got f32[] as input 0");
    EXPECT_EQ(InferText(op, {scalar, TensorType(DType::kF64, {})}),
              std::string(op) + ": expected inputs of one type, f32[], got f64[] as input 1");
    // One element is not 0-dim.
    EXPECT_EQ(InferText(op, {f32, TensorType(DType::kF32, {1})}),
              std::string(op) +
                  ": expected inputs of one type, f32[2,3] or f32[], got f32[1] as input 1");
  }
  EXPECT_EQ(InferText("neg", {i64}), "i64[0]");
  EXPECT_EQ(InferText("relu", {f32}), "f32[2,3]");
  EXPECT_EQ(InferText("sin", {f32}), "f32[2,3]");
  EXPECT_EQ(InferText("sin", {i64}), "sin: expected floating point, got i64[0]");
  for (const char* op : {"ceil", "cos", "erf", "exp", "expm1", "floor", "log", "log1p", "rsqrt",
                         "sigmoid", "sqrt", "tanh"}) {
    EXPECT_EQ(InferText(op, {i64}), std::string(op) + ": expected floating point, got i64[0]");
  }
  EXPECT_EQ(InferText("pow", {i64, i64}), "pow: expected floating point, got i64[0]");
  EXPECT_EQ(InferText("div", {i64, i64}), "i64[0]");
  EXPECT_EQ(InferText("maximum", {i64, i64}), "i64[0]");
  EXPECT_EQ(InferText("relu_grad", {f32, f32}), "f32[2,3]");
  EXPECT_EQ(InferText("relu_grad", {f32, i64}),
            "relu_grad: expected inputs of one type, f32[2,3] or f32[], got i64[0] as input 1");
}

TEST(ElementwiseTest, LinearOpsEqualTheirAdjoints) {
  CheckAdjoint(1, {kF64x5, kF64x5},
               [](RankBuilder& b, const Values& x) { return Values{b.Op("add", x)}; });
  CheckAdjoint(1, {kF64x5, kF64x5},
               [](RankBuilder& b, const Values& x) { return Values{b.Op("sub", x)}; });
  CheckAdjoint(1, {TensorType(DType::kF32, {2, 3})},
               [](RankBuilder& b, const Values& x) { return Values{b.Op("neg", x)}; });
}

ValueIndex Number(RankBuilder& b, double value) {
  Attributes attributes = TypeAttributes(TensorType(DType::kF64, {}));
  attributes.push_back({"value", value});
  return b.Op("fill", {}, attributes);
}

// A positive number from any.
ValueIndex Positive(RankBuilder& b, ValueIndex x) {
  return b.Op("add", {b.Op("mul", {x, x}), Number(b, 0.25)});
}

TEST(ElementwiseTest, GradientsEqualDifferences) {
  for (const char* op : {"add", "sub", "mul", "div", "maximum", "minimum"}) {
    SCOPED_TRACE(op);
    CheckGradients(1, {kF64x5, kF64x5},
                   [&](RankBuilder& b, const Values& x) { return Values{b.Op(op, x)}; });
  }
  for (const char* op :
       {"abs", "neg", "relu", "sin", "cos", "exp", "expm1", "tanh", "sigmoid", "erf"}) {
    SCOPED_TRACE(op);
    CheckGradients(1, {kF64x5},
                   [&](RankBuilder& b, const Values& x) { return Values{b.Op(op, x)}; });
  }
  for (const char* op : {"abs", "neg", "relu", "sin", "cos", "exp", "expm1", "tanh", "sigmoid",
                         "erf", "log", "log1p", "sqrt", "rsqrt"}) {
    SCOPED_TRACE(op);
    // Squared, so that the second order by the inputs is not zero.
    CheckGradients(1, {kF64x5}, [&](RankBuilder& b, const Values& x) {
      const ValueIndex y = b.Op(op, {Positive(b, x[0])});
      return Values{b.Op("mul", {y, y})};
    });
  }
  // They are constant between their jumps.
  for (const char* op : {"sign", "floor", "ceil"}) {
    SCOPED_TRACE(op);
    CheckGradients(1, {kF64x5}, [&](RankBuilder& b, const Values& x) {
      return Values{b.Op("mul", {x[0], b.Op("add", {b.Op(op, x), Number(b, 0.5)})})};
    });
  }
  for (const char* op : {"relu_grad", "sigmoid_grad", "tanh_grad"}) {
    SCOPED_TRACE(op);
    CheckGradients(1, {kF64x5, kF64x5},
                   [&](RankBuilder& b, const Values& x) { return Values{b.Op(op, x)}; });
    CheckGradients(1, {kF64x5}, [&](RankBuilder& b, const Values& x) {
      return Values{b.Op("sin", {b.Op(op, {x[0], x[0]})})};
    });
  }
  CheckGradients(1, {kF64x5, kF64x5}, [](RankBuilder& b, const Values& x) {
    return Values{b.Op("pow", {Positive(b, x[0]), x[1]})};
  });
}

// Of sum(g * op(a, b)).
std::vector<std::vector<double>> GradientsAt(const std::string& op, const std::vector<double>& a,
                                             const std::vector<double>& b,
                                             const std::vector<double>& g) {
  const TensorType type(DType::kF64, {static_cast<int64_t>(a.size())});
  testing::RankCase c;
  c.inputs = {testing::FromDoubles(type, a), testing::FromDoubles(type, b)};
  c.grads = {testing::FromDoubles(type, g)};
  const auto results = testing::RunBackward(
      {c}, [&](RankBuilder& builder, const Values& x) { return Values{builder.Op(op, x)}; });
  if (results.empty()) return {{}, {}};
  return {testing::ToDoubles(results[0].gradients[0]), testing::ToDoubles(results[0].gradients[1])};
}

TEST(ElementwiseTest, TheGradientOfMaximumGoesToTheHoldersEvenly) {
  const double nan = std::nan("");
  const double inf = std::numeric_limits<double>::infinity();
  const std::vector<double> a = {1, 2, nan, 3, nan, 0.0, 1};
  const std::vector<double> b = {1, 3, 4, nan, nan, -0.0, 2};
  const std::vector<double> g = {10, 10, 10, 10, 10, 10, inf};
  const auto most = GradientsAt("maximum", a, b, g);
  EXPECT_EQ(most[0], (std::vector<double>{5, 0, 10, 0, 5, 5, 0}));
  EXPECT_EQ(most[1], (std::vector<double>{5, 10, 0, 10, 5, 5, inf}));
  const auto least = GradientsAt("minimum", a, b, g);
  EXPECT_EQ(least[0], (std::vector<double>{5, 10, 10, 0, 5, 5, inf}));
  EXPECT_EQ(least[1], (std::vector<double>{5, 0, 0, 10, 5, 5, 0}));
}

TEST(ElementwiseTest, TheGradientOfPowIsANumberWhereTheBaseIsZero) {
  const auto grads =
      GradientsAt("pow", {0, 0, 0, 0, -2, 3}, {0, 1, 2, 0.5, 3, 0}, {1, 1, 1, 1, 1, 1});
  EXPECT_EQ(grads[0],
            (std::vector<double>{0, 1, 0, std::numeric_limits<double>::infinity(), 12, 0}));
  for (const int i : {0, 1, 2, 3}) EXPECT_EQ(grads[1][i], 0) << i;
  EXPECT_TRUE(std::isnan(grads[1][4]));  // of a negative base there is none
  EXPECT_DOUBLE_EQ(grads[1][5], std::log(3));
  // Nor does a NaN come into the second order.
  testing::RankCase c;
  const TensorType type(DType::kF64, {1});
  c.inputs = {testing::FromDoubles(type, {0})};
  c.grads = {testing::FromDoubles(type, {1})};
  const auto results = testing::RunBackward({c}, [&](RankBuilder& b, const Values& x) {
    return Values{
        b.Op("mul", {b.Op("pow", {x[0], Number(b, 2)}), b.Op("add", {x[0], Number(b, 1)})})};
  });
  ASSERT_EQ(results.size(), 1u);
  EXPECT_EQ(testing::ToDoubles(results[0].gradients[0]), (std::vector<double>{0}));
}

TEST(ElementwiseTest, TheGradientOfPowAtNegativeExponentsIsInfiniteWhereTheBaseIsZero) {
  const double inf = std::numeric_limits<double>::infinity();
  const auto grads = GradientsAt("pow", {0, 0}, {-1, -2}, {1, 3});
  EXPECT_EQ(grads[0], (std::vector<double>{-inf, -inf}));
  EXPECT_EQ(grads[1], (std::vector<double>{-inf, -inf}));
}

TEST(ElementwiseTest, TheGradientOfPowByTheBaseIsZeroWhereTheExponentIs) {
  const double inf = std::numeric_limits<double>::infinity();
  const auto grads = GradientsAt("pow", {0, 1e-320, -1e-320, std::nan(""), inf, 2},
                                 {0, 0, 0, 0, 0, 0}, {1, 1, 1, 1, 1, 1});
  EXPECT_EQ(grads[0], std::vector<double>(6, 0));
}

TEST(ElementwiseTest, TheGradientOfPowIsZeroWhereItIsSaidToBeWhateverComesBack) {
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::nan("");
  const std::vector<double> g = {inf, -inf, nan, inf, -inf, nan};
  const auto at_exponent_zero =
      GradientsAt("pow", {0, 2, -3, nan, inf, 1e-320}, {0, 0, 0, 0, 0, 0}, g);
  EXPECT_EQ(at_exponent_zero[0], std::vector<double>(6, 0));
  const auto at_base_zero = GradientsAt("pow", {0, 0, 0, 0, 0, 0}, {0, 0, 0, 0.5, 1, 3}, g);
  EXPECT_EQ(at_base_zero[1], std::vector<double>(6, 0));
  // Elsewhere it goes through.
  const auto elsewhere = GradientsAt("pow", {2, 2, 2}, {1, -1, 1}, {inf, inf, nan});
  EXPECT_EQ(elsewhere[0][0], inf);
  EXPECT_EQ(elsewhere[0][1], -inf);
  EXPECT_TRUE(std::isnan(elsewhere[0][2]));
  EXPECT_EQ(elsewhere[1][0], inf);
}

// What a half type has no number for on the way has one in f32, where the result has.
TEST(ElementwiseTest, GradientsOfHalfTypesDoNotOverflowOnTheWay) {
  const TensorType type(DType::kF16, {3});
  const auto gradients = [&type](const std::string& op, const std::vector<std::vector<double>>& in,
                                 const std::vector<double>& g) {
    testing::RankCase c;
    for (const std::vector<double>& x : in) c.inputs.push_back(testing::FromDoubles(type, x));
    c.grads = {testing::FromDoubles(type, g)};
    const auto results = testing::RunBackward(
        {c}, [&op](RankBuilder& b, const Values& x) { return Values{b.Op(op, x)}; });
    EXPECT_EQ(results.size(), 1u);
    return testing::ToDoubles(results[0].gradients.back());
  };
  // g / b is 2^17 and 2^18 on the way.
  EXPECT_EQ(gradients("div", {{0, 0x1p-12, 6}, {0x1p-10, 0x1p-8, 2}}, {0x1p7, 0x1p10, 4}),
            (std::vector<double>{0, -0x1p14, -6}));
  // y^3 is 2^18.
  EXPECT_EQ(gradients("rsqrt", {{0x1p-12, 0.25, 1}}, {0x1p-3, 2, 2}),
            (std::vector<double>{-0x1p14, -8, -1}));
  // y log(a) is 340,696.
  EXPECT_EQ(gradients("pow", {{0x1p15, 1, 2}, {1, 1, 1}}, {0x1p-6, 1, 0}),
            (std::vector<double>{5324, 0, 0}));
}

TEST(ElementwiseTest, GradientsOfHalfTypesAreRoundedOnce) {
  const auto gradients = [](const std::string& op, const std::vector<testing::Value>& in,
                            const testing::Value& g) {
    testing::RankCase c;
    c.inputs = in;
    c.grads = {g};
    const auto results = testing::RunBackward(
        {c}, [&op](RankBuilder& b, const Values& x) { return Values{b.Op(op, x)}; });
    EXPECT_EQ(results.size(), 1u);
    return testing::ToDoubles(results[0].gradients[0]);
  };
  const auto f16 = [](const std::vector<double>& x) {
    return testing::FromDoubles(TensorType(DType::kF16, {static_cast<int64_t>(x.size())}), x);
  };
  // Of a: a^(b-1) is 2^18, and 2^-26, which is 0 in f16.
  EXPECT_EQ(gradients("pow", {f16({0x1p-12, 0x1p-13}), f16({-0.5, 3})}, f16({0x1p-3, 0x1p15})),
            (std::vector<double>{-0x1p14, 3 * 0x1p-11}));
  // Of a number: the products are infinite, and 0.
  const testing::Value number = testing::FromDoubles(TensorType(DType::kF16, {}), {2});
  EXPECT_EQ(gradients("mul", {number, f16({300, -300})}, f16({300, 300})),
            (std::vector<double>{0}));
  EXPECT_EQ(gradients("mul", {number, f16(std::vector<double>(1024, 0x1p-12))},
                      f16(std::vector<double>(1024, 0x1p-14))),
            (std::vector<double>{0x1p-16}));
  EXPECT_EQ(gradients("div", {number, f16({0x1p-12, -0x1p-12})}, f16({0x1p5, 0x1p5})),
            (std::vector<double>{0}));
  EXPECT_EQ(gradients("div", {number, f16(std::vector<double>(1024, 0x1p12))},
                      f16(std::vector<double>(1024, 0x1p-14))),
            (std::vector<double>{0x1p-16}));
  // The derivative of tanh at 6, times 2^-10, is 0 in f16.
  const std::vector<double> of_tanh_grad =
      gradients("tanh_grad", {f16({6}), f16({0x1p-10})}, f16({0x1p14}));
  const double tanh = std::tanh(6.0);
  EXPECT_NEAR(of_tanh_grad[0] / (-32 * tanh * (1 - tanh * tanh)), 1, 0x1p-11);
  // x^2 is 10.97, which is not a number of bf16: it would be 11.
  const TensorType bf16(DType::kBF16, {1});
  const double slope = 1.1283791670955126 * std::exp(-3.3125 * 3.3125);
  const std::vector<double> of_erf =
      gradients("erf", {testing::FromDoubles(bf16, {3.3125})}, testing::FromDoubles(bf16, {1}));
  EXPECT_NEAR(of_erf[0] / slope, 1, 0x1p-8);
}

TEST(ElementwiseTest, AZeroDimOperandsGradientIsTheSumOverAllElements) {
  const TensorType scalar(DType::kF64, {});
  for (const char* op : {"add", "sub"}) {
    for (const auto& types :
         {std::vector<TensorType>{kF64x5, scalar}, std::vector<TensorType>{scalar, kF64x5},
          std::vector<TensorType>{scalar, scalar}}) {
      CheckAdjoint(1, types, [&](RankBuilder& b, const Values& x) { return Values{b.Op(op, x)}; });
    }
  }
  for (const char* op : {"add", "sub", "mul", "div", "maximum", "minimum", "relu_grad",
                         "sigmoid_grad", "tanh_grad"}) {
    SCOPED_TRACE(op);
    for (const auto& types :
         {std::vector<TensorType>{kF64x5, scalar}, std::vector<TensorType>{scalar, kF64x5}}) {
      CheckGradients(1, types, [&](RankBuilder& b, const Values& x) {
        // No quotient by a number near 0, whose differences are not near its derivatives.
        const ValueIndex second = std::string(op) == "div" ? Positive(b, x[1]) : x[1];
        const ValueIndex y = b.Op(op, {x[0], second});
        return Values{b.Op("mul", {y, y})};
      });
    }
  }
}

TEST(ElementwiseTest, OneValueUsedTwiceGetsBothGradients) {
  CheckGradients(1, {kF64x5}, [](RankBuilder& b, const Values& x) {
    return Values{b.Op("mul", {x[0], x[0]}), b.Op("sin", {b.Op("add", {x[0], x[0]})})};
  });
}

}  // namespace
}  // namespace chorus
