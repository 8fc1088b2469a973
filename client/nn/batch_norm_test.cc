#include "chorus/nn/batch_norm.h"

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "chorus/chorus.h"
#include "chorus/functional/math.h"
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
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pointwise;

using Doubles = std::vector<double>;

auto Near(const Doubles& values) { return Pointwise(DoubleNear(1e-12), values); }

// Of a channel of [n, channels, inner].
struct Statistics {
  Statistics(const Doubles& x, int64_t n, int64_t channels, int64_t inner, int64_t channel) {
    const double count = static_cast<double>(n * inner);
    const auto for_each = [&](const auto& f) {
      for (int64_t i = 0; i < n * inner; ++i) {
        f(x[static_cast<size_t>((i / inner * channels + channel) * inner + i % inner)]);
      }
    };
    for_each([&](double value) { mean += value / count; });
    for_each([&](double value) { variance += (value - mean) * (value - mean) / count; });
    unbiased = variance * count / (count - 1);
  }
  double mean = 0;
  double variance = 0;
  double unbiased = 0;
};

class BatchNormTest : public ::testing::Test {
 protected:
  Tensor Numbers(const Shape& shape, int seed = 0) {
    return chorus::testing::Numbers(session_, shape, seed);
  }

  FakeDaemon daemon_;
  const Session session_ = daemon_.Open();
};

TEST_F(BatchNormTest, NormalisesByTheBatchInTrainingAndByRunningStatisticsElse) {
  BatchNorm norm(3);
  ASSERT_TRUE(norm.Init(session_, 1, DType::kF64).ok());
  EXPECT_THAT(Values<double>(norm.running_mean()()), ElementsAre(0, 0, 0));
  EXPECT_THAT(Values<double>(norm.running_var()()), ElementsAre(1, 1, 1));
  norm.weight().Set(FromHost<double>(session_, {2, 3, 5}, {3}));
  norm.bias().Set(FromHost<double>(session_, {0.5, -1, 4}, {3}));
  const Doubles weight = {2, 3, 5};
  const Doubles bias = {0.5, -1, 4};
  Doubles mean(3, 0);
  Doubles variance(3, 1);
  int64_t batches = 0;
  for (const Shape& shape : {Shape{2, 3, 2, 2}, Shape{4, 3}, Shape{1, 3, 5}}) {
    const Tensor x = Numbers(shape, static_cast<int>(batches));
    const int64_t n = shape[0], inner = x.num_elements() / n / 3;
    const Doubles in = Values<double>(x);
    Doubles expected(in.size());
    for (int64_t c = 0; c < 3; ++c) {
      const Statistics batch(in, n, 3, inner, c);
      const auto at = static_cast<size_t>(c);
      mean[at] = 0.9 * mean[at] + 0.1 * batch.mean;
      variance[at] = 0.9 * variance[at] + 0.1 * batch.unbiased;
      for (size_t i = 0; i < in.size(); ++i) {
        if (static_cast<int64_t>(i) / inner % 3 != c) continue;
        expected[i] =
            (in[i] - batch.mean) / std::sqrt(batch.variance + 1e-5) * weight[at] + bias[at];
      }
    }
    EXPECT_THAT(Values<double>(norm(x)), Near(expected));
    EXPECT_THAT(Values<double>(norm.running_mean()()), Near(mean));
    EXPECT_THAT(Values<double>(norm.running_var()()), Near(variance));
    EXPECT_THAT(Values<int64_t>(norm.num_batches_tracked()()), ElementsAre(++batches));
  }
  norm.Eval();
  const Tensor x = Numbers({1, 3});
  Doubles expected = Values<double>(x);
  for (size_t c = 0; c < 3; ++c) {
    expected[c] = (expected[c] - mean[c]) / std::sqrt(variance[c] + 1e-5) * weight[c] + bias[c];
  }
  EXPECT_THAT(Values<double>(norm(x)), Near(expected));
  EXPECT_THAT(Values<double>(norm.running_mean()()), Near(mean));
  EXPECT_THAT(Values<int64_t>(norm.num_batches_tracked()()), ElementsAre(batches));
}

TEST_F(BatchNormTest, WithoutMomentumItKeepsTheMeanOverBatches) {
  BatchNormOptions options;
  options.momentum = std::nullopt;
  options.affine = false;
  BatchNorm norm(1, options);
  ASSERT_TRUE(norm.Init(session_, 1, DType::kF64).ok());
  EXPECT_TRUE(norm.parameters().empty());
  double mean = 0;
  double variance = 0;
  for (int i = 0; i < 3; ++i) {
    const Tensor x = Numbers({4, 1}, i);
    norm(x);
    const Statistics batch(Values<double>(x), 4, 1, 1, 0);
    mean += batch.mean / 3;
    variance += batch.unbiased / 3;
  }
  EXPECT_THAT(Values<double>(norm.running_mean()()), Near({mean}));
  EXPECT_THAT(Values<double>(norm.running_var()()), Near({variance}));
}

TEST_F(BatchNormTest, HasGradientsInTrainingAndElse) {
  BatchNorm norm(2);
  ASSERT_TRUE(norm.Init(session_, 1, DType::kF64).ok());
  for (const bool training : {true, false}) {
    norm.Train(training);
    ExpectGradients(
        [&norm](const std::vector<Tensor>& in) {
          std::vector<Tensor> state;
          size_t next = 1;
          for (const Variable& variable : norm.variables()) {
            state.push_back(variable.is_parameter() ? in[next++] : variable());
          }
          const StateScope scope(norm, state);
          return norm(in[0]);
        },
        {Numbers({3, 2, 2}, 1), Numbers({2}, 2), Numbers({2}, 3)});
  }
  // The running statistics have no history.
  norm.Train();
  const Tensor x = Numbers({3, 2}).RequireGrad();
  norm(x);
  EXPECT_FALSE(norm.running_mean()().requires_grad());
  EXPECT_FALSE(norm.running_var()().requires_grad());
}

TEST_F(BatchNormTest, RefusesWhatDoesNotFit) {
  BatchNorm norm(3);
  ASSERT_TRUE(norm.Init(session_, 1, DType::kF64).ok());
  const auto text = [](const Tensor& x) {
    EXPECT_EQ(ErrorOf(x.status()).reason, Reason::kBadType);
    return std::string(x.status().message());
  };
  EXPECT_THAT(text(norm(Numbers({2, 4, 3}))),
              HasSubstr("BatchNorm: expected [n, 3, ...], got f64[2,4,3]"));
  EXPECT_THAT(text(norm(Numbers({3}))), HasSubstr("got f64[3]"));
  for (const Shape& shape : {Shape{1, 3}, Shape{1, 3, 1, 1}, Shape{0, 3, 2}}) {
    EXPECT_THAT(text(norm(Numbers(shape))),
                HasSubstr("BatchNorm: expected two values of a channel at least, in training"));
  }
  // A batch that is refused leaves no trace.
  EXPECT_THAT(Values<int64_t>(norm.num_batches_tracked()()), ElementsAre(0));
  EXPECT_TRUE(norm(Numbers({1, 3, 2})).status().ok());
  norm.Eval();
  EXPECT_TRUE(norm(Numbers({1, 3})).status().ok());
  const Tensor failed = FromError(session_, absl::InternalError("before"));
  EXPECT_THAT(std::string(norm(failed).status().message()), HasSubstr("before"));
}

TEST_F(BatchNormTest, ACompiledStepKeepsItsRunningStatistics) {
  for (const std::optional<double> momentum :
       {std::optional<double>(0.1), std::optional<double>()}) {
    BatchNormOptions options;
    options.momentum = momentum;
    BatchNorm norm(2, options);
    BatchNorm eager(2, options);
    ASSERT_TRUE(norm.Init(session_, 1, DType::kF64).ok());
    ASSERT_TRUE(eager.Init(session_, 1, DType::kF64).ok());
    const Compiled step = Compile([&norm](const std::vector<Tensor>& in) {
      const StateScope scope(norm, std::vector<Tensor>(in.begin(), in.end() - 1));
      std::vector<Tensor> out = {norm(in.back())};
      for (const Tensor& tensor : scope.tensors()) out.push_back(tensor);
      return out;
    });
    for (int i = 0; i < 3; ++i) {
      const Tensor x = Numbers({3, 2, 2}, i);
      std::vector<Tensor> in;
      for (const Variable& variable : norm.variables()) in.push_back(variable().Detach());
      in.push_back(x);
      const auto out = step.Run(in);
      ASSERT_TRUE(out.ok()) << out.status();
      EXPECT_THAT(Values<double>((*out)[0]), Near(Values<double>(eager(x))));
      for (size_t v = 0; v < norm.variables().size(); ++v) norm.variables()[v].Set((*out)[v + 1]);
      EXPECT_THAT(Values<double>(norm.running_mean()()),
                  Near(Values<double>(eager.running_mean()())));
      EXPECT_THAT(Values<double>(norm.running_var()()),
                  Near(Values<double>(eager.running_var()())));
      EXPECT_THAT(Values<int64_t>(norm.num_batches_tracked()()), ElementsAre(i + 1));
    }
    EXPECT_EQ(step.traces(), 1);
  }
}

}  // namespace
}  // namespace nn
}  // namespace chorus
