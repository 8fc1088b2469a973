#include "chorus/nn/optim.h"

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "chorus/chorus.h"
#include "chorus/functional/math.h"
#include "chorus/nn/init.h"
#include "chorus/nn/layers.h"
#include "client/internal/access.h"
#include "client/testing/fake_daemon.h"
#include "client/testing/values.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace nn {
namespace {

using chorus::testing::FakeDaemon;
using chorus::testing::Values;
using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pointwise;

using Doubles = std::vector<double>;

auto Near(const Doubles& values) { return Pointwise(DoubleNear(1e-12), values); }

class Parameters : public Module {
 public:
  Parameters() : Module("Parameters") {
    a_ = AddParameter("a", {2}, init::Zeros());
    b_ = AddParameter("b", {1}, init::Zeros());
  }
  Variable a_;
  Variable b_;
};

class OptimTest : public ::testing::Test {
 protected:
  OptimTest() { Start(DType::kF64); }
  // Anew, with parameters and gradients of this type.
  void Start(DType dtype) {
    dtype_ = dtype;
    EXPECT_TRUE(module_.Init(session_, 1, dtype).ok());
    module_.a_.Set(Of({1, -2}));
    module_.b_.Set(Of({0.5}));
  }
  Tensor Of(const Doubles& values) { return Cast(F64(values), dtype_); }
  double Rounded(double x) const {
    if (dtype_ == DType::kF16) return F16(static_cast<float>(x));
    if (dtype_ == DType::kBF16) return BF16(static_cast<float>(x));
    return x;
  }
  static Doubles Read(const Tensor& x) { return Values<double>(Cast(x, DType::kF64)); }
  Tensor F64(const Doubles& values) {
    return FromHost<double>(session_, values, {static_cast<int64_t>(values.size())});
  }
  // Gradients that change from step to step and have both signs.
  static double GradientAt(int step, size_t i) {
    return std::sin(1.3 * step + 2.1 * static_cast<double>(i));
  }
  // Steps with these gradients, each compared with `rule` on numbers: of the index of the number,
  // its value, its gradient and the count of the step from 1.
  void ExpectSteps(Optimizer* optimizer,
                   const std::function<double(size_t i, double p, double g, int t)>& rule) {
    Doubles values = {1, -2, 0.5};
    for (int t = 1; t <= 5; ++t) {
      Doubles g;
      for (size_t i = 0; i < 3; ++i) {
        g.push_back(Rounded(GradientAt(t, i)));
        values[i] = Rounded(rule(i, values[i], g[i], t));
      }
      const absl::Status status = optimizer->Step({Of({g[0], g[1]}), Of({g[2]})});
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_THAT(Read(module_.a_()), Near({values[0], values[1]})) << "step " << t;
      EXPECT_THAT(Read(module_.b_()), Near({values[2]})) << "step " << t;
    }
  }

  FakeDaemon daemon_;
  const Session session_ = daemon_.Open();
  DType dtype_ = DType::kF64;
  Parameters module_;
};

TEST_F(OptimTest, SgdIsPlainWithMomentumAndWithNesterovs) {
  for (const bool nesterov : {false, true}) {
    module_.a_.Set(F64({1, -2}));
    module_.b_.Set(F64({0.5}));
    Sgd::Options options;
    options.learning_rate = 0.1;
    options.momentum = 0.9;
    options.nesterov = nesterov;
    options.weight_decay = 0.01;
    Sgd sgd(module_.parameters(), options);
    Doubles buffer(3, 0.0);
    ExpectSteps(&sgd, [&](size_t i, double p, double g, int) {
      g += 0.01 * p;
      buffer[i] = 0.9 * buffer[i] + g;
      return p - 0.1 * (nesterov ? g + 0.9 * buffer[i] : buffer[i]);
    });
  }
  module_.a_.Set(F64({1, -2}));
  module_.b_.Set(F64({0.5}));
  Sgd plain(module_.parameters(), {});
  EXPECT_EQ(plain.slots(), 0);
  ExpectSteps(&plain, [](size_t, double p, double g, int) { return p - 0.1 * g; });
}

TEST_F(OptimTest, AdamAndItsKinds) {
  for (const bool decoupled : {false, true}) {
    for (const bool amsgrad : {false, true}) {
      module_.a_.Set(F64({1, -2}));
      module_.b_.Set(F64({0.5}));
      AdamW::Options options;
      options.learning_rate = 0.02;
      options.decoupled = decoupled;
      options.amsgrad = amsgrad;
      AdamW adam(module_.parameters(), options);
      Doubles m(3, 0.0);
      Doubles v(3, 0.0);
      Doubles largest(3, 0.0);
      ExpectSteps(&adam, [&](size_t i, double p, double g, int t) {
        if (decoupled) {
          p -= 0.02 * 0.01 * p;
        } else {
          g += 0.01 * p;
        }
        m[i] = 0.9 * m[i] + 0.1 * g;
        v[i] = 0.999 * v[i] + 0.001 * g * g;
        largest[i] = std::max(largest[i], v[i]);
        const double of = (amsgrad ? largest[i] : v[i]) / (1 - std::pow(0.999, t));
        return p - 0.02 * (m[i] / (1 - std::pow(0.9, t))) / (std::sqrt(of) + 1e-8);
      });
    }
  }
}

TEST_F(OptimTest, AdagradAddsUp) {
  Adagrad::Options options;
  options.learning_rate = 0.1;
  options.learning_rate_decay = 0.2;
  options.weight_decay = 0.01;
  Adagrad adagrad(module_.parameters(), options);
  Doubles sum(3, 0.0);
  ExpectSteps(&adagrad, [&](size_t i, double p, double g, int t) {
    g += 0.01 * p;
    sum[i] += g * g;
    return p - 0.1 / (1 + (t - 1) * 0.2) * g / (std::sqrt(sum[i]) + 1e-10);
  });
}

// Neither numbers such as 0.9, which bf16 has as 0.8984, nor what comes between are rounded.
TEST_F(OptimTest, HalfTypesAreComputedInF32AndRoundedOnce) {
  for (const DType half : {DType::kF16, DType::kBF16}) {
    SCOPED_TRACE(DTypeName(half));
    Start(half);
    Sgd::Options sgd_options;
    sgd_options.momentum = 0.9;
    sgd_options.nesterov = true;
    sgd_options.weight_decay = 0.01;
    Sgd sgd(module_.parameters(), sgd_options);
    Doubles buffer(3, 0.0);
    ExpectSteps(&sgd, [&](size_t i, double p, double g, int) {
      g += 0.01 * p;
      const double next = 0.9 * buffer[i] + g;
      buffer[i] = Rounded(next);
      return p - 0.1 * (g + 0.9 * next);
    });
    Start(half);
    AdamW::Options adam_options;
    adam_options.learning_rate = 0.02;
    AdamW adam(module_.parameters(), adam_options);
    Doubles m(3, 0.0);
    Doubles v(3, 0.0);
    ExpectSteps(&adam, [&](size_t i, double p, double g, int t) {
      const double next_m = 0.9 * m[i] + 0.1 * g;
      const double next_v = 0.999 * v[i] + 0.001 * g * g;
      m[i] = Rounded(next_m);
      v[i] = Rounded(next_v);
      p -= 0.02 * 0.01 * p;
      return p - 0.02 * (next_m / (1 - std::pow(0.9, t))) /
                     (std::sqrt(next_v / (1 - std::pow(0.999, t))) + 1e-8);
    });
    Start(half);
    Adagrad::Options adagrad_options;
    adagrad_options.learning_rate = 0.1;
    Adagrad adagrad(module_.parameters(), adagrad_options);
    Doubles sum(3, 0.0);
    ExpectSteps(&adagrad, [&](size_t i, double p, double g, int) {
      const double next = sum[i] + g * g;
      sum[i] = Rounded(next);
      return p - 0.1 * g / (std::sqrt(next) + 1e-10);
    });
    EXPECT_EQ((*adagrad.State())[0].slots[0].dtype(), half);
  }
}

// As a device has them that alone knows which step it is.
TEST_F(OptimTest, TheRuleTakesNumbersOfF64BesideAnyType) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    Start(dtype);
    Adam::Options options;
    options.learning_rate = 0.7;
    Adam adam(module_.parameters(), options);
    const Tensor gradient = Of({0.5, -3});
    std::vector<Operand> numbers;
    for (const Tensor& number : adam.NumbersOf(Scalar(session_, 0.7), Scalar(session_, 1.0))) {
      numbers.emplace_back(number);
    }
    const Tensor zeros = Of({0, 0});
    std::vector<Tensor> state = {zeros, zeros};
    const Tensor next = adam.Next(0, module_.a_(), gradient, numbers, &state);
    ASSERT_TRUE(adam.Step({gradient, Tensor()}).ok());
    EXPECT_EQ(next.dtype(), dtype) << next.status();
    EXPECT_EQ(Read(next), Read(module_.a_()));
    EXPECT_EQ(Read(state[1]), Read((*adam.State())[0].slots[1]));
  }
}

TEST_F(OptimTest, GroupsHaveOptionsOfTheirOwn) {
  ParameterGroup a;
  a.parameters = {module_.a_};
  ParameterGroup b;
  b.parameters = {module_.b_};
  b.learning_rate = 1;
  b.weight_decay = 0;
  Sgd::Options options;
  options.weight_decay = 0.5;
  Sgd sgd({a, b}, options);
  sgd.SetSchedule(StepDecay(2));
  ExpectSteps(&sgd, [](size_t i, double p, double g, int t) {
    const double factor = std::pow(0.1, (t - 1) / 2);
    return i < 2 ? p - 0.1 * factor * (g + 0.5 * p) : p - factor * g;
  });
}

// By Backward; who has no gradient stays.
TEST_F(OptimTest, AStepTakesGradientsAndLeavesNone) {
  Sgd::Options options;
  options.momentum = 0.5;
  Sgd sgd(module_.parameters(), options);
  ASSERT_TRUE(Backward(Sum(module_.a_() * module_.a_())).ok());
  ASSERT_TRUE(sgd.Step().ok());
  EXPECT_THAT(Values<double>(module_.a_()), Near({0.8, -1.6}));
  EXPECT_THAT(Values<double>(module_.b_()), Near({0.5}));
  EXPECT_EQ(sgd.steps(0), 1);
  EXPECT_EQ(sgd.steps(1), 0);
  EXPECT_FALSE(module_.a_.grad().defined());
  EXPECT_TRUE(module_.a_().requires_grad());
  module_.b_.RequireGrad(false);
  ASSERT_TRUE(sgd.Step({Tensor(), F64({1})}).ok());
  EXPECT_THAT(Values<double>(module_.b_()), Near({0.5}));
  EXPECT_EQ(ErrorOf(sgd.Step({Tensor()})).reason, Reason::kBadType);
  EXPECT_FALSE(sgd.Step({F64({1, 2, 3}), Tensor()}).ok());
  // Which would stretch, or be stretched.
  module_.b_.RequireGrad(true);
  for (const std::vector<Tensor>& gradients :
       {std::vector<Tensor>{Tensor(), F64({1, 2, 3})}, std::vector<Tensor>{F64({1}), Tensor()}}) {
    const absl::Status status = sgd.Step(gradients);
    EXPECT_THAT(std::string(status.message()), HasSubstr("expects a gradient of the parameter's"));
    EXPECT_THAT(ErrorOf(status).source, HasSubstr("optim_test.cc"));
  }
  EXPECT_THAT(Values<double>(module_.b_()), Near({0.5}));
  EXPECT_THAT(Values<double>(module_.a_()), Near({0.8, -1.6}));
}

// Its graph would go on from the state of its trace at every call.
TEST_F(OptimTest, AStepInACompiledFunctionIsRefused) {
  Linear layer(1, 1, /*bias=*/false);
  ASSERT_TRUE(layer.Init(session_, 1, DType::kF64).ok());
  Sgd::Options options;
  options.momentum = 0.9;
  Sgd sgd(layer.parameters(), options);
  Ema ema(layer.parameters(), 0.5);
  const auto calls = [&](const std::function<void()>& call) {
    const Compiled step = Compile([&](const std::vector<Tensor>& in) {
      const StateScope scope(layer, {in[0].Detach().RequireGrad()});
      EXPECT_TRUE(Backward(Sum(layer(in[1]))).ok());
      call();
      return scope.tensors();
    });
    return step.Run({layer.weight()(), Zeros(session_, DType::kF64, {1, 1})}).status();
  };
  const absl::Status of_step = calls([&] { sgd.Step().IgnoreError(); });
  EXPECT_EQ(ErrorOf(of_step).reason, Reason::kWrongState) << of_step;
  EXPECT_THAT(std::string(of_step.message()), HasSubstr("Optimizer::Step: not inside a compiled"));
  EXPECT_EQ(sgd.steps(0), 0);
  const absl::Status of_average = calls([&] { ema.Update(); });
  EXPECT_THAT(std::string(of_average.message()), HasSubstr("Ema::Update: not inside a compiled"));
  EXPECT_TRUE(ema.averages().empty());
}

// Its moments would have had the failed one's type.
TEST_F(OptimTest, AParameterThatHadFailedBeginsAnew) {
  Adam adam(module_.parameters(), Adam::Options());
  const Tensor before = module_.a_();
  module_.a_.Set(FromError(session_, MakeError(Reason::kQuota, "no names")));
  EXPECT_TRUE(adam.State().ok());
  module_.a_.Set(before);
  EXPECT_TRUE(adam.Step({F64({1, 1}), F64({1})}).ok());
  EXPECT_TRUE(module_.a_().Wait().ok()) << module_.a_().Wait();
}

// A compiled step gives the daemon what nobody else has a handle of.
TEST_F(OptimTest, StateIsOfHandlesOfItsOwn) {
  Adam adam(module_.parameters(), Adam::Options());
  const auto state = adam.State();
  const auto slots = adam.Slots();
  ASSERT_TRUE(state.ok() && slots.ok());
  for (size_t i = 0; i < slots->size(); ++i) {
    for (size_t s = 0; s < (*slots)[i].size(); ++s) {
      EXPECT_NE(internal::ImplOf((*state)[i].slots[s]), internal::ImplOf((*slots)[i][s]));
    }
  }
}

TEST_F(OptimTest, NormsTakeGradientsOfAllTypes) {
  const Tensor three = FromHost<float>(session_, {3}, {1});
  std::vector<Tensor> gradients = {three, F64({4}), Cast(three, DType::kBF16)};
  EXPECT_THAT(Values<double>(ClipGradNorm(&gradients, 1)), Near({std::sqrt(34.0)}));
  EXPECT_EQ(gradients[0].dtype(), DType::kF32);
  EXPECT_EQ(gradients[2].dtype(), DType::kBF16);
  EXPECT_NEAR(Values<double>(gradients[1])[0], 4 / std::sqrt(34.0), 1e-6);
}

TEST_F(OptimTest, Schedules) {
  const Schedule steps = StepDecay(3, 0.5);
  EXPECT_EQ(steps(2), 1);
  EXPECT_EQ(steps(6), 0.25);
  const Schedule cosine = CosineDecay(10, 0.2);
  EXPECT_DOUBLE_EQ(cosine(0), 1);
  EXPECT_DOUBLE_EQ(cosine(5), 0.6);
  EXPECT_DOUBLE_EQ(cosine(99), 0.2);
  const Schedule warm = WarmUp(4, cosine);
  EXPECT_DOUBLE_EQ(warm(0), 0.25);
  EXPECT_DOUBLE_EQ(warm(3), 1);
  EXPECT_DOUBLE_EQ(warm(9), 0.6);
  EXPECT_DOUBLE_EQ(WarmUp(2)(50), 1);
}

TEST_F(OptimTest, Clipping) {
  std::vector<Tensor> gradients = {F64({3, 0}), Tensor(), F64({-4})};
  EXPECT_THAT(Values<double>(ClipGradNorm(&gradients, 10)), Near({5}));
  EXPECT_THAT(Values<double>(gradients[0]), Near({3, 0}));
  EXPECT_THAT(Values<double>(ClipGradNorm(&gradients, 1)), Near({5}));
  EXPECT_THAT(Values<double>(gradients[2]), Near({-4 / (5 + 1e-6)}));
  EXPECT_FALSE(gradients[1].defined());
  gradients = {F64({3, -0.25}), F64({-4})};
  ClipGradValue(&gradients, 0.5);
  EXPECT_THAT(Values<double>(gradients[0]), Near({0.5, -0.25}));
  EXPECT_THAT(Values<double>(gradients[1]), Near({-0.5}));
  std::vector<Tensor> none = {Tensor()};
  EXPECT_FALSE(ClipGradNorm(&none, 1).defined());
}

TEST_F(OptimTest, ClippingOfHalfTypesIsInF32) {
  Start(DType::kF16);
  std::vector<Tensor> gradients = {Of({300}), Of({-400})};  // f16 has no number for a square
  const Tensor norm = ClipGradNorm(&gradients, 1);
  EXPECT_EQ(norm.dtype(), DType::kF32);
  EXPECT_THAT(Read(norm), Near({500}));
  EXPECT_EQ(gradients[0].dtype(), DType::kF16);
  EXPECT_THAT(Read(gradients[0]), Near({Rounded(0.6)}));
  EXPECT_THAT(Read(gradients[1]), Near({Rounded(-0.8)}));
  Start(DType::kBF16);
  gradients.assign(300, Of({1}));  // beyond 256 bf16 does not count by ones
  EXPECT_NEAR(Read(ClipGradNorm(&gradients, 1))[0], std::sqrt(300.0), 1e-5);
  EXPECT_THAT(Read(gradients[299]), Near({Rounded(1 / std::sqrt(300.0))}));
  gradients = {Of({3}), Cast(F64({4}), DType::kF32)};
  EXPECT_THAT(Read(GradNorm(gradients)), Near({5}));
}

TEST_F(OptimTest, LossScalesDivideHalfTypesInF32) {
  Start(DType::kF16);
  std::vector<Tensor> gradients = {Of({4096})};  // f16 has no number for the scale
  const Tensor finite = LossScaler::Unscale(&gradients, Scalar(session_, 65536.0f));
  EXPECT_THAT(Values<bool>(finite), ElementsAre(true));
  EXPECT_THAT(Read(gradients[0]), Near({0.0625}));
}

TEST_F(OptimTest, AnAverageForgetsAndCanBeSwappedIn) {
  Ema ema(module_.parameters(), 0.75);
  ema.Update();
  module_.b_.Set(F64({4.5}));
  ema.Update();
  EXPECT_THAT(Values<double>(ema.averages()[1]), Near({1.5}));
  ema.Swap();
  EXPECT_THAT(Values<double>(module_.b_()), Near({1.5}));
  EXPECT_TRUE(module_.b_().requires_grad());
  ema.Swap();
  EXPECT_THAT(Values<double>(module_.b_()), Near({4.5}));

  Start(DType::kBF16);
  Ema half(module_.parameters(), 0.9);
  module_.b_.Set(Of({7}));
  half.Update();
  module_.b_.Set(Of({-3}));
  half.Update();
  EXPECT_EQ(half.averages()[1].dtype(), DType::kBF16);
  EXPECT_THAT(Read(half.averages()[1]), Near({6}));
}

TEST_F(OptimTest, OptionsThatMakeNoSenseAreRefused) {
  const auto expect = [this](Optimizer* optimizer, const std::string& text) {
    const absl::Status status = optimizer->Step({F64({1, 1}), F64({1})});
    EXPECT_EQ(ErrorOf(status).reason, Reason::kBadType);
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
    EXPECT_FALSE(optimizer->State().ok());
  };
  Sgd::Options sgd;
  sgd.learning_rate = -1;
  Sgd negative(module_.parameters(), sgd);
  expect(&negative, "a learning rate from 0, got -1");
  sgd.learning_rate = 1;
  sgd.nesterov = true;
  Sgd nesterov(module_.parameters(), sgd);
  expect(&nesterov, "a momentum for Nesterov's");
  Adam::Options adam;
  adam.beta2 = 1;
  Adam beta(module_.parameters(), adam);
  expect(&beta, "a beta in [0, 1), got 1");
  std::vector<ParameterGroup> groups = OneGroup(module_.parameters());
  groups[0].learning_rate = -1;
  Sgd of_group(groups, {});
  expect(&of_group, "a group's learning rate from 0, got -1");
  groups[0].learning_rate = 0;
  groups[0].weight_decay = std::nan("");
  Sgd no_decay(groups, {});
  expect(&no_decay, "a group's weight decay that is a number");
  Sgd twice({module_.a_, module_.b_, module_.a_}, {});
  expect(&twice, "each parameter once");
}

}  // namespace
}  // namespace nn
}  // namespace chorus
