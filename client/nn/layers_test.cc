#include "chorus/nn/layers.h"

#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "chorus/chorus.h"
#include "chorus/functional/nn.h"
#include "chorus/nn/rnn.h"
#include "client/nn/testing/layer_gradients.h"
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
using nn::testing::ExpectLayerGradients;
using ::testing::DoubleNear;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pointwise;

using Doubles = std::vector<double>;

auto Near(const Doubles& values) { return Pointwise(DoubleNear(1e-12), values); }

class LayersTest : public ::testing::Test {
 protected:
  Tensor Numbers(const Shape& shape, int seed = 0) {
    return chorus::testing::Numbers(session_, shape, seed);
  }

  FakeDaemon daemon_;
  const Session session_ = daemon_.Open();
};

TEST_F(LayersTest, LinearIsXTimesTheTransposePlusBias) {
  Linear linear(3, 2);
  ASSERT_TRUE(linear.Init(session_, 1, DType::kF64).ok());
  for (const double value : Values<double>(linear.weight()())) {
    EXPECT_LE(std::abs(value), 1 / std::sqrt(3.0));
  }
  linear.weight().Set(FromHost<double>(session_, {1, 2, 3, 4, 5, 6}, {2, 3}));
  linear.bias().Set(FromHost<double>(session_, {10, 20}, {2}));
  const Tensor row = FromHost<double>(session_, {1, 0, -1}, {3});
  EXPECT_THAT(Values<double>(linear(row)), ElementsAre(8, 18));
  EXPECT_EQ(linear(row).shape(), Shape({2}));
  EXPECT_EQ(linear(Numbers({4, 5, 3})).shape(), Shape({4, 5, 2}));
  EXPECT_EQ(linear(Numbers({0, 3})).shape(), Shape({0, 2}));
  const Tensor wrong = linear(Numbers({2, 4}));
  EXPECT_EQ(ErrorOf(wrong.status()).reason, Reason::kBadType);
  EXPECT_THAT(std::string(wrong.status().message()),
              HasSubstr("Linear: expected [..., 3], got f64[2,4]"));
}

// As one of no columns is the bias alone.
TEST_F(LayersTest, LinearTakesWhatHasNoColumns) {
  Linear linear(0, 2);
  ASSERT_TRUE(linear.Init(session_, 1).ok());
  for (const Shape& shape : {Shape{6, 0}, Shape{2, 3, 0}, Shape{0}, Shape{2, 0, 0}}) {
    const Tensor y = linear(Zeros(session_, DType::kF32, shape));
    ASSERT_TRUE(y.Wait().ok()) << y.Wait();
    Shape expected = shape;
    expected.back() = 2;
    EXPECT_EQ(y.shape(), expected);
  }
}

TEST_F(LayersTest, LinearHasGradients) {
  Linear linear(3, 2);
  ExpectLayerGradients(&linear, Numbers({2, 2, 3}));
  Linear plain(2, 2, /*bias=*/false);
  ExpectLayerGradients(&plain, Numbers({2}));
}

TEST_F(LayersTest, EmbeddingTakesRows) {
  Embedding embedding(4, 2, /*padding=*/1);
  ASSERT_TRUE(embedding.Init(session_, 1, DType::kF64).ok());
  const Doubles table = Values<double>(embedding.weight()());
  EXPECT_EQ(table[2], 0);
  EXPECT_EQ(table[3], 0);
  EXPECT_NE(table[4], 0);
  const Tensor words = FromHost<int32_t>(session_, {3, 1, 3}, {3});
  const Tensor rows = embedding(words);
  EXPECT_THAT(Values<double>(rows), ElementsAre(table[6], table[7], 0, 0, table[6], table[7]));
  ASSERT_TRUE(Backward(Sum(rows)).ok());
  EXPECT_THAT(Values<double>(embedding.weight().grad()), ElementsAre(0, 0, 0, 0, 0, 0, 2, 2));
  Embedding wrong(4, 2, 4);
  EXPECT_THAT(std::string(wrong.Init(session_, 1).message()), HasSubstr("got 4"));
}

TEST_F(LayersTest, PositionsAddTheirRows) {
  PositionEmbedding places(4, 2);
  ASSERT_TRUE(places.Init(session_, 1, DType::kF64).ok());
  const Tensor table = FromHost<double>(session_, {1, 2, 3, 4, 5, 6, 7, 8}, {4, 2});
  places.variables()[0].Set(table);
  const Tensor zeros = Zeros(session_, DType::kF64, {2, 3, 2});
  EXPECT_THAT(Values<double>(places(zeros)), ElementsAre(1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6));
  EXPECT_THAT(std::string(places(Numbers({5, 2})).status().message()),
              HasSubstr("expected [..., n, 2] with n to 4, got f64[5,2]"));
  EXPECT_FALSE(places(Numbers({3, 3})).status().ok());
  PositionEmbedding other(3, 2);
  ExpectLayerGradients(&other, Numbers({2, 3, 2}));
  // Of any length, the largest included.
  CompileOptions options;
  options.varying = {{0, 0}};
  options.max_size = 4;
  const Compiled compiled = Compile(
      [&places](const std::vector<Tensor>& in) { return std::vector<Tensor>{places(in[0])}; },
      options);
  for (const int64_t n : {4, 3, 1}) {
    const auto out = compiled.Run({Zeros(session_, DType::kF64, {n, 2})});
    ASSERT_TRUE(out.ok()) << out.status();
    EXPECT_EQ(Values<double>((*out)[0]), Values<double>(Slice(table, 0, 0, n))) << n;
  }
}

TEST_F(LayersTest, NormsNormalise) {
  const Tensor x = Numbers({2, 6});
  LayerNorm layer(6);
  ASSERT_TRUE(layer.Init(session_, 1, DType::kF64).ok());
  const Doubles y = Values<double>(layer(x));
  const Doubles in = Values<double>(x);
  for (size_t row = 0; row < 2; ++row) {
    double mean = 0;
    double square = 0;
    for (size_t i = 0; i < 6; ++i) mean += in[6 * row + i] / 6;
    for (size_t i = 0; i < 6; ++i) square += std::pow(in[6 * row + i] - mean, 2) / 6;
    for (size_t i = 0; i < 6; ++i) {
      EXPECT_NEAR(y[6 * row + i], (in[6 * row + i] - mean) / std::sqrt(square + 1e-5), 1e-12);
    }
  }
  // Of all channels in one group it is the norm of the whole sample.
  GroupNorm group(1, 3);
  ASSERT_TRUE(group.Init(session_, 1, DType::kF64).ok());
  EXPECT_THAT(Values<double>(group(Reshape(x, {2, 3, 2}))), Near(y));
  RmsNorm rms(6);
  ASSERT_TRUE(rms.Init(session_, 1, DType::kF64).ok());
  const Doubles z = Values<double>(rms(x));
  double square = 0;
  for (size_t i = 0; i < 6; ++i) square += in[i] * in[i] / 6;
  EXPECT_NEAR(z[4], in[4] / std::sqrt(square + 1e-6), 1e-12);

  EXPECT_THAT(std::string(layer(Numbers({2, 5})).status().message()),
              HasSubstr("LayerNorm: expected [..., 6], got f64[2,5]"));
  EXPECT_THAT(std::string(group(Numbers({2, 4, 2})).status().message()),
              HasSubstr("GroupNorm: expected [n, 3, ...], got f64[2,4,2]"));
  EXPECT_FALSE(rms(Numbers({2, 5})).status().ok());
  EXPECT_FALSE(GroupNorm(2, 3).Init(session_, 1).ok());
}

// Computed in f32, whether the parameters are of the half type or of f32.
TEST_F(LayersTest, NormsRoundHalfTypesOnce) {
  LayerNorm layer(6);
  RmsNorm rms(6);
  GroupNorm group(2, 6);
  for (Module* const norm :
       {static_cast<Module*>(&layer), static_cast<Module*>(&rms), static_cast<Module*>(&group)}) {
    for (const DType half : {DType::kF16, DType::kBF16}) {
      const Tensor x = Cast(Numbers({3, 6}), half);
      ASSERT_TRUE(norm->Init(session_, 1).ok());
      const Tensor expected = Cast((*norm)(Cast(x, DType::kF32)), half);
      for (const DType parameters : {DType::kF32, half}) {
        ASSERT_TRUE(norm->Init(session_, 1, parameters).ok());
        const Tensor y = (*norm)(x);
        EXPECT_EQ(y.dtype(), half) << y.status();
        EXPECT_EQ(Values<double>(Cast(y, DType::kF64)),
                  Values<double>(Cast(expected, DType::kF64)));
      }
    }
  }
  // No other types meet.
  ASSERT_TRUE(layer.Init(session_, 1).ok());
  EXPECT_THAT(std::string(layer(Numbers({2, 6})).status().message()),
              HasSubstr("normalize: expected f64[6] as input 2, got f32[6]"));
  EXPECT_THAT(std::string(LayerNormalize(Numbers({2, 6}), 3, 1e-5).status().message()),
              HasSubstr("moments: expected the first axis and the end of a range within the 2 "
                        "dimensions of f64[2,6] as 'rows', got [0,-1]"));
}

TEST_F(LayersTest, NormsHaveGradients) {
  LayerNorm layer(Shape{2, 3});
  ExpectLayerGradients(&layer, Numbers({2, 2, 3}));
  RmsNorm rms(3);
  ExpectLayerGradients(&rms, Numbers({2, 3}));
  GroupNorm group(2, 4);
  ExpectLayerGradients(&group, Numbers({2, 4, 2}));
}

TEST_F(LayersTest, ActivationsAreTheirFormulas) {
  const Tensor x = FromHost<double>(session_, {-2, -0.5, 0, 1, 3}, {5});
  const Doubles exact = Values<double>(Gelu(x));
  const Doubles tanh = Values<double>(Gelu(x, GeluForm::kTanh));
  const Doubles silu = Values<double>(Silu(x));
  const Doubles in = Values<double>(x);
  for (size_t i = 0; i < in.size(); ++i) {
    EXPECT_NEAR(exact[i], in[i] * 0.5 * (1 + std::erf(in[i] / std::sqrt(2.0))), 1e-14);
    EXPECT_NEAR(tanh[i],
                0.5 * in[i] *
                    (1 + std::tanh(std::sqrt(2 / M_PI) * (in[i] + 0.044715 * std::pow(in[i], 3)))),
                1e-14);
    EXPECT_NEAR(silu[i], in[i] / (1 + std::exp(-in[i])), 1e-14);
  }
  ExpectGradients([](const std::vector<Tensor>& in) { return Gelu(in[0]); }, {x});
  ExpectGradients([](const std::vector<Tensor>& in) { return Gelu(in[0], GeluForm::kTanh); }, {x});
  ExpectGradients([](const std::vector<Tensor>& in) { return Silu(in[0]); }, {x});
}

// Values and gradients are those of f32, rounded: neither a number nor what comes between is.
TEST_F(LayersTest, FunctionsRoundHalfTypesOnce) {
  const Doubles values = {-300, -17, -3, -0.3, 0.7, 1.75, 5, 300};
  const std::function<Tensor(const Tensor&)> functions[] = {
      [](const Tensor& x) { return Gelu(x); },
      [](const Tensor& x) { return Gelu(x, GeluForm::kTanh); },
      [](const Tensor& x) { return Silu(x); },
      [](const Tensor& x) { return DropElements(x, 0.1, 3, 0); },
  };
  for (const auto& function : functions) {
    for (const DType half : {DType::kF16, DType::kBF16}) {
      SCOPED_TRACE(DTypeName(half));
      const auto run = [&](DType dtype) {
        const Tensor x =
            Cast(Cast(FromHost<double>(session_, values, {8}), half), dtype).RequireGrad();
        const Tensor y = function(x);
        EXPECT_EQ(y.dtype(), dtype) << y.status();
        EXPECT_TRUE(Backward(Sum(y)).ok());
        return Values<double>(Cast(Cast(Concat({y.Detach(), x.grad()}, 0), half), DType::kF64));
      };
      EXPECT_EQ(run(half), run(DType::kF32));
    }
  }
  const Tensor x = Cast(FromHost<double>(session_, {-3}, {1}), DType::kBF16);
  EXPECT_NEAR(Values<double>(Cast(Gelu(x), DType::kF64))[0], -0.00405, 2e-5);
}

TEST_F(LayersTest, DropoutDropsByScopeAndOnlyInTraining) {
  Dropout dropout(0.25);
  const Tensor x = FromHost<double>(session_, Doubles(4000, 3.0), {4000});
  const auto draw = [&](uint64_t seed, int64_t offset) {
    const RandomScope scope(seed, offset);
    return Values<double>(dropout(x));
  };
  const Doubles first = draw(1, 1);
  int kept = 0;
  for (const double value : first) {
    EXPECT_TRUE(value == 0 || value == 4) << value;
    kept += value != 0;
  }
  EXPECT_NEAR(kept, 3000, 150);
  EXPECT_EQ(draw(1, 1), first);
  EXPECT_NE(draw(2, 1), first);
  EXPECT_NE(draw(1, 2), first);
  {
    const RandomScope scope(1, 1);
    dropout(x);
    EXPECT_NE(Values<double>(dropout(x)), first);  // the second call of the scope
  }
  EXPECT_NE(Values<double>(dropout(x)), Values<double>(dropout(x)));
  dropout.Eval();
  EXPECT_EQ(draw(1, 1), Values<double>(x));
  EXPECT_THAT(Values<double>(DropElements(Numbers({2}), 1, 0, 0)), ElementsAre(0, 0));
  EXPECT_FALSE(Dropout(1.5)(x).status().ok());
}

// The offset is an input of a compiled function: other numbers, one trace.
TEST_F(LayersTest, ElementsAreDroppedWithAProbability) {
  const Tensor x = Full(session_, DType::kF32, {4}, 1);
  for (const double p : {-1.0, 1.5, std::nan("")}) {
    EXPECT_THAT(std::string(DropElements(x, p, 0, 0).status().message()),
                HasSubstr("DropElements: expected a p from 0 to 1"));
  }
  EXPECT_THAT(Values<float>(DropElements(x, 1, 0, 0)), Each(0));
  EXPECT_THAT(Values<float>(DropElements(x, 0, 0, 0)), Each(1));
}

TEST_F(LayersTest, DropoutInACompiledFunctionChangesWithItsOffset) {
  Dropout dropout(0.5);
  const Compiled step = Compile([&dropout](const std::vector<Tensor>& in) {
    const RandomScope scope(9, in[1]);
    return std::vector<Tensor>{dropout(in[0])};
  });
  const Tensor x = Numbers({64});
  std::vector<Doubles> results;
  for (const int64_t offset : {1, 2, 1}) {
    const auto out = step.Run({x, Scalar<int64_t>(session_, offset)});
    ASSERT_TRUE(out.ok()) << out.status();
    results.push_back(Values<double>((*out)[0]));
  }
  EXPECT_EQ(results[0], results[2]);
  EXPECT_NE(results[0], results[1]);
  EXPECT_EQ(step.traces(), 1);
}

// Its numbers would be those of the trace, at every call.
TEST_F(LayersTest, DropoutInACompiledFunctionWantsAScopeOfTheFunction) {
  RnnOptions options;
  options.layers = 2;
  options.dropout = 0.5;
  Gru gru(3, 2, options);
  ASSERT_TRUE(gru.Init(session_, 1, DType::kF64).ok());
  Dropout dropout(0.5);
  const Tensor x = Numbers({4, 2, 3});
  for (Module* const module : std::vector<Module*>{&dropout, &gru}) {
    const Compiled step = Compile(
        [module](const std::vector<Tensor>& in) { return std::vector<Tensor>{(*module)(in[0])}; });
    for (const bool in_scope : {false, true}) {
      std::optional<RandomScope> scope;
      if (in_scope) scope.emplace(1, Scalar<int64_t>(session_, 2));
      const absl::Status refused = step.Run({x}).status();
      EXPECT_EQ(ErrorOf(refused).reason, Reason::kWrongState) << refused;
      EXPECT_THAT(std::string(refused.message()), HasSubstr("open a RandomScope in the function"));
    }
    module->Eval();
    EXPECT_TRUE(step.Run({x}).ok());
  }
}

TEST_F(LayersTest, AttentionWeighsValues) {
  const Tensor q = Numbers({1, 2, 3}, 1);
  const Tensor k = Numbers({1, 3, 3}, 2);
  const Tensor v = Numbers({1, 3, 2}, 3);
  const Doubles qs = Values<double>(q);
  const Doubles ks = Values<double>(k);
  const Doubles vs = Values<double>(v);
  Doubles expected;
  for (size_t i = 0; i < 2; ++i) {
    Doubles weights;
    double sum = 0;
    for (size_t j = 0; j < 2; ++j) {  // the third is masked
      double dot = 0;
      for (size_t d = 0; d < 3; ++d) dot += qs[3 * i + d] * ks[3 * j + d];
      weights.push_back(std::exp(dot / std::sqrt(3.0)));
      sum += weights.back();
    }
    for (size_t e = 0; e < 2; ++e) {
      expected.push_back((weights[0] * vs[e] + weights[1] * vs[2 + e]) / sum);
    }
  }
  const Tensor mask = FromHost<bool>(session_, {true, true, false}, {1, 1, 3});
  EXPECT_THAT(Values<double>(Attention(q, k, v, mask)), Near(expected));
  const Tensor added = FromHost<double>(session_, {0, 0, -INFINITY}, {3});
  EXPECT_THAT(Values<double>(Attention(q, k, v, added)), Near(expected));
  EXPECT_THAT(Values<bool>(CausalMask(session_, 3)),
              ElementsAre(true, false, false, true, true, false, true, true, true));
  ExpectGradients([](const std::vector<Tensor>& in) { return Attention(in[0], in[1], in[2]); },
                  {q, k, v});
}

// The mask is stretched, never the scores: one query would have five results.
TEST_F(LayersTest, AttentionRefusesAMaskThatIsLargerThanItsScores) {
  const Tensor q = Numbers({2, 1, 4}, 1);
  const Tensor k = Numbers({2, 5, 4}, 2);
  const auto masked = [&](const Shape& shape, bool added) {
    return Attention(q, k, k, Zeros(session_, added ? DType::kF64 : DType::kBool, shape));
  };
  for (const bool added : {false, true}) {
    for (const Shape& shape : {Shape({5, 5}), Shape({3, 1, 5}), Shape({1, 2, 1, 5}), Shape({4})}) {
      EXPECT_THAT(
          std::string(masked(shape, added).status().message()),
          HasSubstr("Attention: expected a mask that stretches to the scores, f64[2,1,5], got "));
    }
  }
  for (const Shape& shape : {Shape({}), Shape({5}), Shape({1, 5}), Shape({2, 1, 1})}) {
    EXPECT_EQ(Values<double>(masked(shape, true)), Values<double>(Attention(q, k, k)));
  }
}

TEST_F(LayersTest, CausalMaskOfATensorIsThatOfItsSteps) {
  EXPECT_EQ(Values<bool>(CausalMask(Numbers({2, 3, 4}))), Values<bool>(CausalMask(session_, 3)));
  EXPECT_THAT(std::string(CausalMask(Numbers({3})).status().message()),
              HasSubstr("CausalMask: expected [..., n, width], got f64[3]"));
  const Tensor failed = Numbers({2}) + Numbers({3});
  EXPECT_EQ(CausalMask(failed).status(), failed.status());
  EXPECT_EQ(Attention(failed, failed, failed, CausalMask(failed)).status(), failed.status());
}

// 1 / sqrt(3) is not rounded to bf16 before it counts: that would be another temperature.
TEST_F(LayersTest, AttentionOfHalfTypesHasTheirScaleInF32) {
  const Tensor q = Cast(Numbers({4, 3}, 1) * 40, DType::kBF16);
  const Tensor k = Cast(Numbers({5, 3}, 2), DType::kBF16);
  const Tensor v = Cast(Numbers({5, 2}, 3), DType::kBF16);
  const Tensor scaled = Cast(Cast(q, DType::kF32) * (1 / std::sqrt(3.0)), DType::kBF16);
  const Tensor expected = MatMul(Softmax(MatMul(scaled, Transpose(k))), v);
  EXPECT_EQ(Values<double>(Cast(Attention(q, k, v), DType::kF64)),
            Values<double>(Cast(expected, DType::kF64)));
}

// Heads do not see each other, and a query does not see what is masked.
TEST_F(LayersTest, MultiheadAttentionIsThatOfItsHeads) {
  MultiheadAttention attention(4, 2);
  ASSERT_TRUE(attention.Init(session_, 5, DType::kF64).ok());
  const Tensor x = Numbers({2, 3, 4});
  const Tensor y = attention(x);
  EXPECT_EQ(y.shape(), Shape({2, 3, 4}));
  const auto child = [&](size_t i) -> Module& { return *attention.children()[i].module; };
  Tensor heads;
  for (int64_t h = 0; h < 2; ++h) {
    const auto part = [&](size_t i) { return Slice(child(i)(x), 2, 2 * h, 2 * h + 2); };
    const Tensor head = Attention(part(0), part(1), part(2));
    heads = heads.defined() ? Concat({heads, head}, 2) : head;
  }
  EXPECT_THAT(Values<double>(y), Near(Values<double>(child(3)(heads))));
  // The first query sees the first key alone: what stands behind does not matter.
  const Tensor causal = CausalMask(session_, 3);
  const Tensor other = Concat({Slice(x, 1, 0, 1), Numbers({2, 2, 4}, 9)}, 1);
  EXPECT_THAT(Values<double>(Slice(attention(other, causal), 1, 0, 1)),
              Near(Values<double>(Slice(attention(x, x, x, causal), 1, 0, 1))));
  const Tensor wrong = attention(Numbers({2, 3, 5}));
  EXPECT_THAT(std::string(wrong.status().message()),
              HasSubstr("MultiheadAttention: expected [batch, n, 4], got f64[2,3,5]"));
  EXPECT_FALSE(MultiheadAttention(4, 3)(x).status().ok());
  EXPECT_FALSE(MultiheadAttention(4, 3)(x, causal).status().ok());
}

// Once, whether it is called with one tensor or with several.
TEST_F(LayersTest, MultiheadAttentionCallsItsHooks) {
  MultiheadAttention attention(4, 2);
  ASSERT_TRUE(attention.Init(session_, 5, DType::kF64).ok());
  const Tensor x = Numbers({2, 3, 4});
  const Doubles plain = Values<double>(attention(x));
  const Doubles masked = Values<double>(attention(x, CausalMask(x)));
  int calls = 0;
  attention.AddHook([&](Module& module, const Tensor& of, const Tensor& result) {
    EXPECT_EQ(module.kind(), "MultiheadAttention");
    EXPECT_EQ(Values<double>(of), Values<double>(x));
    ++calls;
    return result * 2;
  });
  EXPECT_THAT(Values<double>(attention(x) * 0.5), Near(plain));
  EXPECT_EQ(calls, 1);
  EXPECT_THAT(Values<double>(attention(x, CausalMask(x)) * 0.5), Near(masked));
  EXPECT_EQ(calls, 2);
}

TEST_F(LayersTest, MultiheadAttentionHasGradients) {
  MultiheadAttention attention(2, 2);
  ExpectLayerGradients(&attention, Numbers({1, 2, 2}));
}

TEST_F(LayersTest, LayersForSequential) {
  Sequential layers({std::make_shared<Linear>(4, 3), ReluLayer(), GeluLayer(), SiluLayer(),
                     TanhLayer(), SigmoidLayer(), FlattenLayer(), SoftmaxLayer()});
  ASSERT_TRUE(layers.Init(session_, 1, DType::kF64).ok());
  const Tensor y = layers(Numbers({2, 5, 4}));
  ASSERT_TRUE(y.status().ok()) << y.status();
  EXPECT_EQ(y.shape(), Shape({2, 15}));
  const Doubles values = Values<double>(y);
  double sum = 0;
  for (size_t i = 0; i < 15; ++i) sum += values[i];
  EXPECT_NEAR(sum, 1, 1e-12);
  const Tensor wrong = layers(Numbers({2, 5}));
  EXPECT_THAT(std::string(wrong.status().message()), HasSubstr("0 (Linear): expected [..., 4]"));
  const auto flatten = [this](int64_t begin, const Shape& shape) {
    return (*FlattenLayer(begin))(Numbers(shape));
  };
  EXPECT_EQ(flatten(-2, {2, 3, 4}).shape(), Shape({2, 12}));
  EXPECT_EQ(flatten(-1, {2, 3}).shape(), Shape({2, 3}));
  EXPECT_EQ(flatten(-1, {}).shape(), Shape({1}));
  EXPECT_EQ(flatten(1, {5}).shape(), Shape({5, 1}));
  EXPECT_FALSE(flatten(-4, {2, 3, 4}).status().ok());
}

}  // namespace
}  // namespace nn
}  // namespace chorus
