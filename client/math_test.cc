// The functions of client/functional/math.h, through the reference evaluator.

#include "chorus/functional/math.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "client/testing/fake_daemon.h"
#include "client/testing/values.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using ::testing::ElementsAre;
using testing::FakeDaemon;
using ::testing::HasSubstr;
using testing::Values;
using Bools = std::vector<bool>;

class MathTest : public ::testing::Test {
 protected:
  Tensor Make(const std::vector<double>& values) {
    return FromHost<double>(session_, values, {static_cast<int64_t>(values.size())});
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

}  // namespace
}  // namespace chorus
