#include "chorus/nn/rnn.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "chorus/chorus.h"
#include "chorus/nn/layers.h"
#include "chorus/nn/loss.h"
#include "chorus/nn/optim.h"
#include "chorus/nn/train_step.h"
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

double Sigma(double x) { return 1 / (1 + std::exp(-x)); }

// By loops on numbers: one layer and direction.
struct Plain {
  bool lstm = true;
  int64_t in = 0;
  int64_t hidden = 0;
  Doubles weight_ih, weight_hh, bias_ih, bias_hh;  // the last two may be empty

  // W x + b, of one gate's unit.
  static double Row(const Doubles& weight, const Doubles& bias, const Doubles& x, int64_t row) {
    double sum = bias.empty() ? 0 : bias[static_cast<size_t>(row)];
    for (size_t i = 0; i < x.size(); ++i)
      sum += weight[static_cast<size_t>(row) * x.size() + i] * x[i];
    return sum;
  }
  void Step(const Doubles& x, Doubles* h, Doubles* c) const {
    const Doubles before = *h;
    for (int64_t u = 0; u < hidden; ++u) {
      const auto at = static_cast<size_t>(u);
      const auto of_x = [&](int64_t gate) { return Row(weight_ih, bias_ih, x, gate * hidden + u); };
      const auto of_h = [&](int64_t gate) {
        return Row(weight_hh, bias_hh, before, gate * hidden + u);
      };
      if (lstm) {
        const auto gate = [&](int64_t g) { return of_x(g) + of_h(g); };
        (*c)[at] = Sigma(gate(1)) * (*c)[at] + Sigma(gate(0)) * std::tanh(gate(2));
        (*h)[at] = Sigma(gate(3)) * std::tanh((*c)[at]);
      } else {
        const double r = Sigma(of_x(0) + of_h(0));
        const double z = Sigma(of_x(1) + of_h(1));
        (*h)[at] = (1 - z) * std::tanh(of_x(2) + r * of_h(2)) + z * before[at];
      }
    }
  }
};

class RnnTest : public ::testing::Test {
 protected:
  Tensor Numbers(const Shape& shape, int seed = 0) {
    return chorus::testing::Numbers(session_, shape, seed);
  }
  static std::unique_ptr<Recurrent> Make(bool lstm, int64_t in, int64_t hidden,
                                         const RnnOptions& options) {
    if (lstm) return std::make_unique<Lstm>(in, hidden, options);
    return std::make_unique<Gru>(in, hidden, options);
  }

  FakeDaemon daemon_;
  const Session session_ = daemon_.Open();
};

TEST_F(RnnTest, StepsAreTheFormulasInBothDirectionsAndAllLayers) {
  constexpr int64_t kIn = 3, kHidden = 2, kBatch = 2;
  for (const bool lstm : {true, false}) {
    for (const bool bidirectional : {false, true}) {
      for (const bool with_state : {false, true}) {
        for (const int64_t steps : {1, 5}) {
          RnnOptions options;
          options.layers = 2;
          options.bidirectional = bidirectional;
          options.bias = steps == 5;
          const auto layer = Make(lstm, kIn, kHidden, options);
          ASSERT_TRUE(layer->Init(session_, 3, DType::kF64).ok());
          const int64_t directions = bidirectional ? 2 : 1;
          const Tensor x = Numbers({steps, kBatch, kIn}, 1);
          const Tensor h0 = Numbers({2 * directions, kBatch, kHidden}, 2);
          const Tensor c0 = Numbers({2 * directions, kBatch, kHidden}, 3);
          const RnnResult result =
              with_state ? (*layer)(x, h0, lstm ? c0 : Tensor()) : (*layer)(x, Tensor());
          ASSERT_TRUE(result.output.status().ok()) << result.output.status();

          // The same by loops.
          const auto value = [&](const std::string& name) {
            for (const NamedVariable& named : layer->named_variables()) {
              if (named.name == name) return Values<double>(named.variable());
            }
            EXPECT_FALSE(options.bias) << name;
            return Doubles();
          };
          const Doubles h_begin = Values<double>(h0), c_begin = Values<double>(c0);
          Doubles y = Values<double>(x), h_end, c_end;
          int64_t width = kIn;
          for (int64_t l = 0; l < 2; ++l) {
            const int64_t out_width = directions * kHidden;
            Doubles out(static_cast<size_t>(steps * kBatch * out_width));
            for (int64_t d = 0; d < directions; ++d) {
              const std::string suffix = "_l" + std::to_string(l) + (d == 0 ? "" : "_reverse");
              const Plain plain = {lstm,
                                   width,
                                   kHidden,
                                   value("weight_ih" + suffix),
                                   value("weight_hh" + suffix),
                                   value("bias_ih" + suffix),
                                   value("bias_hh" + suffix)};
              for (int64_t b = 0; b < kBatch; ++b) {
                Doubles h(kHidden, 0), c(kHidden, 0);
                for (int64_t u = 0; with_state && u < kHidden; ++u) {
                  const auto at =
                      static_cast<size_t>(((l * directions + d) * kBatch + b) * kHidden + u);
                  h[static_cast<size_t>(u)] = h_begin[at];
                  c[static_cast<size_t>(u)] = c_begin[at];
                }
                for (int64_t i = 0; i < steps; ++i) {
                  const int64_t t = d == 0 ? i : steps - 1 - i;
                  const auto row = y.begin() + (t * kBatch + b) * width;
                  plain.Step(Doubles(row, row + width), &h, &c);
                  std::copy(h.begin(), h.end(),
                            out.begin() + (t * kBatch + b) * out_width + d * kHidden);
                }
                h_end.insert(h_end.end(), h.begin(), h.end());
                c_end.insert(c_end.end(), c.begin(), c.end());
              }
            }
            y = out;
            width = out_width;
          }
          EXPECT_EQ(result.output.shape(), Shape({steps, kBatch, width}));
          EXPECT_THAT(Values<double>(result.output), Near(y));
          EXPECT_EQ(result.hidden.shape(), h0.shape());
          EXPECT_THAT(Values<double>(result.hidden), Near(h_end));
          EXPECT_EQ(result.cell.defined(), lstm);
          if (lstm) {
            EXPECT_THAT(Values<double>(result.cell), Near(c_end));
          }
          if (!with_state) {
            EXPECT_THAT(Values<double>((*layer)(x)), Near(y));
          }

          // By batch.
          options.batch_first = true;
          const auto first = Make(lstm, kIn, kHidden, options);
          ASSERT_TRUE(first->Init(session_, 3, DType::kF64).ok());
          EXPECT_THAT(Values<double>(Transpose((*first)(Transpose(x, {1, 0, 2})), {1, 0, 2})),
                      Near(with_state ? Values<double>((*layer)(x)) : y));
        }
      }
    }
  }
}

TEST_F(RnnTest, HasGradientsOfAllThatItTakes) {
  for (const bool lstm : {true, false}) {
    RnnOptions options;
    options.bidirectional = true;
    const auto layer = Make(lstm, 2, 2, options);
    ASSERT_TRUE(layer->Init(session_, 1, DType::kF64).ok());
    Tensors inputs = {Numbers({3, 1, 2}, 1), Numbers({2, 1, 2}, 2), Numbers({2, 1, 2}, 3)};
    for (const Variable& variable : layer->variables()) {
      inputs.push_back(Numbers(variable.shape(), static_cast<int>(inputs.size()) + 1));
    }
    ExpectGradients(
        [&](const Tensors& in) {
          const StateScope scope(*layer, Tensors(in.begin() + 3, in.end()));
          const RnnResult result = (*layer)(in[0], in[1], lstm ? in[2] : Tensor());
          Tensors parts = {Reshape(result.output, {-1}), Reshape(result.hidden, {-1})};
          parts.push_back(Reshape(lstm ? result.cell : in[2] * 1, {-1}));
          return Concat(parts, 0);
        },
        inputs);
  }
}

// Once, whether it is called with a state or without one; `result` is the output.
TEST_F(RnnTest, CallsItsHooks) {
  for (const bool lstm : {true, false}) {
    const auto layer = Make(lstm, 3, 2, {});
    ASSERT_TRUE(layer->Init(session_, 1, DType::kF64).ok());
    const Tensor x = Numbers({4, 2, 3});
    const Doubles plain = Values<double>((*layer)(x));
    int calls = 0;
    layer->AddHook([&](Module&, const Tensor& of, const Tensor& result) {
      EXPECT_EQ(of.shape(), x.shape());
      ++calls;
      return result * 2;
    });
    EXPECT_THAT(Values<double>((*layer)(x)*0.5), Near(plain));
    EXPECT_EQ(calls, 1);
    EXPECT_THAT(Values<double>((*layer)(x, Zeros(session_, DType::kF64, {1, 2, 2})).output * 0.5),
                Near(plain));
    EXPECT_EQ(calls, 2);
    const absl::StatusOr<parallel::Nest> called = layer->Call({x}, {});
    ASSERT_TRUE(called.ok()) << called.status();
    EXPECT_THAT(Values<double>(called->items()[0].tensor() * 0.5), Near(plain));
    EXPECT_EQ(calls, 3);
  }
}

TEST_F(RnnTest, DropsBetweenLayersInTrainingAlone) {
  RnnOptions options;
  options.layers = 2;
  options.dropout = 0.5;
  Lstm layer(3, 8, options);
  options.dropout = 0;
  Lstm plain(3, 8, options);
  ASSERT_TRUE(layer.Init(session_, 1, DType::kF64).ok());
  ASSERT_TRUE(plain.Init(session_, 1, DType::kF64).ok());
  const Tensor x = Numbers({4, 2, 3});
  const auto values = [&](uint64_t seed) {
    const RandomScope random(seed);
    return Values<double>(layer(x));
  };
  EXPECT_EQ(values(1), values(1));
  EXPECT_NE(values(1), values(2));
  // The first layer's last state is before any of it.
  const RnnResult dropped = layer(x, Tensor());
  const RnnResult whole = plain(x, Tensor());
  EXPECT_EQ(Values<double>(Slice(dropped.hidden, 0, 0, 1)),
            Values<double>(Slice(whole.hidden, 0, 0, 1)));
  EXPECT_NE(Values<double>(Slice(dropped.hidden, 0, 1, 2)),
            Values<double>(Slice(whole.hidden, 0, 1, 2)));
  layer.Eval();
  EXPECT_EQ(Values<double>(layer(x)), Values<double>(plain(x)));
}

TEST_F(RnnTest, TrainsAsOneGraph) {
  RnnOptions options;
  options.batch_first = true;
  Sequential model;
  model.Append<Lstm>(2, 4, options);
  model.Append<Linear>(4, 1);
  ASSERT_TRUE(model.Init(session_, 1, DType::kF64).ok());
  Adam::Options adam;
  adam.learning_rate = 0.05;
  Adam optimizer(model.parameters(), adam);
  TrainStep::Options step_options;
  step_options.varying = {0, 1};
  step_options.max_size = 6;
  TrainStep step(
      &model, &optimizer, [&](const Tensors& in) { return MseLoss(model(in[0]), in[1]); },
      step_options);
  Doubles losses;
  for (int i = 0; i < 12; ++i) {
    const int64_t rows = i % 3 == 2 ? 3 : 6;
    const auto loss = step({Numbers({rows, 3, 2}, 1), Numbers({rows, 3, 1}, 2) * 0.1});
    ASSERT_TRUE(loss.ok()) << loss.status();
    losses.push_back(Values<double>(*loss)[0]);
  }
  EXPECT_LT(losses[10], losses[0]);
  EXPECT_EQ(step.traces(), 1);
}

TEST_F(RnnTest, TheFirstErrorOfItsLayersIsTheResults) {
  RnnOptions options;
  options.layers = 3;
  options.dropout = 0.5;
  for (const bool lstm : {true, false}) {
    for (const bool bidirectional : {false, true}) {
      options.bidirectional = bidirectional;
      const auto layer = Make(lstm, 3, 2, options);
      ASSERT_TRUE(layer->Init(session_, 1, DType::kBF16).ok());
      const RnnResult result = (*layer)(Numbers({2, 1, 3}), Tensor());
      EXPECT_THAT(std::string(result.output.status().message()),
                  HasSubstr("matmul: expected inputs of one dtype"));
      EXPECT_EQ(result.hidden.status(), result.output.status());
      EXPECT_EQ(result.cell.status(), result.output.status());
    }
  }
}

TEST_F(RnnTest, OfALostSessionItGivesTheSessionsError) {
  for (const bool batch_first : {false, true}) {
    Session session = daemon_.Open();
    RnnOptions options;
    options.layers = 2;
    options.batch_first = batch_first;
    Gru layer(3, 2, options);
    ASSERT_TRUE(layer.Init(session, 1, DType::kF64).ok());
    const Tensor x = chorus::testing::Numbers(session, {2, 2, 3}, 0);
    ASSERT_TRUE(session.Close().ok());
    EXPECT_EQ(ErrorOf(layer(x).status()).reason, Reason::kSessionLost);
  }
}

TEST_F(RnnTest, RefusesWhatDoesNotFit) {
  Sequential model;
  Lstm& lstm = model.Append<Lstm>(3, 2);
  EXPECT_EQ(ErrorOf(lstm(Numbers({1, 1, 3}), Tensor()).output.status()).reason,
            Reason::kWrongState);
  ASSERT_TRUE(model.Init(session_, 1, DType::kF64).ok());
  const auto text = [](const Tensor& x) {
    EXPECT_EQ(ErrorOf(x.status()).reason, Reason::kBadType);
    return std::string(x.status().message());
  };
  for (const Shape& shape : {Shape{4, 3}, Shape{0, 1, 3}, Shape{2, 1, 4}}) {
    EXPECT_THAT(text(model(Numbers(shape))),
                HasSubstr("0 (Lstm): expected [steps, batch, 3] with a step at least, got f64["));
  }
  const Tensor x = Numbers({2, 1, 3});
  EXPECT_THAT(text(lstm(x, Numbers({1, 2, 2})).output),
              HasSubstr("0 (Lstm): expected a state [1, 1, 2] of x's dtype, got f64[1,2,2]"));
  EXPECT_THAT(text(lstm(x, Tensor(), Numbers({2})).hidden), HasSubstr("got f64[2]"));
  EXPECT_TRUE(model(Numbers({2, 0, 3})).status().ok());
  Gru gru(3, 2);
  ASSERT_TRUE(gru.Init(session_, 1, DType::kF64).ok());
  EXPECT_THAT(text(gru(x, Tensor(), Numbers({1, 1, 2})).output), HasSubstr("Gru: has no cell"));
  EXPECT_THAT(std::string(lstm.Call({x, Numbers({1, 1, 2})}, {}).status().message()),
              HasSubstr("and a tuple of hidden and cell"));
  RnnOptions options;
  options.layers = 0;
  Gru none(3, 2, options);
  EXPECT_THAT(std::string(none.Init(session_, 1).message()), HasSubstr("layers=0"));
  options.layers = 2;
  options.dropout = 2;
  Gru drops(3, 2, options);
  EXPECT_THAT(std::string(drops.Init(session_, 1).message()), HasSubstr("a probability, got 2"));
}

}  // namespace
}  // namespace nn
}  // namespace chorus
