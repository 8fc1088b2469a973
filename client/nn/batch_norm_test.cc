#include "chorus/nn/batch_norm.h"

#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "chorus/chorus.h"
#include "chorus/functional/math.h"
#include "chorus/functional/shape.h"
#include "chorus/nn/data_parallel.h"
#include "chorus/nn/init.h"
#include "chorus/nn/layers.h"
#include "chorus/nn/loss.h"
#include "chorus/nn/optim.h"
#include "chorus/nn/train_step.h"
#include "chorus/parallel.h"
#include "client/testing/fake_daemon.h"
#include "client/testing/gradients.h"
#include "client/testing/ranks.h"
#include "client/testing/values.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace nn {
namespace {

using chorus::testing::ExpectGradients;
using chorus::testing::FakeDaemon;
using chorus::testing::OnRanks;
using chorus::testing::Ranks;
using chorus::testing::Values;
using parallel::DeviceGroup;
using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pointwise;

using Doubles = std::vector<double>;
using Tensors = std::vector<Tensor>;

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

// Neither 0.9 and 0.1, nor the share of a batch among all, are rounded to the half type.
TEST_F(BatchNormTest, RunningStatisticsOfHalfTypesAreRoundedOnce) {
  const auto read = [](const Tensor& x) { return Values<double>(Cast(x, DType::kF64))[0]; };
  for (const std::optional<double> momentum :
       {std::optional<double>(0.1), std::optional<double>()}) {
    BatchNormOptions options;
    options.momentum = momentum;
    BatchNorm norm(1, options);
    ASSERT_TRUE(norm.Init(session_, 1, DType::kBF16).ok());
    double mean = 0;
    double variance = 1;
    for (int i = 0; i < 6; ++i) {
      const Tensor x = Cast(Numbers({8, 1}, i) + 3, DType::kBF16);
      norm(x);
      const Statistics batch(Values<double>(Cast(x, DType::kF64)), 8, 1, 1, 0);
      const double share = momentum.has_value() ? *momentum : 1.0 / (i + 1);
      const auto next = [share](double before, double seen) {
        return BF16(static_cast<float>((1 - share) * before + share * seen));
      };
      mean = next(mean, batch.mean);
      variance = next(variance, batch.unbiased);
      EXPECT_EQ(norm.running_mean()().dtype(), DType::kBF16);
      EXPECT_EQ(read(norm.running_mean()()), mean) << i;
      EXPECT_EQ(read(norm.running_var()()), variance) << i;
    }
  }
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

TEST_F(BatchNormTest, ACallThatIsRefusedChangesNothing) {
  for (const bool shared : {false, true}) {
    OnRanks(2, [&](const World& world, int rank) {
      BatchNorm norm(3);
      if (shared) norm.ShareBatch(world);
      ASSERT_TRUE(norm.Init(world, 1, DType::kF64).ok());
      const Tensor x = chorus::testing::Numbers(world, {4, 3}, rank);
      ASSERT_TRUE(norm(x).Wait().ok());
      const auto state = [&norm] {
        std::vector<Doubles> values;
        for (const Variable& buffer : norm.buffers()) {
          values.push_back(Values<double>(Cast(buffer(), DType::kF64)));
        }
        return values;
      };
      const std::vector<Doubles> before = state();
      for (const DType dtype : {DType::kU8, DType::kI64, DType::kBool}) {
        EXPECT_FALSE(norm(Zeros(world, dtype, {4, 3})).status().ok());
        EXPECT_EQ(state(), before) << DTypeName(dtype);
      }
      ASSERT_TRUE(norm(x).Wait().ok());
      EXPECT_NE(state(), before);
    });
  }
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

TEST_F(BatchNormTest, ABatchThatVariesIsOneGraphWithTheSameBits) {
  struct Case {
    DType dtype;
    int64_t max_size;
    std::vector<int64_t> rows;
    int64_t values = 1;  // of a channel, in each row
    int64_t unseen = 0;  // rows, by the layer
  };
  // Of 7 rows at most a function is traced with 2 as well, of 3 and fewer with one.
  for (const Case& c :
       {Case{DType::kF32, 7, {7, 3, 1, 2, 6}, 3}, Case{DType::kF64, 7, {7, 3, 1, 2, 6}, 3},
        Case{DType::kF32, 7, {7, 3, 2, 6}}, Case{DType::kF64, 3, {3, 2}}, Case{DType::kF32, 2, {2}},
        Case{DType::kF32, 1, {}}, Case{DType::kF64, 7, {7, 3, 6}, 1, 1}}) {
    SCOPED_TRACE(c.max_size);
    const DType dtype = c.dtype;
    BatchNorm norm(2);
    BatchNorm eager(2);
    ASSERT_TRUE(norm.Init(session_, 1, dtype).ok());
    ASSERT_TRUE(eager.Init(session_, 1, dtype).ok());
    CompileOptions options;
    options.varying.emplace_back(static_cast<int>(norm.variables().size()));
    options.max_size = c.max_size;
    const auto seen = [&c](const Tensor& x) { return Slice(x, 0, c.unseen, x.shape()[0]); };
    const Compiled step = Compile(
        [&norm, &seen](const Tensors& in) {
          const StateScope scope(norm, Tensors(in.begin(), in.end() - 1));
          Tensors out = {norm(seen(in.back()))};
          for (const Tensor& tensor : scope.tensors()) out.push_back(tensor);
          return out;
        },
        options);
    const auto values = [](const Tensor& x) { return Values<double>(Cast(x, DType::kF64)); };
    const auto run = [&](const Tensor& x) {
      Tensors in;
      for (const Variable& variable : norm.variables()) in.push_back(variable().Detach());
      in.push_back(x);
      const auto out = step.Run(in);
      if (!out.ok()) return FromError(session_, out.status());
      for (size_t v = 0; v < norm.variables().size(); ++v) norm.variables()[v].Set((*out)[v + 1]);
      return (*out)[0];
    };
    for (const int64_t rows : c.rows) {
      SCOPED_TRACE(rows);
      const Tensor x = Cast(Numbers({rows, 2, c.values}, static_cast<int>(rows)), dtype);
      const Tensor y = run(x);
      ASSERT_TRUE(y.Wait().ok()) << y.status();
      EXPECT_EQ(values(y), values(eager(seen(x))));
      for (size_t v = 0; v < norm.variables().size(); ++v) {
        EXPECT_EQ(values(norm.variables()[v]()), values(eager.variables()[v]())) << v;
      }
    }
    EXPECT_EQ(step.traces(), c.rows.empty() ? 0 : 1);
    // Where there is one value in all, its variance is 0.
    const Doubles before = values(norm.running_var()());
    const Tensor y = run(Cast(Numbers({1 + c.unseen, 2}), dtype));
    ASSERT_TRUE(y.Wait().ok()) << y.status();
    const Doubles after = values(norm.running_var()());
    for (size_t i = 0; i < 2; ++i) EXPECT_NEAR(after[i], before[i] * 0.9, 1e-6);
  }
}

// --- One batch of several -----------------------------------------------------------------------

// Rows [begin, end) of what is laid out by rows of `width`.
Doubles Rows(const Doubles& all, int64_t width, int64_t begin, int64_t end) {
  return Doubles(all.begin() + width * begin, all.begin() + width * end);
}

class SyncBatchNormTest : public BatchNormTest {
 protected:
  // Of x and the parameters: y, the gradients of Sum(y * w), and those of the sum of their squares.
  static Tensors Everything(BatchNorm* norm, const Tensor& x, const Tensor& w) {
    const Tensors leaves = {x, norm->weight()(), norm->bias()()};
    const Tensor y = (*norm)(x);
    BackwardOptions create;
    create.create_graph = true;
    const auto first = Grad({Sum(y * w)}, leaves, create);
    if (!first.ok()) return {FromError(x.device(), first.status())};
    Tensor squares = Sum(y * 0);
    for (const Tensor& gradient : *first) squares = squares + Sum(gradient * gradient);
    const auto second = Grad({squares}, leaves);
    if (!second.ok()) return {FromError(x.device(), second.status())};
    Tensors all = {y.Detach()};
    for (const Tensor& gradient : *first) all.push_back(gradient.Detach());
    all.insert(all.end(), second->begin(), second->end());
    return all;
  }
};

// Ranks of 3, 0, 1 and 2 rows, and one that has them all. What is differentiated again are squares
// of gradients for x, which are the rank's part of the whole's; those for weight and bias are
// summed over ranks first, so they are compared alone.
TEST_F(SyncBatchNormTest, RanksOfAnyNumbersOfRowsAreOneBatch) {
  const std::vector<int64_t> begin = {0, 3, 3, 4, 6};
  constexpr int64_t kWidth = 2 * 3;
  const Doubles rows = chorus::testing::Numbers(6 * kWidth, 1);
  const Doubles weights = chorus::testing::Numbers(6 * kWidth, 2);
  for (const bool compiled : {false, true}) {
    SCOPED_TRACE(compiled ? "compiled" : "eager");
    const auto run = [&](const DeviceRef& device, int64_t from, int64_t to,
                         const std::optional<Group>& ranks, Doubles* mean, Doubles* variance) {
      BatchNormOptions options;
      options.ranks = ranks;
      BatchNorm norm(2, options);
      EXPECT_TRUE(norm.Init(device, 1, DType::kF64).ok());
      norm.weight().Set(FromHost<double>(device, {2, 3}, {2}));
      const Tensor x =
          FromHost<double>(device, Rows(rows, kWidth, from, to), {to - from, 2, 3}).RequireGrad();
      const Tensor w = FromHost<double>(device, Rows(weights, kWidth, from, to), {to - from, 2, 3});
      const auto function = [&norm](const Tensors& in) {
        const Tensor y = norm(in[0]);
        BackwardOptions create;
        create.create_graph = true;
        const auto first = Grad({Sum(y * in[1])}, {in[0]}, create);
        if (!first.ok()) return Tensors{FromError(in[0].device(), first.status())};
        const auto second = Grad({Sum((*first)[0] * (*first)[0])}, {in[0]});
        if (!second.ok()) return Tensors{FromError(in[0].device(), second.status())};
        return Tensors{y.Detach(), (*first)[0].Detach(), (*second)[0], norm.running_mean()(),
                       norm.running_var()()};
      };
      std::vector<Doubles> results;
      if (compiled) {
        const auto out = Compile([&](const Tensors& in) {
                           const StateScope scope(norm, Tensors(in.begin() + 2, in.end()));
                           return function({in[0], in[1]});
                         }).Run([&] {
          Tensors in = {x, w};
          for (const Variable& variable : norm.variables()) in.push_back(variable().Detach());
          return in;
        }());
        EXPECT_TRUE(out.ok()) << out.status();
        if (!out.ok()) return results;
        for (const Tensor& tensor : *out) results.push_back(Values<double>(tensor));
      } else {
        for (const Tensor& tensor : function({x, w})) results.push_back(Values<double>(tensor));
      }
      if (results.size() != 5) return results;
      *variance = results[4];
      *mean = results[3];
      results.resize(3);
      return results;
    };
    Doubles mean, variance;
    const std::vector<Doubles> whole = run(session_, 0, 6, std::nullopt, &mean, &variance);
    FakeDaemon daemon;
    Ranks(4, &daemon).Run([&](const World& world, int r) {
      const auto at = static_cast<size_t>(r);
      Doubles own_mean, own_variance;
      const std::vector<Doubles> part =
          run(world, begin[at], begin[at + 1], world.group(), &own_mean, &own_variance);
      ASSERT_EQ(part.size(), whole.size());
      for (size_t i = 0; i < part.size(); ++i) {
        EXPECT_THAT(part[i], Near(Rows(whole[i], kWidth, begin[at], begin[at + 1])))
            << "rank " << r << ", result " << i;
      }
      EXPECT_THAT(own_mean, Near(mean));
      EXPECT_THAT(own_variance, Near(variance));
    });
  }
}

// Where the mean is 40,000 deviations from 0, and ranks have other means, f32 keeps the variance: a
// difference of sums of squares would leave nothing of it.
TEST_F(SyncBatchNormTest, ALargeMeanTakesNothingFromTheVariance) {
  const std::vector<int64_t> count = {5, 2, 7};
  std::vector<Doubles> rows(3);
  Doubles all;
  for (size_t r = 0; r < 3; ++r) {
    for (int64_t i = 0; i < count[r]; ++i) {
      // A quarter is a unit in the last place of an f32.
      rows[r].push_back(4e6 + 100 * static_cast<double>(r) + 25 * static_cast<double>(i * i % 7));
      all.push_back(rows[r].back());
    }
  }
  const Statistics batch(all, static_cast<int64_t>(all.size()), 1, 1, 0);
  FakeDaemon daemon;
  Ranks(3, &daemon).Run([&](const World& world, int r) {
    const auto at = static_cast<size_t>(r);
    BatchNormOptions options;
    options.ranks = world.group();
    options.momentum = 1;
    BatchNorm norm(1, options);
    ASSERT_TRUE(norm.Init(world, 1, DType::kF32).ok());
    const std::vector<float> values(rows[at].begin(), rows[at].end());
    const std::vector<float> y = Values<float>(norm(FromHost(world, values, {count[at], 1})));
    EXPECT_NEAR(Values<float>(norm.running_var()())[0], batch.unbiased, 1e-3 * batch.unbiased);
    ASSERT_EQ(y.size(), rows[at].size());
    for (size_t i = 0; i < y.size(); ++i) {
      EXPECT_NEAR(y[i], (rows[at][i] - batch.mean) / std::sqrt(batch.variance), 0.01);
    }
  });
}

TEST_F(SyncBatchNormTest, ARankThatCannotGoOnTellsTheOthers) {
  Ranks(2, &daemon_).Run([&](const World& world, int r) {
    Sequential model({std::make_shared<BatchNorm>(2)});
    ASSERT_TRUE(model.Init(world, 1, DType::kF64).ok());
    ShareBatches(&model, world);
    EXPECT_THAT(model.ToString(), HasSubstr("ranks=2"));
    Tensors before;
    for (const Variable& variable : model.variables()) before.push_back(variable());
    for (const bool failed : {false, true}) {
      Tensor x = chorus::testing::Numbers(world, {2, 2});
      if (r == 0) {
        x = failed ? Reshape(x, {7}) : FromHost<double>(world, {1, 2, 3}, {1, 3});
      }
      const absl::Status status = model(x).Wait();
      if (r == 0) {
        EXPECT_THAT(std::string(status.message()),
                    HasSubstr(failed ? "reshape" : "0 (BatchNorm): expected [n, 2, ...], got f64"));
      } else {
        EXPECT_EQ(ErrorOf(status).reason, Reason::kPeerRefused) << status;
      }
      // They are in line; what was made of a batch that failed has its error.
      EXPECT_TRUE(Barrier(world).Wait().ok());
      for (size_t i = 0; i < before.size(); ++i) model.variables()[i].Set(before[i]);
    }
    const absl::Status status = model(FromHost<double>(world, {1, 2}, {1, 2})).Wait();
    EXPECT_TRUE(status.ok()) << status;
    // Else nobody is asked.
    model.Eval();
    const Tensor y = r == 0 ? model(FromHost<double>(world, {1, 2}, {1, 2})) : Tensor();
    EXPECT_TRUE(r == 1 || y.Wait().ok());
  });
}

// A clone runs its original's layers, so these share too, and a clone's clone.
TEST_F(SyncBatchNormTest, AClonesBatchesAreSharedAndItsOriginals) {
  const Doubles rows = chorus::testing::Numbers(6 * 2, 1);
  const std::vector<int64_t> begin = {0, 2, 6};
  Doubles mean;
  for (int64_t c = 0; c < 2; ++c) mean.push_back(0.1 * Statistics(rows, 6, 2, 1, c).mean);
  for (const bool is_clones_clone : {false, true}) {
    OnRanks(2, [&](const World& world, int r) {
      Sequential model({Make<BatchNorm>(2)});
      ASSERT_TRUE(model.Init(world, 1, DType::kF64).ok());
      const auto first = model.Clone(world);
      ASSERT_TRUE(first.ok()) << first.status();
      const auto second = (*first)->Clone(world);
      ASSERT_TRUE(second.ok()) << second.status();
      Module& clone = is_clones_clone ? **second : **first;
      ShareBatches(&clone, world);
      const int64_t from = begin[static_cast<size_t>(r)], to = begin[static_cast<size_t>(r) + 1];
      const Tensor x = FromHost<double>(world, Rows(rows, 2, from, to), {to - from, 2});
      for (Module* const module : {&clone, static_cast<Module*>(&model)}) {
        EXPECT_THAT(module->ToString(), HasSubstr("ranks=2"));
        const absl::Status status = (*module)(x).Wait();
        ASSERT_TRUE(status.ok()) << status;
        EXPECT_THAT(Values<double>(module->buffers()[0]()), Near(mean)) << "rank " << r;
      }
    });
  }
}

// Two ranks of two devices each.
void OnRanksOfTwoDevices(
    const std::function<void(const Session& session, const World& world, int rank)>& function) {
  FakeDaemon daemon;
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      const Session session = daemon.Open(2, std::chrono::seconds(20));
      WorldOptions options;
      options.name = "job";
      options.rank = r;
      options.size = 2;
      const auto world = session.Join(options);
      ASSERT_TRUE(world.ok()) << world.status();
      // Else a rank may be let in when another one's first call has been refused already.
      ASSERT_TRUE(Barrier(*world).Wait().ok());
      function(session, *world, r);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Rows of one value in a turn, of which two ranks have two each.
Tensor RowsOf(const Session& session, int turn, int rank, int device = 0) {
  return FromHost<double>(session.device(device),
                          Rows(chorus::testing::Numbers(4, turn), 1, 2 * rank, 2 * rank + 2),
                          {2, 1});
}
Doubles Normalised(int turn, int rank) {
  Doubles all = chorus::testing::Numbers(4, turn);
  const Statistics batch(all, 4, 1, 1, 0);
  for (double& value : all) value = (value - batch.mean) / std::sqrt(batch.variance + 1e-5);
  return Rows(all, 1, 2 * rank, 2 * rank + 2);
}

// A part of what has a variable of its own.
class ScaledNorm : public Module {
 public:
  explicit ScaledNorm(const BatchNormOptions& options)
      : Module("ScaledNorm"),
        scale_(AddBuffer("scale", {1}, init::Ones())),
        norm_(Add<BatchNorm>("norm", 1, options)) {}
  Tensor Forward(const Tensor& x) override { return norm_(x * scale_()); }

 private:
  const Variable scale_;
  BatchNorm& norm_;
};

// Else the next turn's statistics would be of two different ones.
TEST_F(SyncBatchNormTest, ACallThatIsRefusedBeforeTheLayerTellsTheOthers) {
  for (const bool is_inside : {false, true}) {
    SCOPED_TRACE(is_inside ? "inside of another module" : "alone");
    OnRanksOfTwoDevices([&](const Session& session, const World& world, int r) {
      BatchNormOptions options;
      options.ranks = world;
      std::shared_ptr<Module> model = std::make_shared<BatchNorm>(1, options);
      if (is_inside) model = std::make_shared<ScaledNorm>(options);
      for (const bool is_there : {false, true}) {
        const int turn = is_there ? 2 : 1;
        Tensors before;
        if (is_there || r == 0) {
          ASSERT_TRUE(model->Init(session, 1, DType::kF64).ok());
          for (const Variable& variable : model->variables()) before.push_back(variable());
        }
        const absl::Status refused = (*model)(RowsOf(session, turn, r, is_there ? r : 0)).Wait();
        if (r == 1) {
          EXPECT_THAT(std::string(refused.message()),
                      HasSubstr(is_there ? "its input is on device 1" : "is not there yet"));
        } else {
          EXPECT_EQ(ErrorOf(refused).reason, Reason::kPeerRefused) << refused;
        }
        if (before.empty()) {
          ASSERT_TRUE(model->Init(session, 1, DType::kF64).ok());
        }
        for (size_t i = 0; i < before.size(); ++i) model->variables()[i].Set(before[i]);
        for (int good = 10 * turn; good < 10 * turn + 2; ++good) {
          EXPECT_THAT(Values<double>((*model)(RowsOf(session, good, r))), Near(Normalised(good, r)))
              << good;
        }
      }
    });
  }
}

TEST_F(SyncBatchNormTest, OneRankTrainsAsFourDo) {
  const Doubles rows = chorus::testing::Numbers(8 * 3, 1);
  const Doubles labels = chorus::testing::Numbers(8 * 2, 2);
  const auto train = [&](const World* world, const DeviceRef& device, int64_t begin, int64_t end) {
    const auto norm = std::make_shared<BatchNorm>(4);
    Sequential model(
        {std::make_shared<Linear>(3, 4), norm, ReluLayer(), std::make_shared<Linear>(4, 2)});
    EXPECT_TRUE(model.Init(device, 1, DType::kF64).ok());
    Sgd::Options sgd;
    sgd.momentum = 0.9;
    Sgd optimizer(model.parameters(), sgd);
    TrainStep::Options options;
    if (world != nullptr) {
      ShareBatches(&model, *world);
      options.ranks = world->group();
    }
    options.varying = {0, 1};
    options.max_size = 8;
    TrainStep step(
        &model, &optimizer, [&](const Tensors& in) { return MseLoss(model(in[0]), in[1]); },
        world == nullptr ? TrainStep::Options() : options);
    std::vector<Doubles> results(1);
    for (int i = 0; i < 4; ++i) {
      const auto loss =
          step({FromHost<double>(device, Rows(rows, 3, begin, end), {end - begin, 3}),
                FromHost<double>(device, Rows(labels, 2, begin, end), {end - begin, 2})});
      EXPECT_TRUE(loss.ok()) << loss.status();
      if (!loss.ok()) return results;
      results[0].push_back(Values<double>(*loss)[0]);
    }
    for (const Variable& variable : model.variables()) {
      if (variable.is_parameter()) results.push_back(Values<double>(variable()));
    }
    results.push_back(Values<double>(norm->running_mean()()));
    results.push_back(Values<double>(norm->running_var()()));
    return results;
  };
  const std::vector<Doubles> alone = train(nullptr, session_, 0, 8);
  FakeDaemon daemon;
  Ranks(4, &daemon).Run([&](const World& world, int r) {
    const std::vector<Doubles> part = train(&world, world, 2 * r, 2 * r + 2);
    ASSERT_EQ(part.size(), alone.size());
    for (size_t i = 0; i < part.size(); ++i) EXPECT_THAT(part[i], Near(alone[i])) << i;
  });
}

// Three devices, with rows for all, for two and for one.
TEST_F(SyncBatchNormTest, ReplicasOfADataParallelAreOneBatch) {
  const Session session = daemon_.Open(3);
  const DeviceGroup devices = *DeviceGroup::Create(session);
  BatchNormOptions options;
  options.replicas = true;
  for (const int64_t rows : {5, 2, 1}) {
    SCOPED_TRACE(rows);
    const auto norm = std::make_shared<BatchNorm>(2, options);
    BatchNorm plain(2);
    ASSERT_TRUE(norm->Init(session, 1, DType::kF64).ok());
    ASSERT_TRUE(plain.Init(session, 1, DType::kF64).ok());
    DataParallel model(norm, devices);
    const Tensor x = chorus::testing::Numbers(session, {rows, 2, 2}, 1);
    EXPECT_THAT(Values<double>(model(x)), Near(Values<double>(plain(x))));
    EXPECT_THAT(Values<double>(norm->running_mean()()),
                Near(Values<double>(plain.running_mean()())));
    EXPECT_THAT(Values<double>(norm->running_var()()), Near(Values<double>(plain.running_var()())));
    ExpectGradients(
        [&](const Tensors& in) {
          Tensors state;
          size_t next = 1;
          for (const Variable& variable : model.variables()) {
            state.push_back(variable.is_parameter() ? in[next++] : variable());
          }
          const StateScope scope(model, state);
          return model(in[0]);
        },
        {x, chorus::testing::Numbers(session, {2}, 2), chorus::testing::Numbers(session, {2}, 3)});
  }
  EXPECT_EQ(daemon_.live_tapes(), 0);
}

// Fails on one device after its turn in another one's batch norm.
class FailsOn : public Module {
 public:
  explicit FailsOn(int slot) : Module("FailsOn"), slot_(slot) {}
  Tensor Forward(const Tensor& x) override {
    return x.device().slot() == slot_ ? Refuse(x, "not here") : x * 1;
  }
  int slot_;
};

TEST_F(SyncBatchNormTest, AReplicaThatFailsLeavesTheDevicesInLine) {
  const Session session = daemon_.Open(2);
  const DeviceGroup devices = *DeviceGroup::Create(session);
  BatchNormOptions options;
  options.replicas = true;
  const auto fails = std::make_shared<FailsOn>(1);
  const auto norm = std::make_shared<BatchNorm>(1, options);
  const auto model = std::make_shared<Sequential>(Modules{fails, norm});
  ASSERT_TRUE(model->Init(session, 1, DType::kF64).ok());
  DataParallel parallel(model, devices);
  EXPECT_THAT(std::string(parallel(FromHost<double>(session, {1, 2}, {2, 1})).status().message()),
              HasSubstr("in replica 1 on device 1"));
  fails->slot_ = -1;
  const Tensor x = FromHost<double>(session, {3, 4, 8, 1}, {4, 1});
  BatchNorm plain(1);
  ASSERT_TRUE(plain.Init(session, 1, DType::kF64).ok());
  EXPECT_THAT(Values<double>(parallel(x)), Near(Values<double>(plain(x))));
}

// As FailsOn, by an exception.
class ThrowsOn : public Module {
 public:
  explicit ThrowsOn(int slot) : Module("ThrowsOn"), slot_(slot) {}
  Tensor Forward(const Tensor& x) override {
    if (x.device().slot() == slot_) throw std::runtime_error("not here");
    return x * 1;
  }
  int slot_;
};

TEST_F(SyncBatchNormTest, AReplicaThatThrowsLeavesTheDevicesInLineAndTheBuffersAsTheyWere) {
  const Session session = daemon_.Open(2);
  BatchNormOptions options;
  options.replicas = true;
  const auto throws = std::make_shared<ThrowsOn>(1);
  const auto norm = std::make_shared<BatchNorm>(1, options);
  const auto model = std::make_shared<Sequential>(Modules{throws, norm});
  ASSERT_TRUE(model->Init(session, 1, DType::kF64).ok());
  DataParallel parallel(model, *DeviceGroup::Create(session));
  EXPECT_THROW(parallel(FromHost<double>(session, {1, 2}, {2, 1})), std::runtime_error);
  throws->slot_ = -1;
  const Tensor x = FromHost<double>(session, {3, 4, 8, 1}, {4, 1});
  BatchNorm plain(1);
  ASSERT_TRUE(plain.Init(session, 1, DType::kF64).ok());
  EXPECT_THAT(Values<double>(parallel(x)), Near(Values<double>(plain(x))));
  EXPECT_THAT(Values<double>(norm->running_mean()()), Near(Values<double>(plain.running_mean()())));
  EXPECT_THAT(Values<double>(norm->running_var()()), Near(Values<double>(plain.running_var()())));
}

// Compiles what it does on each device.
class CompilesItself : public Module {
 public:
  explicit CompilesItself(const std::shared_ptr<BatchNorm>& norm)
      : Module("CompilesItself"), norm_(norm), compiled_(Compile([norm](const Tensors& in) {
          const StateScope scope(*norm, Tensors(in.begin() + 1, in.end()));
          return Tensors{(*norm)(in[0])};
        })) {
    AddModule("norm", norm);
  }
  Tensor Forward(const Tensor& x) override {
    Tensors in = {x};
    for (const Variable& variable : norm_->variables()) in.push_back(variable().Detach());
    const absl::StatusOr<Tensors> out = compiled_.Run(in);
    return out.ok() ? (*out)[0] : FromError(x.device(), out.status());
  }

 private:
  const std::shared_ptr<BatchNorm> norm_;
  const Compiled compiled_;
};

// Its graph would be used again for batches that have rows for other replicas.
TEST_F(SyncBatchNormTest, AFunctionThatAReplicaCompilesIsRefused) {
  const Session session = daemon_.Open(3);
  const DeviceGroup devices = *DeviceGroup::Create(session);
  BatchNormOptions options;
  options.replicas = true;
  const auto norm = std::make_shared<BatchNorm>(1, options);
  ASSERT_TRUE(norm->Init(session, 1, DType::kF64).ok());
  DataParallel parallel(std::make_shared<CompilesItself>(norm), devices);
  const Tensor x = FromHost<double>(session, {3, 4, 8, 1, 5, 7}, {6, 1});
  for (int call = 0; call < 2; ++call) {
    EXPECT_THAT(std::string(parallel(x).status().message()),
                HasSubstr("in a function that a replica compiles"));
  }
  BatchNorm plain(1);
  ASSERT_TRUE(plain.Init(session, 1, DType::kF64).ok());
  DataParallel eager(norm, devices);
  EXPECT_THAT(Values<double>(eager(x)), Near(Values<double>(plain(x))));
}

// A layer of its own device, which is no part of the module.
class Beside : public Module {
 public:
  explicit Beside(BatchNorm* norm) : Module("Beside"), norm_(norm) {}
  Tensor Forward(const Tensor& x) override {
    return CopyTo((*norm_)(CopyTo(x, norm_->running_mean()().device())), x.device());
  }

 private:
  BatchNorm* const norm_;
};

TEST_F(SyncBatchNormTest, ALayerOnNoneOfTheReplicasDevicesIsRefused) {
  const Session session = daemon_.Open(3);
  BatchNormOptions options;
  options.replicas = true;
  BatchNorm norm(1, options);
  ASSERT_TRUE(norm.Init(session.device(2), 1, DType::kF64).ok());
  DataParallel parallel(std::make_shared<Beside>(&norm), *DeviceGroup::Create(session, {0, 1}));
  const absl::Status status = parallel(FromHost<double>(session, {1, 2}, {2, 1})).status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("it is on none of the devices of the DataParallel"));
  // By itself it is like any other.
  const Tensor x = FromHost<double>(session.device(2), {1, 2}, {2, 1});
  EXPECT_TRUE(norm(x).Wait().ok());
}

// Of two devices each, for which the second one's rows are enough or not.
TEST_F(SyncBatchNormTest, RanksOfSeveralDevicesAreOneBatch) {
  for (const int64_t end : {7, 5, 4}) {
    SCOPED_TRACE(end);
    const Doubles rows = chorus::testing::Numbers(end * 2, 1);
    const std::vector<int64_t> begin = {0, 4, end};
    BatchNorm plain(2);
    ASSERT_TRUE(plain.Init(session_, 1, DType::kF64).ok());
    const Tensor whole = FromHost(session_, rows, {end, 2}).RequireGrad();
    const Tensor y = plain(whole);
    const auto expected = Grad({Sum(y * y * y)}, {whole});
    ASSERT_TRUE(expected.ok()) << expected.status();
    const Doubles results = Values<double>(y);
    const Doubles gradients = Values<double>((*expected)[0]);
    OnRanksOfTwoDevices([&](const Session& session, const World& world, int r) {
      const auto at = static_cast<size_t>(r);
      BatchNormOptions options;
      options.ranks = world;
      options.replicas = true;
      const auto norm = std::make_shared<BatchNorm>(2, options);
      ASSERT_TRUE(norm->Init(session, 1, DType::kF64).ok());
      DataParallel model(norm, *DeviceGroup::Create(session));
      const Tensor x = FromHost<double>(session, Rows(rows, 2, begin[at], begin[at + 1]),
                                        {begin[at + 1] - begin[at], 2})
                           .RequireGrad();
      const Tensor part = model(x);
      const auto gradient = Grad({Sum(part * part * part)}, {x});
      ASSERT_TRUE(gradient.ok()) << gradient.status();
      EXPECT_THAT(Values<double>(part), Near(Rows(results, 2, begin[at], begin[at + 1])));
      EXPECT_THAT(Values<double>((*gradient)[0]),
                  Near(Rows(gradients, 2, begin[at], begin[at + 1])));
      EXPECT_THAT(Values<double>(norm->running_var()()),
                  Near(Values<double>(plain.running_var()())));
    });
  }
}

// The next one is their first, also for what is a mean over all of them.
TEST_F(SyncBatchNormTest, ABatchWithoutRowsChangesNoStatistics) {
  const Session session = daemon_.Open(2);
  for (const std::optional<double> momentum :
       {std::optional<double>(0.1), std::optional<double>()}) {
    SCOPED_TRACE(momentum.has_value() ? "momentum" : "mean over batches");
    BatchNormOptions options;
    options.momentum = momentum;
    options.replicas = true;
    const auto norm = std::make_shared<BatchNorm>(2, options);
    ASSERT_TRUE(norm->Init(session, 1, DType::kF64).ok());
    DataParallel replicas(norm, *DeviceGroup::Create(session));
    const auto statistics = [](const BatchNorm& of) {
      return std::vector<Doubles>{Values<double>(of.running_mean()()),
                                  Values<double>(of.running_var()()),
                                  Values<double>(Cast(of.num_batches_tracked()(), DType::kF64))};
    };
    const auto before = statistics(*norm);
    const Tensor none = replicas(Zeros(session, DType::kF64, {0, 2}));
    EXPECT_EQ(none.shape(), (Shape{0, 2}));
    EXPECT_TRUE(none.Wait().ok()) << none.status();
    EXPECT_EQ(statistics(*norm), before);

    BatchNorm plain(2, options);
    ASSERT_TRUE(plain.Init(session, 1, DType::kF64).ok());
    const Tensor x = chorus::testing::Numbers(session, {4, 2}, 1);
    EXPECT_THAT(Values<double>(replicas(x)), Near(Values<double>(plain(x))));
    const auto wanted = statistics(plain);
    for (size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_THAT(statistics(*norm)[i], Near(wanted[i])) << i;
    }

    OnRanks(2, [&](const World& world, int r) {
      BatchNormOptions shared;
      shared.momentum = momentum;
      shared.ranks = world.group();
      BatchNorm of_ranks(2, shared);
      ASSERT_TRUE(of_ranks.Init(world, 1, DType::kF64).ok());
      EXPECT_TRUE(of_ranks(Zeros(world, DType::kF64, {0, 2})).Wait().ok());
      EXPECT_EQ(statistics(of_ranks), before);
      // Of one of them alone they are all there are.
      of_ranks(r == 1 ? chorus::testing::Numbers(world, {4, 2}, 1)
                      : Zeros(world, DType::kF64, {0, 2}));
      for (size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_THAT(statistics(of_ranks)[i], Near(wanted[i])) << i;
      }
    });
  }
}

// However many replicas of a rank there are, the others count one call.
TEST_F(SyncBatchNormTest, ReplicasThatAreRefusedAreOneCallOfTheirRank) {
  OnRanksOfTwoDevices([&](const Session& session, const World& world, int r) {
    BatchNormOptions options;
    options.ranks = world;
    options.replicas = true;
    const auto fails = std::make_shared<FailsOn>(-1);
    const auto norm = std::make_shared<BatchNorm>(1, options);
    DataParallel model(std::make_shared<Sequential>(Modules{fails, norm}),
                       *DeviceGroup::Create(session));
    ASSERT_TRUE(model.Init(session, 1, DType::kF64).ok());
    int turn = 0;
    // The second replica, the first, and the call before it comes to any.
    for (const int slot : {1, 0, -1}) {
      SCOPED_TRACE(slot);
      Tensors before;
      for (const Variable& variable : model.variables()) before.push_back(variable());
      Tensor x = RowsOf(session, ++turn, r);
      if (r == 0) {
        fails->slot_ = slot;
        if (slot < 0) x = Reshape(x, {7});
      }
      EXPECT_FALSE(model(x).Wait().ok());
      // What a replica is handed is its devices' part of the failure (docs/known.md), this the
      // world's.
      Barrier(world).Wait().IgnoreError();
      fails->slot_ = -1;
      for (size_t i = 0; i < before.size(); ++i) model.variables()[i].Set(before[i]);
      for (int i = 0; i < 2; ++i) {
        ++turn;
        EXPECT_THAT(Values<double>(model(RowsOf(session, turn, r))), Near(Normalised(turn, r)))
            << "rank " << r << ", turn " << turn;
      }
    }
  });
}

// A replica's statistics that could not be made have no shape.
TEST_F(SyncBatchNormTest, TruthValuesAreRefusedOnAllDevicesOfAllRanks) {
  OnRanksOfTwoDevices([&](const Session& session, const World& world, int) {
    BatchNormOptions options;
    options.ranks = world;
    options.replicas = true;
    const auto norm = std::make_shared<BatchNorm>(1, options);
    DataParallel model(norm, *DeviceGroup::Create(session));
    ASSERT_TRUE(model.Init(session, 1, DType::kF64).ok());
    EXPECT_FALSE(model(Zeros(session, DType::kBool, {4, 1})).Wait().ok());
  });
}

// As f32 has it, rounded.
TEST_F(BatchNormTest, HalfTypesAreComputedInF32) {
  BatchNorm norm(1);
  ASSERT_TRUE(norm.Init(session_, 1, DType::kF32).ok());
  const Tensor x = Cast(FromHost<float>(session_, {256, 258, 262, 300}, {4, 1}), DType::kBF16);
  const Tensor exact = norm(Cast(x, DType::kF32));
  const Tensor y = norm(x);
  EXPECT_EQ(y.dtype(), DType::kBF16);
  EXPECT_EQ(Values<float>(Cast(y, DType::kF32)),
            Values<float>(Cast(Cast(exact, DType::kBF16), DType::kF32)));
}

}  // namespace
}  // namespace nn
}  // namespace chorus
