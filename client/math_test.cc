// The functions of client/functional/math.h, through the reference evaluator.

#include "chorus/functional/math.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "chorus/functional/shape.h"
#include "client/testing/fake_daemon.h"
#include "client/testing/gradients.h"
#include "client/testing/values.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using ::testing::DoubleNear;
using ::testing::Each;
using ::testing::ElementsAre;
using testing::ExpectGradients;
using testing::FakeDaemon;
using ::testing::HasSubstr;
using ::testing::IsNan;
using testing::Values;
using Bools = std::vector<bool>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class MathTest : public ::testing::Test {
 protected:
  Tensor Make(const std::vector<double>& values) {
    return FromHost<double>(session_, values, {static_cast<int64_t>(values.size())});
  }

  // INVALID_ARGUMENT, in these words, with a line of this file.
  static void Refused(const Tensor& x, const char* text) {
    EXPECT_EQ(ErrorOf(x.status()).reason, Reason::kBadType) << x.status();
    EXPECT_THAT(std::string(x.status().message()), HasSubstr(text));
    EXPECT_THAT(ErrorOf(x.status()).source, HasSubstr("math_test.cc:"));
  }

  FakeDaemon daemon_;
  Session session_ = daemon_.Open();
};

TEST_F(MathTest, FunctionsAreTheirNames) {
  const Tensor x = Make({0.25, 2.5});
  const struct {
    Tensor y;
    double (*f)(double);
  } cases[] = {
      {Abs(-x), [](double v) { return v; }},
      {Ceil(x), [](double v) { return std::ceil(v); }},
      {Erf(x), [](double v) { return std::erf(v); }},
      {Exp(x), [](double v) { return std::exp(v); }},
      {Expm1(x), [](double v) { return std::expm1(v); }},
      {Floor(x), [](double v) { return std::floor(v); }},
      {Log(x), [](double v) { return std::log(v); }},
      {Log1p(x), [](double v) { return std::log1p(v); }},
      {Rsqrt(x), [](double v) { return 1 / std::sqrt(v); }},
      {Sigmoid(x), [](double v) { return 1 / (1 + std::exp(-v)); }},
      {Sign(-x), [](double) { return -1.0; }},
      {Sqrt(x), [](double v) { return std::sqrt(v); }},
      {Tanh(x), [](double v) { return std::tanh(v); }},
      {x / 2, [](double v) { return v / 2; }},
      {3 / x, [](double v) { return 3 / v; }},
      {Div(x, x + 1), [](double v) { return v / (v + 1); }},
      {Pow(x, 3), [](double v) { return std::pow(v, 3); }},
      {Pow(2, x), [](double v) { return std::pow(2, v); }},
      {Maximum(x, 1), [](double v) { return v > 1 ? v : 1; }},
      {Minimum(x, 1), [](double v) { return v < 1 ? v : 1; }},
  };
  for (size_t i = 0; i < std::size(cases); ++i) {
    const std::vector<double> y = Values<double>(cases[i].y);
    ASSERT_EQ(y.size(), 2u) << i;
    EXPECT_DOUBLE_EQ(y[0], cases[i].f(0.25)) << i;
    EXPECT_DOUBLE_EQ(y[1], cases[i].f(2.5)) << i;
  }
}

TEST_F(MathTest, ComparisonsGiveBools) {
  const Tensor x = Make({1, 2, 3});
  EXPECT_EQ(Values<bool>(x < 2), (Bools{true, false, false}));
  EXPECT_EQ(Values<bool>(x <= 2), (Bools{true, true, false}));
  EXPECT_EQ(Values<bool>(x > 2), (Bools{false, false, true}));
  EXPECT_EQ(Values<bool>(2 >= x), (Bools{true, true, false}));
  EXPECT_EQ(Values<bool>(Equal(x, 2)), (Bools{false, true, false}));
  EXPECT_EQ(Values<bool>(NotEqual(x, Make({1, 0, 3}))), (Bools{false, true, false}));
  EXPECT_EQ(Values<bool>(LogicalAnd(x > 1, x < 3)), (Bools{false, true, false}));
  EXPECT_EQ(Values<bool>(LogicalOr(x<2, x> 2)), (Bools{true, false, true}));
  EXPECT_EQ(Values<bool>(LogicalXor(x<3, x> 1)), (Bools{true, false, true}));
  EXPECT_EQ(Values<bool>(LogicalNot(x < 3)), (Bools{false, false, true}));
}

TEST_F(MathTest, WhereBroadcastsAndSelects) {
  const Tensor x = Make({-1, 4, 9}).RequireGrad();
  const Tensor y = Where(x > 0, Sqrt(Maximum(x, 1e-9)), 0);
  EXPECT_THAT(Values<double>(y), ElementsAre(0, 2, 3));
  ASSERT_TRUE(Backward(Sum(y)).ok());
  EXPECT_THAT(Values<double>(x.grad()), ElementsAre(0, 0.25, 1.0 / 6));
  const Tensor column = FromHost<double>(session_, {1, -1}, {2, 1});
  EXPECT_THAT(Values<double>(Where(column > 0, x.Detach(), column)),
              ElementsAre(-1, 4, 9, -1, -1, -1));
  EXPECT_THAT(
      std::string(Where(x > 0, Make({1, 2}), x).status().message()),
      HasSubstr("where: expected shapes that broadcast, got bool[3] and f64[2] and f64[3]"));
  EXPECT_FALSE(Where(x > 0, 1, 2).status().ok()) << "of which dtype?";
}

// b a^(b - 1) is 0 at b = 0; its derivative by b is 1 / a.
TEST_F(MathTest, PowHasGradientsOfGradientsAtExponentZero) {
  ExpectGradients([](const std::vector<Tensor>& in) { return Pow(in[0], in[1]); },
                  {Make({0.5, 2, 3}), Make({0, 0, 1})});
}

TEST_F(MathTest, ClampTakesTheBoundThatIsPassed) {
  const double nan = std::nan("");
  EXPECT_THAT(Values<double>(Clamp(Make({-2, 0, 5}), -1, 3)), ElementsAre(-1, 0, 3));
  EXPECT_THAT(Values<double>(ClampMin(Make({-2, 0, 5}), 1)), ElementsAre(1, 1, 5));
  EXPECT_THAT(Values<double>(ClampMax(Make({-2, 0, 5}), 1)), ElementsAre(-2, 0, 1));
  EXPECT_THAT(Values<double>(Clamp(Make({-2, 0, 5}), 3, 1)), ElementsAre(1, 1, 1));
  EXPECT_TRUE(std::isnan(Values<double>(Clamp(Make({nan}), 0, 1))[0]));
  EXPECT_THAT(Values<double>(Clamp(Make({-2, 0, 5}), Make({-3, 1, 1}), 2)), ElementsAre(-2, 1, 2));
  for (const Operand& bound : {Operand(nan), Operand(Make({nan})), Operand(Make({nan, nan}))}) {
    EXPECT_THAT(Values<double>(ClampMin(Make({-2, 5}), bound)), Each(IsNan()));
    EXPECT_THAT(Values<double>(ClampMax(Make({-2, 5}), bound)), Each(IsNan()));
    EXPECT_THAT(Values<double>(Clamp(Make({-2, 5}), bound, 3)), Each(IsNan()));
  }
  const Tensor column = FromHost<double>(session_, {0, 4}, {2, 1});
  EXPECT_THAT(Values<double>(ClampMin(Make({-2, 2, 5}), column)), ElementsAre(0, 2, 5, 4, 4, 5));
  const Tensor whole = FromHost<int32_t>(session_, {-2, 7}, {2});
  EXPECT_THAT(Values<int32_t>(Clamp(whole, 0, 3)), ElementsAre(0, 3));
  EXPECT_EQ(Clamp(Make({}), 0, 1).shape(), Shape({0}));
  // At a bound the gradient is x's.
  const Tensor x = Make({-2, -1, 0, 3, 4}).RequireGrad();
  const Tensor low = FromHost<double>(session_, {-1}, {}).RequireGrad();
  ASSERT_TRUE(Backward(Sum(Clamp(x, low, 3) * Make({1, 2, 3, 4, 5}))).ok());
  EXPECT_THAT(Values<double>(x.grad()), ElementsAre(0, 2, 3, 4, 0));
  EXPECT_THAT(Values<double>(low.grad()), ElementsAre(1));
  Refused(Clamp(x, Make({1, 2}), 3),
          "ClampMin: lt: expected shapes that broadcast, got f64[5] and f64[2]");
  Refused(Clamp(whole, 0, 0.5), "ClampMax: expected a whole number that i32 has, got 0.5");
  Refused(Clamp(Tensor(), 0, 1), "expected a tensor, got an undefined one");
  const Tensor bad = Reshape(x, {3});
  EXPECT_EQ(Clamp(x, 0, bad).status(), bad.status());
  ExpectGradients(session_, {{{-2, 0.5, 5}, {3}}, {{-1}, {}}}, [](const std::vector<Tensor>& in) {
    return Clamp(in[0] * in[0], in[1], 3) * in[0] * in[1];
  });
}

TEST_F(MathTest, CastConvertsThereAndItsGradientBack) {
  const Tensor x = Make({-1.75, 2.5}).RequireGrad();
  EXPECT_THAT(Values<int32_t>(Cast(x, DType::kI32)), ElementsAre(-1, 2));
  EXPECT_EQ(Values<bool>(Cast(x, DType::kBool)), (Bools{true, true}));
  const Tensor y = Cast(x, DType::kF32);
  ASSERT_TRUE(Backward(Sum(y * y)).ok());
  EXPECT_EQ(x.grad().dtype(), DType::kF64);
  EXPECT_THAT(Values<double>(x.grad()), ElementsAre(-3.5, 5));
  EXPECT_FALSE(Cast(x, DType::kI32).requires_grad());
}

// A double has none of them from 2^53 on but every other one, or fewer.
TEST_F(MathTest, WholeNumbersAreExact) {
  constexpr int64_t kBig = (int64_t{1} << 53) + 1;
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const auto make = [this](const std::vector<int64_t>& values) {
    return FromHost<int64_t>(session_, values, {static_cast<int64_t>(values.size())});
  };
  EXPECT_THAT(Values<bool>(Equal(make({kBig, kBig - 1}), kBig)), ElementsAre(true, false));
  EXPECT_THAT(Values<int64_t>(make({kMost}) - (kMost - 2)), ElementsAre(2));
  EXPECT_THAT(Values<int64_t>(Full(session_, DType::kI64, {1}, kBig)), ElementsAre(kBig));
  EXPECT_THAT(Values<int64_t>(Pad(make({1}), {{1, 1}}, kBig)), ElementsAre(kBig, 1, kBig));
  EXPECT_THAT(Values<int64_t>(Arange(session_, DType::kI64, kBig, kBig + 5, 2)),
              ElementsAre(kBig, kBig + 2, kBig + 4));
  EXPECT_THAT(Values<int64_t>(Arange(session_, DType::kI64, kMost - 2, kMost)),
              ElementsAre(kMost - 2, kMost - 1));
  EXPECT_THAT(Values<int64_t>(Arange(session_, DType::kI64, 3, -kMost, -kMost)),
              ElementsAre(3, 3 - kMost));
  EXPECT_THAT(Values<int64_t>(Arange(session_, DType::kI64, 3, -4, 2)), ElementsAre());
  // Of a floating-point tensor they are rounded once.
  EXPECT_THAT(Values<double>(Make({1}) * kBig), ElementsAre(0x1p53));
  Refused(make({1}) + (uint64_t{1} << 63), "expected a whole number that i64 has, got 9.2");
  Refused(make({1}) + 0x1p63, "expected a whole number that i64 has, got 9.2");
}

TEST_F(MathTest, AnotherNumberIsNoOtherGraph) {
  const Tensor x = Make({1, 2});
  for (int i = 1; i < 5; ++i) EXPECT_THAT(Values<double>(x / i), ElementsAre(1.0 / i, 2.0 / i));
  EXPECT_EQ(daemon_.counts().registered, 1);
}

TEST_F(MathTest, ReductionsOverAxes) {
  const Tensor x = FromHost<double>(session_, {1, 2, 3, 4, 5, 9}, {2, 3}).RequireGrad();
  EXPECT_THAT(Values<double>(Mean(x)), ElementsAre(4));
  EXPECT_THAT(Values<double>(Mean(x, {-1})), ElementsAre(2, 6));
  EXPECT_THAT(Values<double>(Sum(x, {0})), ElementsAre(5, 7, 12));
  EXPECT_THAT(Values<double>(Sum(x, {1, 0})), ElementsAre(24));
  EXPECT_THAT(Values<double>(Max(x)), ElementsAre(9));
  EXPECT_THAT(Values<double>(Max(x, {0})), ElementsAre(4, 5, 9));
  EXPECT_THAT(Values<double>(Min(x, {1})), ElementsAre(1, 4));
  EXPECT_THAT(Values<double>(Product(x, {1})), ElementsAre(6, 180));
  EXPECT_EQ(Max(x, {0}, /*keep_dims=*/true).shape(), (Shape{1, 3}));
  EXPECT_EQ(Max(x, Axes(), /*keep_dims=*/true).shape(), (Shape{1, 1}));
  EXPECT_EQ(Mean(x, std::vector<int64_t>()).shape(), (Shape{2, 3}));
  EXPECT_FALSE(Min(x, {2}).status().ok());
  ASSERT_TRUE(Backward(Mean(x) + Max(x) + Sum(Product(x, {1}))).ok());
  const double m = 1.0 / 6;
  EXPECT_THAT(Values<double>(x.grad()), ElementsAre(6 + m, 3 + m, 2 + m, 45 + m, 36 + m, 21 + m));
}

TEST_F(MathTest, NormsOverAxes) {
  const Tensor x = FromHost<double>(session_, {3, -4, 0, 0, 5, -12}, {3, 2});
  EXPECT_THAT(Values<double>(Norm(x, 2, 1)), ElementsAre(5, 0, 13));
  EXPECT_THAT(Values<double>(Norm(x, 1, {-1})), ElementsAre(7, 0, 17));
  EXPECT_THAT(Values<double>(Norm(x, kInfinity, 1)), ElementsAre(4, 0, 12));
  EXPECT_THAT(Values<double>(Norm(x)), ElementsAre(std::sqrt(194)));
  EXPECT_EQ(Norm(x, 2, 1, /*keep_dims=*/true).shape(), Shape({3, 1}));
  EXPECT_THAT(Values<double>(Norm(Make({-3}))), ElementsAre(3));
  EXPECT_THAT(Values<double>(Norm(FromHost<double>(session_, {-3}, {}))), ElementsAre(3));
  for (const double p : {1.0, 2.0, kInfinity}) {
    EXPECT_THAT(Values<double>(Norm(Make({}), p)), ElementsAre(0)) << p;
    EXPECT_EQ(Norm(FromHost<double>(session_, {}, {0, 3}), p, 1).shape(), Shape({0}));
    EXPECT_TRUE(std::isnan(Values<double>(Norm(Make({1, std::nan("")}), p))[0])) << p;
    ExpectGradients(session_, {{{3, -4, 1, 2, 0.5, -1}, {3, 2}}},
                    [p](const std::vector<Tensor>& in) { return Norm(in[0] * in[0], p, 0); });
  }
  // Squares of half types are beyond them.
  const Tensor half = Cast(Make({300, 400}), DType::kF16);
  EXPECT_EQ(Norm(half).dtype(), DType::kF16);
  EXPECT_EQ(static_cast<float>(Values<F16>(Norm(half))[0]), 500);
  Refused(Norm(x, 3), "Norm: expected p of 1, 2 or infinity, got 3");
  Refused(Norm(x, 2, 2), "Norm: expected an axis from -2 to 1 of f64[3,2], got 2");
  Refused(Norm(Cast(x, DType::kI32)), "Norm: expected a floating-point tensor, got i32[3,2]");
  Refused(Norm(Tensor()), "Norm: expected a tensor");
}

// As PyTorch's: of both orders, and beside others that are not 0.
TEST_F(MathTest, TheGradientOfARootAtZeroIsZero) {
  BackwardOptions create;
  create.create_graph = true;
  const auto gradients = [&](const Tensor& x, const Tensor& y) {
    const auto first = Grad({Sum(y)}, {x}, create);
    EXPECT_TRUE(first.ok()) << first.status();
    const auto second = Grad({Sum((*first)[0] * Make({1, 2}))}, {x});
    EXPECT_TRUE(second.ok()) << second.status();
    return std::vector<std::vector<double>>{Values<double>((*first)[0]),
                                            Values<double>((*second)[0])};
  };
  const Tensor x = FromHost<double>(session_, {0, 0, 3, 4}, {2, 2}).RequireGrad();
  EXPECT_THAT(gradients(x, Norm(x, 2, 1))[0],
              ElementsAre(0, 0, DoubleNear(0.6, 1e-12), DoubleNear(0.8, 1e-12)));
  // d/dx_i of x_j / |x| is ([i = j] - x_i x_j / |x|^2) / |x|.
  const std::vector<double> second = gradients(x, Norm(x, 2, 1))[1];
  ASSERT_EQ(second.size(), 4u);
  EXPECT_EQ(second[0], 0);
  EXPECT_EQ(second[1], 0);
  EXPECT_NEAR(second[2], (1 - 0.36 - 2 * 0.48) / 5, 1e-12);
  EXPECT_NEAR(second[3], (2 - 2 * 0.64 - 0.48) / 5, 1e-12);
  const Tensor alike = Make({7, 7}).RequireGrad();
  EXPECT_THAT(gradients(alike, Std(alike))[0], ElementsAre(0, 0));
  EXPECT_THAT(gradients(alike, Std(alike))[1], ElementsAre(0, 0));
}

TEST_F(MathTest, LogSumExpDoesNotOverflow) {
  EXPECT_THAT(Values<double>(LogSumExp(Make({1000, 1000}))), ElementsAre(1000 + std::log(2)));
  EXPECT_THAT(Values<double>(LogSumExp(Make({-1000, -1000}))), ElementsAre(-1000 + std::log(2)));
  const Tensor x = FromHost<double>(session_, {0, std::log(3), 5, 5}, {2, 2});
  EXPECT_THAT(Values<double>(LogSumExp(x, 1)),
              ElementsAre(DoubleNear(std::log(4), 1e-12), DoubleNear(5 + std::log(2), 1e-12)));
  EXPECT_EQ(LogSumExp(x, 0, /*keep_dims=*/true).shape(), Shape({1, 2}));
  EXPECT_EQ(LogSumExp(x, Axes(), /*keep_dims=*/true).shape(), Shape({1, 1}));
  EXPECT_THAT(Values<double>(LogSumExp(Make({-kInfinity, 2}))), ElementsAre(2));
  EXPECT_THAT(Values<double>(LogSumExp(Make({-kInfinity, -kInfinity}))), ElementsAre(-kInfinity));
  EXPECT_THAT(Values<double>(LogSumExp(Make({1, kInfinity}))), ElementsAre(kInfinity));
  EXPECT_TRUE(std::isnan(Values<double>(LogSumExp(Make({1, std::nan("")})))[0]));
  EXPECT_THAT(Values<double>(LogSumExp(Make({}))), ElementsAre(-kInfinity));
  EXPECT_EQ(LogSumExp(FromHost<double>(session_, {}, {0, 3}), 1).shape(), Shape({0}));
  EXPECT_THAT(Values<double>(LogSumExp(FromHost<double>(session_, {4}, {}))), ElementsAre(4));
  const Tensor half = Cast(Make({1, 2}), DType::kBF16);
  EXPECT_EQ(LogSumExp(half).dtype(), DType::kBF16);
  for (const Axes& axes : {Axes(), Axes(0), Axes(1)}) {
    ExpectGradients(
        session_, {{{0.5, -1, 2, 0.25, 1, -0.5}, {2, 3}}},
        [&axes](const std::vector<Tensor>& in) { return LogSumExp(in[0] * in[0], axes); });
  }
  Refused(LogSumExp(Cast(x, DType::kI32)), "LogSumExp: expected a floating-point tensor");
  Refused(LogSumExp(x, 3), "LogSumExp: expected an axis");
  Refused(LogSumExp(Tensor()), "LogSumExp: expected a tensor");
}

TEST_F(MathTest, VarianceBothWays) {
  const Tensor x = FromHost<double>(session_, {1, 2, 6, 4, 4, 10}, {2, 3});
  EXPECT_THAT(Values<double>(Var(x, 1)), ElementsAre(7, 12));
  EXPECT_THAT(Values<double>(Var(x, 0)), ElementsAre(4.5, 2, 8));
  EXPECT_THAT(Values<double>(Var(x, 1, false, /*unbiased=*/false)),
              ElementsAre(DoubleNear(14.0 / 3, 1e-12), 8));
  EXPECT_THAT(Values<double>(Std(x, 1, true)), ElementsAre(std::sqrt(7), std::sqrt(12)));
  EXPECT_EQ(Std(x, 1, /*keep_dims=*/true).shape(), Shape({2, 1}));
  EXPECT_THAT(Values<double>(Var(Make({1e9 + 1, 1e9 + 2, 1e9 + 3}))), ElementsAre(1));
  EXPECT_TRUE(std::isnan(Values<double>(Var(Make({3})))[0]));
  EXPECT_THAT(Values<double>(Var(Make({3}), Axes(), false, false)), ElementsAre(0));
  for (const bool unbiased : {false, true}) {
    EXPECT_TRUE(std::isnan(Values<double>(Var(Make({}), Axes(), false, unbiased))[0]));
    for (const Axes& axes : {Axes(), Axes(0), Axes({-1})}) {
      ExpectGradients(
          session_, {{{0.5, -1, 2, 0.25, 1, -0.5}, {2, 3}}}, [&](const std::vector<Tensor>& in) {
            return Var(in[0] * in[0], axes, false, unbiased) + Std(in[0], axes, false, unbiased);
          });
    }
  }
  EXPECT_EQ(Std(Cast(x, DType::kF16)).dtype(), DType::kF16);
  EXPECT_EQ(
      static_cast<float>(Values<F16>(Var(Cast(Make({0, 600, 600, 0}), DType::kF16) * 0.5))[0]),
      30000);
  // A batch of any size has its mean, and what is made of it.
  CompileOptions options;
  options.varying = {0};
  options.max_size = 8;
  const Compiled f = Compile(
      [](const std::vector<Tensor>& in) {
        return std::vector<Tensor>{Var(in[0], 0, false, /*unbiased=*/false)};
      },
      options);
  EXPECT_THAT(Values<double>((*f.Run({Make({1, 3})}))[0]), ElementsAre(1));
  EXPECT_THAT(Values<double>((*f.Run({Make({1, 3, 5, 7})}))[0]), ElementsAre(5));
  Refused(Var(Cast(x, DType::kI32)), "Var: expected a floating-point tensor, got i32[2,3]");
  Refused(Std(x, 2), "Std: expected an axis from -2 to 1 of f64[2,3], got 2");
  Refused(Std(Tensor()), "Std: expected a tensor");
}

TEST_F(MathTest, CumSumAddsUpFromEitherEnd) {
  const Tensor x = FromHost<double>(session_, {1, 2, 3, 4, 5, 9}, {2, 3}).RequireGrad();
  EXPECT_THAT(Values<double>(CumSum(x)), ElementsAre(1, 3, 6, 4, 9, 18));
  EXPECT_THAT(Values<double>(CumSum(x, 0)), ElementsAre(1, 2, 3, 5, 7, 12));
  EXPECT_THAT(Values<double>(CumSum(x, 1, /*reverse=*/true)), ElementsAre(6, 5, 3, 18, 14, 9));
  EXPECT_THAT(std::string(CumSum(x, 2).status().message()),
              HasSubstr("cum_sum: expected an axis from -2 to 1 of f64[2,3], got 2"));
  ASSERT_TRUE(Backward(Sum(CumSum(x) * Make({1, 10, 100}))).ok());
  EXPECT_THAT(Values<double>(x.grad()), ElementsAre(111, 110, 100, 111, 110, 100));
}

TEST_F(MathTest, RandomNumbersAreFunctionsOfSeedAndOffset) {
  const auto draw = [&](const RandomNumber& seed, const RandomNumber& offset) {
    return Values<float>(RandomUniform(session_, DType::kF32, {5}, seed, offset));
  };
  const std::vector<float> first = draw(1, 2);
  for (const float x : first) EXPECT_TRUE(x >= 0 && x < 1) << x;
  EXPECT_EQ(draw(1, 2), first);
  EXPECT_NE(draw(2, 2), first);
  EXPECT_NE(draw(1, 3), first);
  const Tensor seed = FromHost<int64_t>(session_, {1}, {});
  const Tensor offset = FromHost<int64_t>(session_, {2}, {});
  EXPECT_EQ(draw(seed, offset), first);
  EXPECT_EQ(draw(seed, 2), first);
  const int64_t large = (int64_t{1} << 62) + 1;
  EXPECT_NE(draw(large, 0), draw(large - 1, 0)) << "no double in between";
  EXPECT_EQ(Values<int64_t>(RandomBits(session_, DType::kI64, {3}, 1)).size(), 3u);
  EXPECT_EQ(RandomNormal(session_, DType::kF64, {2, 2}, 1).shape(), (Shape{2, 2}));
  EXPECT_FALSE(RandomBits(session_, DType::kF32, {3}, 1).status().ok());
  EXPECT_FALSE(RandomBits(session_, DType::kI32, {3}, Tensor()).status().ok()) << "no seed";
}

TEST_F(MathTest, RandomNumbersAreTheSameWhereverSeedAndOffsetStand) {
  const Session session = daemon_.Open(2);
  const std::vector<float> expected = Values<float>(RandomUniform(session, DType::kF32, {5}, 1, 2));
  for (const int seed_at : {0, 1}) {
    for (const int offset_at : {0, 1}) {
      const Tensor drawn = RandomUniform(session.device(1), DType::kF32, {5},
                                         Scalar<int64_t>(session.device(seed_at), 1),
                                         Scalar<int64_t>(session.device(offset_at), 2));
      ASSERT_TRUE(drawn.status().ok()) << drawn.status();
      EXPECT_EQ(drawn.device().slot(), 1);
      EXPECT_EQ(Values<float>(drawn), expected);
    }
  }
  Refused(RandomUniform(session.device(1), DType::kF32, {5}, Scalar<int64_t>(session_, 1)),
          "one of another");
}

}  // namespace
}  // namespace chorus
