#include "chorus/nn/loss.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "chorus/chorus.h"
#include "chorus/functional/math.h"
#include "chorus/functional/nn.h"
#include "client/testing/fake_daemon.h"
#include "client/testing/gradients.h"
#include "client/testing/values.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace nn {
namespace {

using chorus::testing::ExpectGradients;
using chorus::testing::FakeDaemon;
using chorus::testing::Values;
using ::testing::DoubleNear;
using ::testing::HasSubstr;
using ::testing::Pointwise;

using Doubles = std::vector<double>;
using Tensors = std::vector<Tensor>;

auto Near(const Doubles& values) { return Pointwise(DoubleNear(1e-12), values); }

class LossTest : public ::testing::Test {
 protected:
  Tensor F64(const Doubles& values, const Shape& shape) {
    return FromHost<double>(session_, values, shape);
  }
  Tensor I64(const std::vector<int64_t>& values) {
    return FromHost<int64_t>(session_, values, {static_cast<int64_t>(values.size())});
  }

  FakeDaemon daemon_;
  const Session session_ = daemon_.Open();
  const Doubles logits_ = {0.5, -1, 2, 0, 0.25, -0.75, 3, 1, -2};
  const Tensor x_ = F64(logits_, {3, 3});
  const Doubles weights_ = {0.5, 2, 3};

  // log softmax of row r, class c.
  double LogP(size_t r, size_t c) const {
    double sum = 0;
    for (size_t k = 0; k < 3; ++k) sum += std::exp(logits_[3 * r + k]);
    return logits_[3 * r + c] - std::log(sum);
  }
};

TEST_F(LossTest, CrossEntropyIsAMeanOverRowsThatCount) {
  const Tensor labels = I64({2, -100, 1});
  const double a = -LogP(0, 2);
  const double b = -LogP(2, 1);
  EXPECT_THAT(Values<double>(CrossEntropyLoss(x_, labels)), Near({(a + b) / 2}));
  ClassOptions options;
  options.reduce = Reduce::kNone;
  EXPECT_THAT(Values<double>(CrossEntropyLoss(x_, labels, options)), Near({a, 0, b}));
  options.weights = F64(weights_, {3});
  EXPECT_THAT(Values<double>(CrossEntropyLoss(x_, labels, options)), Near({3 * a, 0, 2 * b}));
  options.reduce = Reduce::kMean;
  EXPECT_THAT(Values<double>(CrossEntropyLoss(x_, labels, options)), Near({(3 * a + 2 * b) / 5}));
  EXPECT_THAT(Values<double>(NllLoss(LogSoftmax(x_), labels, options)),
              Near({(3 * a + 2 * b) / 5}));
  options.label_smoothing = 0.3;
  double spread = 0;
  for (const size_t row : {0, 2}) {
    for (size_t c = 0; c < 3; ++c) spread -= weights_[c] * LogP(row, c);
  }
  EXPECT_THAT(Values<double>(CrossEntropyLoss(x_, labels, options)),
              Near({0.7 * (3 * a + 2 * b) / 5 + 0.3 / 3 * spread / 5}));
  EXPECT_TRUE(std::isnan(Values<double>(CrossEntropyLoss(x_, I64({-100, -100, -100})))[0]));
}

TEST_F(LossTest, LabelsMayBeProbabilities) {
  const Tensor labels = F64({1, 0, 0, 0.5, 0.25, 0.25, 0, 0, 1}, {3, 3});
  ClassOptions options;
  options.weights = F64(weights_, {3});
  options.reduce = Reduce::kSum;
  const double expected = -(0.5 * LogP(0, 0) + 0.25 * LogP(1, 0) + 0.5 * LogP(1, 1) +
                            0.75 * LogP(1, 2) + 3 * LogP(2, 2));
  EXPECT_THAT(Values<double>(CrossEntropyLoss(x_, labels, options)), Near({expected}));
  options.reduce = Reduce::kMean;
  EXPECT_THAT(Values<double>(CrossEntropyLoss(x_, labels, options)), Near({expected / 3}));
  // Of labels that are certain it is what their classes give.
  ClassOptions smooth;
  smooth.label_smoothing = 0.2;
  EXPECT_THAT(Values<double>(CrossEntropyLoss(x_, OneHot(I64({1, 0, 2}), 3, DType::kF64), smooth)),
              Near(Values<double>(CrossEntropyLoss(x_, I64({1, 0, 2}), smooth))));
}

TEST_F(LossTest, ClassLossesHaveGradients) {
  const Tensor labels = I64({2, -100, 1});
  ClassOptions options;
  options.weights = F64(weights_, {3});
  options.label_smoothing = 0.3;
  ExpectGradients([&](const Tensors& in) { return CrossEntropyLoss(in[0], labels, options); },
                  {x_});
  options.label_smoothing = 0;
  options.reduce = Reduce::kNone;
  ExpectGradients([&](const Tensors& in) { return NllLoss(in[0], labels, options); },
                  {LogSoftmax(x_).Detach()});
  const Tensor soft = F64({1, 0, 0, 0.5, 0.25, 0.25, 0, 0, 1}, {3, 3});
  ExpectGradients([&](const Tensors& in) { return CrossEntropyLoss(in[0], soft, options); }, {x_});
}

TEST_F(LossTest, DifferencesElementByElement) {
  const Tensor x = F64({1, -2, 0.5, 4}, {4});
  const Tensor y = F64({0, 1, 0.5, 2.5}, {4});
  EXPECT_THAT(Values<double>(MseLoss(x, y, Reduce::kNone)), Near({1, 9, 0, 2.25}));
  EXPECT_THAT(Values<double>(MseLoss(x, y)), Near({12.25 / 4}));
  EXPECT_THAT(Values<double>(L1Loss(x, y, Reduce::kSum)), Near({5.5}));
  EXPECT_THAT(Values<double>(HuberLoss(x, y, 2, Reduce::kNone)), Near({0.5, 4, 0, 1.125}));
  for (const Reduce reduce : {Reduce::kNone, Reduce::kMean}) {
    ExpectGradients([&](const Tensors& in) { return MseLoss(in[0], in[1], reduce); }, {x, y});
    ExpectGradients([&](const Tensors& in) { return HuberLoss(in[0], in[1], 2, reduce); }, {x, y});
  }
  const Tensor apart = F64({5, 5, 5, 5}, {4});
  ExpectGradients([&](const Tensors& in) { return L1Loss(in[0], in[1]); }, {x, apart});
  EXPECT_THAT(std::string(MseLoss(x, x_).status().message()),
              HasSubstr("MseLoss: expected two tensors of one shape, got f64[4] and f64[3,3]"));
}

// A sum of f16 ends at 65,504, and bf16 counts to 256 by ones.
TEST_F(LossTest, MeansOfHalfTypesCountInF32) {
  constexpr int64_t kRows = 8192;
  const Tensor far =
      Cast(Expand(FromHost<double>(session_, {0, 12}, {2}), {kRows, 2}), DType::kF16);
  const Tensor labels = Zeros(session_, DType::kI32, {kRows});
  EXPECT_THAT(Values<double>(Cast(CrossEntropyLoss(far, labels), DType::kF64)), Near({12}));
  EXPECT_THAT(
      Values<double>(Cast(NllLoss(-far, Full(session_, DType::kI32, {kRows}, 1)), DType::kF64)),
      Near({12}));
  constexpr int64_t kCount = 257;
  const Tensor ones = Full(session_, DType::kBF16, {kCount, 1}, 1).RequireGrad();
  ASSERT_TRUE(Backward(NllLoss(ones, Zeros(session_, DType::kI32, {kCount}))).ok());
  const Tensor expected = Cast(Full(session_, DType::kF32, {}, -1.0 / kCount), DType::kBF16);
  EXPECT_THAT(Values<double>(Cast(ones.grad(), DType::kF64)),
              ::testing::Each(Values<double>(Cast(expected, DType::kF64))[0]));
}

// Neither 1 - smoothing nor what comes between is rounded.
TEST_F(LossTest, LossesOfHalfTypesAreRoundedOnce) {
  const auto rounded = [](const Tensor& x, DType half) {
    return Values<double>(Cast(Cast(x, half), DType::kF64));
  };
  for (const DType half : {DType::kF16, DType::kBF16}) {
    SCOPED_TRACE(DTypeName(half));
    const Tensor x = Cast(x_, half);
    ClassOptions options;
    options.reduce = Reduce::kNone;
    options.label_smoothing = 0.1;
    const Tensor labels = I64({2, 0, 1});
    EXPECT_EQ(rounded(CrossEntropyLoss(x, labels, options), half),
              rounded(CrossEntropyLoss(Cast(x, DType::kF32), labels, options), half));
    const Tensor p = Cast(F64({0.75, 0.25, 0, 0, 0.5, 0.5, 1, 0, 0}, {3, 3}), half);
    EXPECT_EQ(rounded(CrossEntropyLoss(x, p, options), half),
              rounded(CrossEntropyLoss(Cast(x, DType::kF32), Cast(p, DType::kF32), options), half));
  }
  for (const DType half : {DType::kF16, DType::kBF16}) {
    SCOPED_TRACE(DTypeName(half));
    const Tensor a = Cast(F64({-1.2, -0.3, 2.5, 0.7}, {4}), half);
    const Tensor b = Cast(F64({0.3, 0.75, 0.1, 0.9}, {4}), half);
    const Tensor weight = Cast(F64({1.7}, {1}), half);
    const std::vector<std::function<Tensor(const Tensor&, const Tensor&, const Tensor&)>> losses = {
        [](const Tensor& x, const Tensor& y, const Tensor&) {
          return MseLoss(x, y, Reduce::kNone);
        },
        [](const Tensor& x, const Tensor& y, const Tensor&) {
          return HuberLoss(x, y, 0.9, Reduce::kNone);
        },
        [](const Tensor& x, const Tensor& y, const Tensor&) {
          return KlDivLoss(x, y, Reduce::kNone);
        },
        [](const Tensor& x, const Tensor& y, const Tensor& w) {
          return BceWithLogitsLoss(x, y, w, Reduce::kNone);
        },
        [](const Tensor& x, const Tensor&, const Tensor&) { return Softplus(x); }};
    for (const auto& loss : losses) {
      EXPECT_EQ(loss(a, b, weight).dtype(), half);
      EXPECT_EQ(rounded(loss(a, b, weight), half),
                rounded(loss(Cast(a, DType::kF32), Cast(b, DType::kF32), Cast(weight, DType::kF32)),
                        half));
    }
  }
  // A square is not halved too late.
  const Tensor x = Cast(F64({300}, {1}), DType::kF16);
  const Tensor y = Cast(F64({0}, {1}), DType::kF16);
  EXPECT_EQ(rounded(HuberLoss(x, y, 1000), DType::kF16), Doubles{44992});
}

TEST_F(LossTest, BceWithLogitsIsRightAtBothEndsAndInTheMiddle) {
  const Tensor x = F64({-800, -1, 0, 2, 800}, {5});
  const Tensor y = F64({0, 1, 0.25, 1, 0}, {5});
  const auto log_sigmoid = [](double v) { return -std::log1p(std::exp(-v)); };
  EXPECT_THAT(Values<double>(BceWithLogitsLoss(x, y, Tensor(), Reduce::kNone)),
              Near({0, -log_sigmoid(-1), std::log(2), -log_sigmoid(2), 800}));
  const Tensor p = F64({3}, {1});
  EXPECT_THAT(Values<double>(BceWithLogitsLoss(x, y, p, Reduce::kNone)),
              Near({0, -3 * log_sigmoid(-1), 1.5 * std::log(2), -3 * log_sigmoid(2), 800}));
  const Tensor inner = F64({-1, 0, 2}, {3});
  const Tensor labels = F64({1, 0.25, 0}, {3});
  ExpectGradients([&](const Tensors& in) { return BceWithLogitsLoss(in[0], in[1], p); },
                  {inner, labels});
  EXPECT_FALSE(BceWithLogitsLoss(x, inner).status().ok());
}

// What is left of a certain logit that is right is small, and no difference of large numbers.
TEST_F(LossTest, BceWithLogitsOfF32IsExactWhereTheLogitIsCertain) {
  for (const double label : {0.0, 1.0}) {
    const Doubles sizes = {10, 15, 20, 40};
    Doubles logits;
    for (const double size : sizes) logits.push_back(label == 1 ? size : -size);
    const Tensor x = Cast(F64(logits, {4}), DType::kF32).Detach().RequireGrad();
    const Tensor y = Cast(F64(Doubles(4, label), {4}), DType::kF32);
    const Tensor loss = BceWithLogitsLoss(x, y, Tensor(), Reduce::kNone);
    ASSERT_TRUE(Backward(Sum(loss)).ok());
    const std::vector<float> losses = Values<float>(loss);
    const std::vector<float> gradients = Values<float>(x.grad());
    for (size_t i = 0; i < sizes.size(); ++i) {
      const double p = 1 / (1 + std::exp(sizes[i]));
      EXPECT_NEAR(losses[i] / std::log1p(std::exp(-sizes[i])), 1, 1e-5) << sizes[i];
      EXPECT_NEAR(gradients[i] / (label == 1 ? -p : p), 1, 1e-5) << sizes[i];
    }
  }
}

TEST_F(LossTest, WhatStandsInAnIgnoredRowHasNoGradientWithSmoothingEither) {
  const double inf = std::numeric_limits<double>::infinity();
  ClassOptions smooth;
  smooth.label_smoothing = 0.1;
  const Tensor x = F64({1, 2, inf, 0, std::nan(""), 1, -inf, -inf}, {4, 2}).RequireGrad();
  const Tensor loss = CrossEntropyLoss(x, I64({0, -100, -100, -100}), smooth);
  ASSERT_TRUE(Backward(loss).ok());
  const Tensor one = F64({1, 2}, {1, 2}).RequireGrad();
  const Tensor alone = CrossEntropyLoss(one, I64({0}), smooth);
  ASSERT_TRUE(Backward(alone).ok());
  EXPECT_THAT(Values<double>(loss), Near(Values<double>(alone)));
  Doubles wanted = Values<double>(one.grad());
  wanted.resize(8, 0);
  EXPECT_THAT(Values<double>(x.grad()), Near(wanted));
}

TEST_F(LossTest, KlDivergenceOfNothingIsNothing) {
  const Tensor x = F64({-1, -2, -0.5}, {3});
  const Tensor y = F64({0.25, 0, 0.75}, {3});
  const double a = 0.25 * (std::log(0.25) + 1);
  const double c = 0.75 * (std::log(0.75) + 0.5);
  EXPECT_THAT(Values<double>(KlDivLoss(x, y, Reduce::kNone)), Near({a, 0, c}));
  EXPECT_THAT(Values<double>(KlDivLoss(x, y)), Near({(a + c) / 3}));
  const Tensor leaf = F64({0.25, 0, 0.75}, {3}).RequireGrad();
  ASSERT_TRUE(Backward(KlDivLoss(x, leaf, Reduce::kSum)).ok());
  EXPECT_THAT(Values<double>(leaf.grad()),
              Near({std::log(0.25) + 1 + 1, 0, std::log(0.75) + 1 + 0.5}));
  ExpectGradients([](const Tensors& in) { return KlDivLoss(in[0], in[1]); },
                  {x, F64({0.25, 0.5, 0.75}, {3})});

  // Of scores that are masked on both sides.
  const double inf = std::numeric_limits<double>::infinity();
  const Tensor scores = F64({1, -inf, 0.5}, {3}).RequireGrad();
  const Tensor others = F64({0.25, -inf, 2}, {3}).RequireGrad();
  const Tensor loss = KlDivLoss(LogSoftmax(others), Softmax(scores), Reduce::kSum);
  ASSERT_TRUE(Backward(loss).ok());
  const Tensor some = F64({1, 0.5}, {2}).RequireGrad();
  const Tensor some_others = F64({0.25, 2}, {2}).RequireGrad();
  const Tensor expected = KlDivLoss(LogSoftmax(some_others), Softmax(some), Reduce::kSum);
  ASSERT_TRUE(Backward(expected).ok());
  EXPECT_THAT(Values<double>(loss), Near(Values<double>(expected)));
  const auto with_gap = [](const Doubles& two) { return Doubles{two[0], 0, two[1]}; };
  EXPECT_THAT(Values<double>(scores.grad()), Near(with_gap(Values<double>(some.grad()))));
  EXPECT_THAT(Values<double>(others.grad()), Near(with_gap(Values<double>(some_others.grad()))));
}

// What it means at the ends of the numbers, as PyTorch has it.
TEST_F(LossTest, InfinitiesAndNaNsAreNotHidden) {
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::nan("");
  const auto value_and_gradient = [this](const Doubles& values, const auto& loss) {
    const Tensor x = F64(values, {static_cast<int64_t>(values.size())}).RequireGrad();
    const Tensor y = loss(x);
    EXPECT_TRUE(Backward(Sum(y)).ok());
    return std::make_pair(Values<double>(y), Values<double>(x.grad()));
  };
  const auto [huber, slopes] = value_and_gradient({inf, -inf, nan, 0.5}, [&](const Tensor& x) {
    return HuberLoss(x, F64({0, 0, 0, 0}, {4}), 2, Reduce::kNone);
  });
  EXPECT_EQ(huber[0], inf);
  EXPECT_EQ(huber[1], inf);
  EXPECT_TRUE(std::isnan(huber[2]) && std::isnan(slopes[2]));
  EXPECT_EQ(slopes[0], 2);
  EXPECT_EQ(slopes[1], -2);
  EXPECT_EQ(slopes[3], 0.5);

  const auto [softplus, sigmoids] =
      value_and_gradient({inf, -inf, nan}, [](const Tensor& x) { return Softplus(x); });
  EXPECT_EQ(softplus[0], inf);
  EXPECT_EQ(softplus[1], 0);
  EXPECT_TRUE(std::isnan(softplus[2]) && std::isnan(sigmoids[2]));
  EXPECT_EQ(sigmoids[0], 1);
  EXPECT_EQ(sigmoids[1], 0);

  const Doubles divergence =
      Values<double>(KlDivLoss(F64({-1, -1, -inf}, {3}), F64({nan, -0.5, 0}, {3}), Reduce::kNone));
  EXPECT_TRUE(std::isnan(divergence[0]));
  EXPECT_TRUE(std::isnan(divergence[1]));
  EXPECT_EQ(divergence[2], 0);
}

// Labels to ignore that no double is.
TEST_F(LossTest, AnyLabelMayBeIgnored) {
  ClassOptions options;
  for (const int64_t ignored : {std::numeric_limits<int64_t>::max(),
                                -std::numeric_limits<int64_t>::max(), (int64_t{1} << 53) + 1}) {
    SCOPED_TRACE(ignored);
    options.ignored = ignored;
    const Tensor two = Slice(x_, 0, 0, 2);
    const double row = Values<double>(CrossEntropyLoss(Slice(x_, 0, 0, 1), I64({1})))[0];
    for (const auto& loss : {CrossEntropyLoss, NllLoss}) {
      const Tensor scores = loss == CrossEntropyLoss ? two : LogSoftmax(two);
      EXPECT_NEAR(Values<double>(loss(scores, I64({1, ignored}), options, CallSite::Here()))[0],
                  row, 1e-12);
    }
  }
}

TEST_F(LossTest, WhatDoesNotFitIsRefused) {
  for (const double delta : {0.0, -1.0, 1e39, 1e-50, std::nan("")}) {
    EXPECT_THAT(std::string(HuberLoss(x_, x_, delta).status().message()),
                HasSubstr("HuberLoss: expected a delta above 0"));
  }
  ClassOptions options;
  options.weights = F64({1, 2}, {2});
  EXPECT_THAT(std::string(CrossEntropyLoss(x_, I64({0, 1, 2}), options).status().message()),
              HasSubstr("expected a weight for each of 3 classes, got f64[2]"));
  EXPECT_THAT(std::string(CrossEntropyLoss(x_, I64({0, 1})).status().message()),
              HasSubstr("got i64[2] for f64[3,3]"));
  ClassOptions smooth;
  smooth.label_smoothing = 1.5;
  EXPECT_FALSE(CrossEntropyLoss(x_, I64({0, 1, 2}), smooth).status().ok());
  smooth.label_smoothing = 0.5;
  EXPECT_FALSE(NllLoss(x_, I64({0, 1, 2}), smooth).status().ok());
  EXPECT_FALSE(NllLoss(x_, x_).status().ok());
  // A weight that would stretch the loss, and not itself.
  for (const Shape& shape : {Shape{3, 1, 1}, Shape{2, 3, 3}, Shape{0}, Shape{2}}) {
    const Tensor weight = Full(session_, DType::kF64, shape, 1);
    EXPECT_THAT(std::string(BceWithLogitsLoss(x_, x_, weight).status().message()),
                HasSubstr("expected a positive_weight that stretches to f64[3,3], got f64["));
  }
  const Tensor refused = MseLoss(x_, I64({1}));
  EXPECT_EQ(ErrorOf(refused.status()).reason, Reason::kBadType);
  EXPECT_THAT(ErrorOf(refused.status()).source, HasSubstr("loss_test.cc"));
}

}  // namespace
}  // namespace nn
}  // namespace chorus
