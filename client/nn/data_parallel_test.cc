#include "chorus/nn/data_parallel.h"

#include <algorithm>
#include <any>
#include <chrono>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chorus/chorus.h"
#include "chorus/functional/math.h"
#include "chorus/functional/nn.h"
#include "chorus/nn/conv.h"
#include "chorus/nn/init.h"
#include "chorus/nn/layers.h"
#include "chorus/nn/loss.h"
#include "chorus/nn/optim.h"
#include "chorus/nn/rnn.h"
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
using parallel::DeviceGroup;
using parallel::Nest;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Doubles = std::vector<double>;

// A module of any function of nests.
class Net : public Module {
 public:
  using Function =
      std::function<absl::StatusOr<Nest>(const Nest::Items& inputs, const Nest::Fields& keywords)>;
  explicit Net(Function function) : Module("Net"), function_(std::move(function)) {}
  absl::StatusOr<Nest> Call(const Nest::Items& inputs, const Nest::Fields& keywords) override {
    return function_(inputs, keywords);
  }
  Tensor Forward(const Tensor& x) override {
    const absl::StatusOr<Nest> result = function_({Nest(x)}, {});
    return result.ok() ? result->tensor() : FromError(x.device(), result.status());
  }

 private:
  const Function function_;
};

// x scale + shift; counts its calls, and keeps the mean of what it has seen, in training.
class Affine : public Module {
 public:
  explicit Affine(int64_t width)
      : Module("Affine"),
        scale_(AddParameter("scale", {width}, init::Uniform(1, 2))),
        shift_(AddParameter("shift", {width}, init::Zeros())),
        mean_(AddBuffer("mean", {}, init::Zeros())),
        calls_(AddBuffer("calls", {}, init::Zeros(), DType::kI64)) {}
  Tensor Forward(const Tensor& x) override {
    if (training()) {
      calls_.Set(calls_() + 1);
      mean_.Set(Mean(x));
    }
    return x * scale_() + shift_();
  }
  Variable scale_;
  Variable shift_;
  Variable mean_;
  Variable calls_;
};

void ExpectNear(const Tensor& got, const Tensor& expected, double tolerance = 1e-12) {
  EXPECT_EQ(got.shape(), expected.shape());
  const Doubles a = Values<double>(Cast(got, DType::kF64));
  const Doubles b = Values<double>(Cast(expected, DType::kF64));
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], tolerance) << "element " << i;
}

class DataParallelTest : public ::testing::Test {
 protected:
  explicit DataParallelTest(int devices = 3)
      : session_(daemon_.Open(devices)), devices_(*DeviceGroup::Create(session_)) {}
  ~DataParallelTest() override { EXPECT_EQ(daemon_.live_tapes(), 0); }

  DeviceGroup Of(const std::vector<int>& slots) { return *DeviceGroup::Create(session_, slots); }
  Tensor Row(const Doubles& values, int device = 0) {
    return FromHost<double>(session_.device(device), values, {static_cast<int64_t>(values.size())});
  }
  Tensor Ones(const Shape& shape, int device = 0, DType dtype = DType::kF64) {
    return Full(session_.device(device), dtype, shape, 1);
  }
  // Normally distributed; other numbers for each seed.
  Tensor Randn(const Shape& shape, int64_t seed = 1, int device = 0, DType dtype = DType::kF64) {
    return RandomNormal(session_.device(device), dtype, shape, seed);
  }
  // A module on a device, its parameters from one seed.
  template <typename T, typename... Args>
  std::shared_ptr<T> Make(int device, Args&&... args) {
    auto module = std::make_shared<T>(std::forward<Args>(args)...);
    const absl::Status status = module->Init(session_.device(device), 7, DType::kF64);
    EXPECT_TRUE(status.ok()) << status;
    return module;
  }
  // Of a module with regard to its parameters, and to `inputs`.
  std::vector<Tensor> Gradients(const Tensor& loss, const Module& module,
                                const std::vector<Tensor>& inputs = {}) {
    std::vector<Tensor> all;
    for (const Variable& parameter : module.parameters()) all.push_back(parameter());
    all.insert(all.end(), inputs.begin(), inputs.end());
    const auto gradients = Grad({loss}, all);
    EXPECT_TRUE(gradients.ok()) << gradients.status();
    return gradients.ok() ? *gradients : std::vector<Tensor>();
  }
  void ExpectSame(const std::vector<Tensor>& got, const std::vector<Tensor>& expected) {
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) ExpectNear(got[i], expected[i]);
  }

  FakeDaemon daemon_;
  const Session session_;
  const DeviceGroup devices_;
};

std::string TextOf(const absl::Status& status) { return std::string(status.message()); }

// --- test/cpp/api/parallel.cpp ------------------------------------------------------------------

class ParallelCppTest : public DataParallelTest {};

TEST_F(ParallelCppTest, DifferentiableScatter) {
  const DeviceGroup devices = Of({0, 1});
  const Tensor x = Ones({10}, 0).RequireGrad();
  const std::vector<Tensor> out = Scatter(x, devices);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[0].shape(), Shape({5}));
  EXPECT_EQ(out[1].shape(), Shape({5}));
  ExpectNear(Concat({out[0], CopyTo(out[1], session_.device(0))}, 0), x);
  const Tensor sum = CopyTo(out[0], session_.device(1)) + out[1];
  ASSERT_TRUE(Backward(sum, {{Ones({5}, 1)}}).ok());
  EXPECT_EQ(x.grad().device().slot(), 0);
  EXPECT_THAT(Values<double>(Sum(x.grad())), ElementsAre(10));
}

TEST_F(ParallelCppTest, DifferentiableGather) {
  const DeviceGroup devices = Of({0, 1});
  const Tensor a = Ones({5}, 0).RequireGrad();
  const Tensor b = Ones({5}, 1).RequireGrad();
  const Tensor out = Gather({a, b}, devices, 1);
  EXPECT_EQ(out.shape(), Shape({10}));
  EXPECT_EQ(out.device().slot(), 1);
  ASSERT_TRUE(Backward(out, {{Ones({10}, 1)}}).ok());
  EXPECT_EQ(a.grad().device().slot(), 0);
  EXPECT_EQ(b.grad().device().slot(), 1);
  EXPECT_THAT(Values<double>(Sum(a.grad())), ElementsAre(5));
  EXPECT_THAT(Values<double>(Sum(b.grad())), ElementsAre(5));
}

TEST_F(ParallelCppTest, Replicate) {
  const auto linear = Make<Linear>(0, 3, 4);
  const auto replicas = nn::Replicate(*linear, Of({0, 1}));
  ASSERT_TRUE(replicas.ok()) << replicas.status();
  ASSERT_EQ(replicas->size(), 2u);
  for (size_t d = 0; d < 2; ++d) {
    const std::vector<Variable> parameters = (*replicas)[d]->parameters();
    ASSERT_EQ(parameters.size(), 2u);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(parameters[i]().device().slot(), static_cast<int>(d));
      EXPECT_NE(parameters[i], linear->parameters()[i]);
      ExpectNear(parameters[i](), linear->parameters()[i]());
    }
  }
}

TEST_F(ParallelCppTest, ParallelApply) {
  const auto a = Make<Linear>(0, 3, 4);
  const std::shared_ptr<Module> b = *a->Clone(session_.device(1));
  const std::shared_ptr<Module> c = *a->Clone(session_.device(2));
  const auto out =
      nn::ParallelApply({a, b, c}, {{Ones({2, 3}, 0)}, {Ones({2, 3}, 1)}, {Ones({2, 3}, 2)}});
  ASSERT_TRUE(out.ok()) << out.status();
  ASSERT_EQ(out->size(), 3u);
  for (int d = 0; d < 3; ++d) {
    EXPECT_EQ((*out)[d].tensor().device().slot(), d);
    EXPECT_EQ((*out)[d].tensor().shape(), Shape({2, 4}));
    ExpectNear((*out)[d].tensor(), (*a)(Ones({2, 3})));
  }
}

TEST_F(ParallelCppTest, ParallelApplyWithDifferentOutputDevice) {
  const auto m = std::make_shared<Net>(
      [this](const Nest::Items&, const Nest::Fields&) { return Nest(Ones({5}, 0, DType::kI32)); });
  const std::vector<Nest::Items> inputs(3, {Ones({})});
  const auto out = nn::ParallelApply({m, m, m}, inputs, {},
                                     {session_.device(1), session_.device(2), session_.device(0)});
  ASSERT_TRUE(out.ok()) << out.status();
  EXPECT_EQ((*out)[0].tensor().device().slot(), 1);
  EXPECT_EQ((*out)[1].tensor().device().slot(), 2);
  EXPECT_EQ((*out)[2].tensor().device().slot(), 0);
  EXPECT_THAT(Values<int32_t>((*out)[1].tensor()), ElementsAre(1, 1, 1, 1, 1));
}

TEST_F(ParallelCppTest, ParallelApplyRethrowsException) {
  Net m([](const Nest::Items&, const Nest::Fields&) { return absl::InternalError("Badness!"); });
  const Tensor y = DataParallelCall(m, Ones({10, 3}), devices_);
  EXPECT_THAT(TextOf(y.status()), HasSubstr("Badness!"));
}

TEST_F(ParallelCppTest, DataParallelPlacesTheOutputOnTheRequestedDevice) {
  Net m([](const Nest::Items& inputs, const Nest::Fields&) {
    return Nest(Full(inputs[0].tensor().device(), DType::kF64, {3}, 1));
  });
  DataParallelOptions options;
  options.output_device = session_.device(1);
  const Tensor all = DataParallelCall(m, Ones({10, 3}), devices_, options);
  EXPECT_EQ(all.device().slot(), 1);
  EXPECT_THAT(Values<double>(all), Each(1));
  EXPECT_EQ(all.shape(), Shape({9}));
  // Verify for the single-device case (where we don't scatter/gather).
  const Tensor one = DataParallelCall(m, Ones({10, 3}), Of({0}), options);
  EXPECT_EQ(one.device().slot(), 1);
  EXPECT_EQ(one.shape(), Shape({3}));
}

TEST_F(ParallelCppTest, DataParallelUsesAllAvailableCUDADevices) {
  Net m([](const Nest::Items& inputs, const Nest::Fields&) {
    const DeviceRef device = inputs[0].tensor().device();
    return Nest(Scalar<double>(device, device.slot()));
  });
  std::vector<std::string> warnings;
  const Tensor y = DataParallelCall(m, Ones({10, 3}), devices_, {}, &warnings);
  EXPECT_THAT(Values<double>(y), ElementsAre(0, 1, 2));
  EXPECT_THAT(warnings, ElementsAre(HasSubstr("a vector of 3")));
}

// --- test/distributed/test_data_parallel.py -----------------------------------------------------

// The net of the original: after each of three steps the same parameters, on one device and on two.
TEST_F(ParallelCppTest, DataParallelNumericalEquivalence) {
  struct Net : Module {
    Net() : Module("Net") {}
    Tensor Forward(const Tensor& x) override {
      return LogSoftmax(linear(Reshape(Relu(conv(x)), {-1, 8})), -1);
    }
    Conv2d& conv = Add<Conv2d>("conv", 2, 2, HeightWidth(2));
    Linear& linear = Add<Linear>("linear", 8, 2);
  };
  const DeviceGroup devices = Of({0, 1});
  std::vector<std::vector<Tensor>> after[2];
  for (const bool parallel : {false, true}) {
    Net net;
    ASSERT_TRUE(net.Init(session_, 1, DType::kF64).ok());
    Sgd sgd(net.parameters(), {});
    Tensor x = Ones({16, 2, 3, 3}, 0);
    for (int i = 0; i < 3; ++i) {
      x += i;
      const Tensor out = parallel ? DataParallelCall(net, x, devices) : net(x);
      ASSERT_EQ(out.shape(), Shape({16, 2}));
      ASSERT_TRUE(Backward(MseLoss(out, Zeros(out.device(), DType::kF64, out.shape()))).ok());
      ASSERT_TRUE(sgd.Step().ok());
      after[parallel].emplace_back();
      for (const Variable& variable : net.parameters())
        after[parallel].back().push_back(variable());
    }
  }
  for (size_t step = 0; step < 3; ++step) {
    for (size_t i = 0; i < 4; ++i) ExpectNear(after[1][step][i], after[0][step][i]);
  }
}

class DataParallelPyTest : public DataParallelTest {
 protected:
  const DeviceGroup both_ = Of({0, 1});
};

TEST_F(DataParallelPyTest, BuffersRequiringGrad) {
  struct TestModule : Module {
    TestModule()
        : Module("TestModule"),
          t_rg(AddBuffer("t_rg", {100}, init::Normal())),
          t_not_rg(AddBuffer("t_not_rg", {100}, init::Normal())) {}
    Tensor Forward(const Tensor& x) override { return x * t_rg() + t_not_rg(); }
    Variable t_rg;
    Variable t_not_rg;
  };
  const auto m = Make<TestModule>(0);
  DataParallel dpm(m, both_);
  const Tensor inp = Randn({2, 100}, 3);
  ExpectGradients(
      [&](const std::vector<Tensor>& in) {
        const StateScope scope(*m, {in[0], m->t_not_rg()});
        return dpm(inp);
      },
      {m->t_rg()});
}

// PyTorch's has ten times as many features; the naive evaluator takes a minute for that.
TEST_F(DataParallelPyTest, Rnn) {
  const auto make = [&] {
    RnnOptions options;
    options.batch_first = true;
    options.bidirectional = true;
    return Make<Lstm>(0, 30, 64, options);
  };
  const auto model = make();
  DataParallel model_dp(make(), both_);
  const auto output = [](Module& module, const Tensor& x) {
    const auto result = module.CallAt(CallSite::Here(), {x}, {});
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? result->items()[0].tensor() : Tensor();
  };
  {
    const NoGrad no_grad;
    EXPECT_EQ(output(model_dp, Randn({2, 4, 30})).shape(), Shape({2, 4, 128}));
  }
  for (Module* const module :
       {static_cast<Module*>(model.get()), static_cast<Module*>(&model_dp)}) {
    Sgd::Options options;
    options.learning_rate = 10;
    Sgd sgd(module->parameters(), options);
    const Tensor y = output(*module, Ones({4, 4, 30}));
    ASSERT_TRUE(Backward(MseLoss(y, Zeros(y.device(), DType::kF64, y.shape()))).ok());
    ASSERT_TRUE(sgd.Step().ok());
  }
  const std::vector<NamedVariable> named = model_dp.named_variables();
  ASSERT_EQ(named.size(), 8u);
  EXPECT_EQ(named[0].name, "module.weight_ih_l0");
  EXPECT_EQ(named[7].name, "module.bias_hh_l0_reverse");
  for (size_t i = 0; i < named.size(); ++i) {
    const auto a = Values<double>(named[i].variable());
    const auto b = Values<double>(model->parameters()[i]());
    ASSERT_EQ(a.size(), b.size()) << named[i].name;
    int apart = 0;  // what is no number is near nothing
    for (size_t e = 0; e < a.size(); ++e) apart += !(std::abs(a[e] - b[e]) < 1e-12);
    EXPECT_EQ(apart, 0) << named[i].name;
  }
}

TEST_F(DataParallelPyTest, LazyLinear) {
  DataParallel model(std::make_shared<Linear>(5, 5), both_);
  const Tensor y = model(Ones({10, 5}));
  EXPECT_EQ(ErrorOf(y.status()).reason, Reason::kWrongState);
  EXPECT_THAT(TextOf(y.status()), HasSubstr("weight is not there yet: call Init"));
}

TEST_F(DataParallelPyTest, ParallelApply) {
  const auto l1 = Make<Linear>(0, 10, 5);
  const auto l2 = Make<Linear>(1, 10, 5);
  const Tensor i1 = Randn({2, 10}, 1, 0);
  const Tensor i2 = Randn({2, 10}, 2, 1);
  for (const bool with_keywords : {false, true}) {
    const std::vector<Nest::Fields> keywords(with_keywords ? 2 : 0);
    const auto out = nn::ParallelApply({l1, l2}, {{i1}, {i2}}, keywords);
    ASSERT_TRUE(out.ok()) << out.status();
    ExpectNear((*out)[0].tensor(), (*l1)(i1));
    ExpectNear((*out)[1].tensor(), (*l2)(i2));
  }
}

TEST_F(DataParallelPyTest, ParallelApplyPassesException) {
  int calls = 0;
  const auto bad = std::make_shared<Net>([&](const Nest::Items&, const Nest::Fields&) {
    ++calls;
    return absl::NotFoundError("wonderful");
  });
  const auto out = nn::ParallelApply({bad, bad}, {{Ones({1}, 0)}, {Ones({1}, 1)}}, {},
                                     {session_.device(0), session_.device(1)});
  EXPECT_EQ(out.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(TextOf(out.status()), HasSubstr("in replica 0 on device 0: wonderful"));
  EXPECT_EQ(calls, 2);
}

TEST_F(DataParallelPyTest, DataParallelMultipleInput) {
  const auto m = std::make_shared<Net>([](const Nest::Items& in, const Nest::Fields& keywords) {
    const double factor = std::any_cast<double>(in[2].opaque());
    Tensor y = in[0].tensor() * in[1].tensor();
    if (keywords.count("var3") > 0) y = y + keywords.at("var3").tensor();
    return Nest(y * factor);
  });
  const Tensor var1 = Randn({5, 5}, 1).RequireGrad();
  const Tensor var2 = Randn({5, 5}, 2).RequireGrad();
  const Tensor var3 = Randn({5, 5}, 3);
  const Nest::Items in = {var1, var2, Nest::Opaque(0.75)};
  for (const Nest::Fields& keywords : {Nest::Fields(), Nest::Fields{{"var3", Nest(var3)}}}) {
    const Tensor expected = m->Call(in, keywords)->tensor();
    const auto gradients = Grad({Sum(expected)}, {var1, var2});
    ASSERT_TRUE(gradients.ok());
    const auto test = [&](const absl::StatusOr<Nest>& out) {
      ASSERT_TRUE(out.ok()) << out.status();
      ExpectNear(out->tensor(), expected);
      const auto got = Grad({Sum(out->tensor())}, {var1, var2});
      ASSERT_TRUE(got.ok()) << got.status();
      ExpectSame(*got, *gradients);
    };
    for (const std::vector<int>& slots : {std::vector<int>{0, 1}, {1, 0}, {0}}) {
      const DeviceGroup devices = Of(slots);
      test(DataParallelCall(*m, in, keywords, devices));
      DataParallel dpm(m, devices);
      test(dpm.Call(in, keywords));
    }
  }
}

TEST_F(DataParallelPyTest, DataParallelSmallBack) {
  const auto l = Make<Linear>(0, 10, 5);
  const Tensor i = Randn({20, 10});
  ExpectNear(DataParallelCall(*l, i, both_), (*l)(i));
}

// Device 2 stands for the CPU.
TEST_F(DataParallelPyTest, DataParallelModelDevice) {
  const Tensor input = Randn({4, 10}, 1, 2);
  constexpr int kStays = -1;
  const struct Case {
    std::vector<int> from;  // where the parts are
    int to;                 // where all of it is moved before
    std::vector<int> devices;
    std::string error;
  } cases[] = {
      {{2}, kStays, {0, 1}, "on device 0 (devices[0]), but 0.weight is on device 2"},
      {{1}, kStays, {0, 1}, "on device 0 (devices[0]), but 0.weight is on device 1"},
      {{0}, kStays, {1, 0}, "on device 1 (devices[0]), but 0.weight is on device 0"},
      {{0}, kStays, {0, 1}, ""},
      {{2}, 0, {0, 1}, ""},
      {{1}, kStays, {1, 0}, ""},
      {{2}, 1, {1, 0}, ""},
      {{2, 0}, kStays, {0, 1}, "on device 0 (devices[0]), but 0.weight is on device 2"},
      {{0, 2}, kStays, {0, 1}, "on device 0 (devices[0]), but 1.weight is on device 2"},
      {{2, 2}, kStays, {0, 1}, "on device 0 (devices[0]), but 0.weight is on device 2"},
      {{0, 1}, kStays, {0, 1}, "on device 0 (devices[0]), but 1.weight is on device 1"},
      {{0, 1}, kStays, {1, 0}, "on device 1 (devices[0]), but 0.weight is on device 0"},
      {{0, 0}, kStays, {0, 1}, ""},
      {{1, 1}, kStays, {1, 0}, ""},
      {{0, 0}, kStays, {1, 0}, "on device 1 (devices[0]), but 0.weight is on device 0"},
      {{2, 0}, 0, {0, 1}, ""},
      {{2, 0}, 1, {1, 0}, ""},
      {{2, 0}, 1, {0, 1}, "on device 0 (devices[0]), but 0.weight is on device 1"},
      {{0, 1}, 0, {0}, ""},
      {{0, 1}, 1, {0}, "on device 0 (devices[0]), but 0.weight is on device 1"},
      {{2}, kStays, {0}, "on device 0 (devices[0]), but 0.weight is on device 2"},
  };
  EXPECT_EQ(std::size(cases), 21u);
  for (size_t c = 0; c < std::size(cases); ++c) {
    SCOPED_TRACE(c);
    Modules parts;
    for (const int slot : cases[c].from) parts.push_back(Make<Linear>(slot, 10, 10));
    const auto model = std::make_shared<Sequential>(parts);
    if (cases[c].to != kStays) {
      ASSERT_TRUE(model->To(session_.device(cases[c].to)).ok());
    }
    const DeviceGroup devices = Of(cases[c].devices);
    const int at = devices.device(0).slot();
    for (const Tensor& y :
         {DataParallel(model, devices)(input), DataParallelCall(*model, input, devices)}) {
      if (cases[c].error.empty()) {
        ASSERT_TRUE(y.status().ok()) << y.status();
        EXPECT_EQ(y.device().slot(), at);
        ExpectNear(y, (*model)(CopyTo(input, session_.device(at))));
        continue;
      }
      EXPECT_EQ(ErrorOf(y.status()).reason, Reason::kBadType);
      EXPECT_THAT(TextOf(y.status()),
                  HasSubstr("module must have its parameters and buffers " + cases[c].error));
    }
  }
}

TEST_F(DataParallelPyTest, DataParallelNoRefcycles) {
  const auto model = Make<Linear>(0, 10, 10);
  const Tensor x = Randn({10, 10});
  const auto replicas = nn::Replicate(*model, both_);
  ASSERT_TRUE(replicas.ok()) << replicas.status();
  EXPECT_EQ((*replicas)[0].use_count(), 1);
  nn::DataParallel dpm(model, both_);
  for (int i = 0; i < 200; ++i) EXPECT_TRUE(dpm(x).requires_grad());
  EXPECT_TRUE(dpm(x).Wait().ok());
  EXPECT_LT(daemon_.live_tensors(), 400);  // releases go some at a time
}

TEST_F(DataParallelPyTest, DataParallelNoGrad) {
  const auto l = Make<Linear>(0, 10, 5);
  std::vector<bool> recorded;
  l->AddHook([&](Module&, const Tensor&, const Tensor& result) {
    recorded.push_back(result.requires_grad());
    return Tensor();
  });
  const Tensor i = Randn({20, 10});
  {
    const NoGrad no_grad;
    EXPECT_FALSE(DataParallelCall(*l, i, both_).requires_grad());
  }
  EXPECT_THAT(recorded, ElementsAre(false, false));
  EXPECT_TRUE(DataParallelCall(*l, i, both_).requires_grad());
  EXPECT_THAT(recorded, ElementsAre(false, false, true, true));
}

TEST_F(DataParallelPyTest, DataParallel) {
  const auto l = Make<Linear>(1, 10, 5);
  const Tensor i = Randn({20, 10}, 1, 1).RequireGrad();
  const Tensor expected = (*l)(i);
  const std::vector<Tensor> gradients = Gradients(Sum(expected), *l, {i});
  for (const std::vector<int>& slots : {std::vector<int>{0, 1}, {1, 0}}) {
    ASSERT_TRUE(l->To(session_.device(slots[0])).ok());
    const Tensor out = DataParallelCall(*l, i, Of(slots));
    EXPECT_EQ(out.device().slot(), slots[0]);
    ExpectNear(out, expected);
    ExpectSame(Gradients(Sum(out), *l, {i}), gradients);
  }
}

TEST_F(DataParallelPyTest, DataParallelNestedOutput) {
  const auto fn = [](const Tensor& x) {
    return Nest::List({x, Nest::Tuple({Sin(x), Cos(x), Nest::List({x + 1})}), x,
                       Nest::Map({{"a", x}, {"b", Nest::List({Sin(x)})}})});
  };
  Net l([&](const Nest::Items& inputs, const Nest::Fields&) { return fn(inputs[0].tensor()); });
  const Tensor i = Randn({2, 2});
  const auto out = DataParallelCall(l, {i}, {}, both_);
  ASSERT_TRUE(out.ok()) << out.status();
  const Nest expected = fn(i);
  ASSERT_EQ(out->kind(), Nest::Kind::kList);
  ASSERT_EQ(out->items().size(), 4u);
  ExpectNear(out->items()[0].tensor(), i);
  const Nest& tuple = out->items()[1];
  ASSERT_EQ(tuple.kind(), Nest::Kind::kTuple);
  ExpectNear(tuple.items()[0].tensor(), Sin(i));
  ExpectNear(tuple.items()[1].tensor(), Cos(i));
  ASSERT_EQ(tuple.items()[2].kind(), Nest::Kind::kList);
  ExpectNear(tuple.items()[2].items()[0].tensor(), i + 1);
  ExpectNear(out->items()[2].tensor(), i);
  const Nest& map = out->items()[3];
  ASSERT_EQ(map.kind(), Nest::Kind::kMap);
  ExpectNear(map.fields().at("a").tensor(), i);
  ExpectNear(map.fields().at("b").items()[0].tensor(), Sin(i));
}

TEST_F(DataParallelPyTest, DataParallelNestedInput) {
  Net l([](const Nest::Items& inputs, const Nest::Fields&) { return inputs[1].items()[0]; });
  const Tensor a = Randn({20, 3}, 1);
  const Tensor b = Randn({20, 3}, 2);
  const auto out = DataParallelCall(l, {a, Nest::Tuple({b, a})}, {}, both_);
  ASSERT_TRUE(out.ok()) << out.status();
  ExpectNear(out->tensor(), b);
}

TEST_F(DataParallelPyTest, DataParallelModuleZeroInputs) {
  const auto model = std::make_shared<Net>([this](const Nest::Items& in, const Nest::Fields& kw) {
    EXPECT_TRUE(in.empty() && kw.empty());
    const Tensor t = FromHost<double>(session_, {1, 0, 0, 0, 1, 0}, {2, 3});
    return Nest(t + (1 - t));
  });
  for (const std::vector<int>& slots : {std::vector<int>{0}, {0, 1}}) {
    nn::DataParallel dpm(model, Of(slots));
    for (const absl::StatusOr<Nest>& out :
         {dpm.Call({}, {}), DataParallelCall(*model, {}, {}, Of(slots))}) {
      ASSERT_TRUE(out.ok()) << out.status();
      EXPECT_EQ(out->tensor().device().slot(), 0);
      ExpectNear(out->tensor(), Ones({2, 3}));
    }
  }
}

TEST_F(DataParallelPyTest, DataParallelDeviceArgs) {
  const Tensor i = Randn({20, 10}, 1, 1);
  const DeviceGroup devices = Of({1, 0});
  const auto l = Make<Linear>(devices.device(0).slot(), 10, 5);
  for (const DeviceRef& output : {devices.device(0), session_.device(1), DeviceRef(session_)}) {
    DataParallelOptions options;
    options.output_device = output;
    const Tensor out = DataParallelCall(*l, i, devices, options);
    EXPECT_EQ(out.device().slot(), output.slot());
    ExpectNear(out, (*l)(i));
  }
}

TEST_F(DataParallelPyTest, DataParallelFunctionDeletion) {
  const auto net = Make<Linear>(0, 4, 1);
  nn::DataParallel dpn(net, both_);
  const Tensor x = Ones({2, 4}).RequireGrad();
  BackwardOptions create;
  create.create_graph = true;
  const Tensor out = dpn(x);
  create.seeds = {Ones({2, 1})};
  const auto g = Grad({out}, {x}, create);
  ASSERT_TRUE(g.ok()) << g.status();
  const std::vector<Tensor> gradients = Gradients(Mean((*g)[0]), *net);
  ASSERT_EQ(gradients.size(), 2u);
  ExpectNear(gradients[0], Ones({1, 4}) * 0.25);
  EXPECT_THAT(Values<double>(gradients[1]), ElementsAre(0));
}

TEST_F(DataParallelPyTest, ScatterCpu) {
  for (const int device : {2, 0}) {  // scatter_cpu, scatter_gpu
    const Tensor x = Randn({4, 4}, 1, device).RequireGrad();
    const std::vector<Tensor> pieces = Scatter(x, devices_, {2, 2, 0});
    EXPECT_EQ(pieces[0].device().slot(), 0);
    EXPECT_EQ(pieces[1].device().slot(), 1);
    ExpectNear(pieces[0], Slice(x, 0, 0, 2));
    ExpectNear(pieces[1], Slice(x, 0, 2, 4));
    ASSERT_TRUE(Backward(pieces[0], {{Ones({2, 4}) * 2}}).ok());
    EXPECT_THAT(Values<double>(Slice(x.grad(), 0, 0, 2)), Each(2));
    EXPECT_THAT(Values<double>(Slice(x.grad(), 0, 2, 4)), Each(0));
    ExpectGradients(
        [&](const std::vector<Tensor>& in) {
          const std::vector<Tensor> y = Scatter(in[0], devices_, {2, 2, 0});
          return CopyTo(y[1] * y[1], session_.device(0)) * y[0];
        },
        {x});
  }
}

TEST_F(DataParallelPyTest, GatherCpu) {
  for (const int device : {2, 0}) {  // gather_cpu, gather_gpu
    const Tensor a = Randn({2, 4}, 1, 0).RequireGrad();
    const Tensor b = Randn({2, 4}, 2, 1).RequireGrad();
    const Tensor y = Gather({a, b}, devices_, device);
    EXPECT_EQ(y.shape(), Shape({4, 4}));
    EXPECT_EQ(y.device().slot(), device);
    ExpectNear(Slice(y, 0, 0, 2), a);
    ExpectNear(Slice(y, 0, 2, 4), b);
    const Tensor grad = Randn({4, 4}, 3, device);
    ASSERT_TRUE(Backward(y, {{grad}}).ok());
    ExpectNear(a.grad(), Slice(grad, 0, 0, 2));
    ExpectNear(b.grad(), Slice(grad, 0, 2, 4));
    ExpectGradients(
        [&](const std::vector<Tensor>& in) {
          const Tensor z = Gather({in[0], CopyTo(in[1], session_.device(1))}, devices_, device);
          return z * z * z;
        },
        {a, CopyTo(b, session_.device(0))});
    // Of no dimensions.
    const Tensor s = Randn({}, 4, 0).RequireGrad();
    const Tensor t = Randn({}, 5, 1).RequireGrad();
    const Tensor vector = Gather({s, t}, devices_, device);
    EXPECT_EQ(vector.shape(), Shape({2}));
    ASSERT_TRUE(Backward(vector, {{Row({3, 4}, device)}}).ok());
    EXPECT_THAT(Values<double>(s.grad()), ElementsAre(3));
    EXPECT_THAT(Values<double>(t.grad()), ElementsAre(4));
  }
}

TEST_F(DataParallelPyTest, GatherDifferentLenDicts) {
  const Tensor a = Randn({1, 2}, 1, 0);
  const Tensor b = Randn({1, 2}, 1, 1);
  const auto whole = GatherNest({Nest::Map({{"a", a}}), Nest::Map({{"b", b}, {"a", b}})}, both_);
  EXPECT_THAT(TextOf(whole.status()), HasSubstr("maps of the same 1 keys"));
}

TEST_F(DataParallelPyTest, Replicate) {
  const auto module = Make<Linear>(0, 10, 5);
  const Tensor input = Randn({2, 10});
  const auto replicas = nn::Replicate(*module, both_);
  ASSERT_TRUE(replicas.ok()) << replicas.status();
  for (size_t d = 0; d < 2; ++d) {
    const DeviceRef device = session_.device(static_cast<int>(d));
    ExpectNear((*(*replicas)[d])(CopyTo(input, device)), (*module)(input));
  }
}

TEST_F(DataParallelPyTest, ReplicateBuffers) {
  const auto net = Make<Affine>(0, 10);
  const auto replicas = nn::Replicate(*net, both_);
  ASSERT_TRUE(replicas.ok()) << replicas.status();
  for (size_t d = 0; d < 2; ++d) {
    ASSERT_EQ((*replicas)[d]->buffers().size(), 2u);
    for (const Variable& buffer : (*replicas)[d]->buffers()) {
      EXPECT_EQ(buffer().device().slot(), static_cast<int>(d));
      EXPECT_FALSE(buffer().requires_grad());
    }
  }
}

TEST_F(DataParallelPyTest, ParameterListDictReplica) {
  struct TestModule : Module {
    TestModule() : Module("TestModule") {
      for (const char* name : {"0", "1"}) {
        list.push_back(AddParameter(name, {2}, init::Normal()));
      }
      map["a"] = AddParameter("a", {2}, init::Normal());
    }
    Tensor Forward(const Tensor& x) override {
      for (const Variable& v : {list[0], list[1], map["a"]}) {
        EXPECT_TRUE(v().requires_grad());
        EXPECT_EQ(v().device().slot(), x.device().slot());
      }
      return x * list[0]() * list[1]() + map["a"]();
    }
    std::vector<Variable> list;
    std::map<std::string, Variable> map;
  };
  const auto net = Make<TestModule>(0);
  const Tensor x = Randn({4, 2});
  nn::DataParallel dpm(net, both_);
  ExpectSame(Gradients(Sum(dpm(x)), *net), Gradients(Sum((*net)(x)), *net));
}

TEST_F(DataParallelPyTest, DataParallelModule) {
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kF16}) {
    const auto l = std::make_shared<Linear>(10, 5);
    ASSERT_TRUE(l->Init(session_, 1, dtype).ok());
    const Tensor i = Randn({20, 10}, 1, 0, dtype);
    nn::DataParallel net(l, both_);
    const Tensor out = net(i);
    EXPECT_EQ(out.device().slot(), 0);
    EXPECT_EQ(out.dtype(), dtype);
    ExpectNear(out, (*l)(i), dtype == DType::kF64 ? 1e-12 : 1e-3);
  }
}

TEST_F(DataParallelPyTest, DataParallelModuleKwargsOnly) {
  const auto l = Make<Linear>(0, 10, 5);
  const Tensor i = Randn({20, 10});
  struct KeywordNet : Module {
    explicit KeywordNet(const std::shared_ptr<Linear>& l) : Module("Net") { AddModule("l", l); }
    absl::StatusOr<Nest> Call(const Nest::Items& inputs, const Nest::Fields& keywords) override {
      EXPECT_TRUE(inputs.empty());
      const Nest& input = keywords.at("input");
      const bool is_map = input.kind() == Nest::Kind::kMap;
      EXPECT_TRUE(!is_map || input.fields().at("unused").items().empty());
      return Nest(
          (*children()[0].module)(is_map ? input.fields().at("data").tensor() : input.tensor()));
    }
  };
  nn::DataParallel n(std::make_shared<KeywordNet>(l), both_);
  const Nest inputs[] = {Nest(i),  // kwargs_only, and _empty_list, _empty_dict, _empty_tuple
                         Nest::Map({{"data", i}, {"unused", Nest::List({})}}),
                         Nest::Map({{"data", i}, {"unused", Nest::Map({})}}),
                         Nest::Map({{"data", i}, {"unused", Nest::Tuple({})}})};
  for (const Nest& input : inputs) {
    const auto out = n.Call({}, {{"input", input}});
    ASSERT_TRUE(out.ok()) << out.status();
    EXPECT_EQ(out->tensor().device().slot(), 0);
    ExpectNear(out->tensor(), (*l)(i));
  }
}

// --- What the originals have no test for, or get wrong -----------------------------------------

TEST_F(DataParallelTest, GradientsOfAnyOrderAreThoseOfOneDevice) {
  const auto net = std::make_shared<Sequential>(
      Modules{std::make_shared<Linear>(3, 4), TanhLayer(), std::make_shared<Linear>(4, 2)});
  ASSERT_TRUE(net->Init(session_, 3, DType::kF64).ok());
  DataParallel model(net, devices_);
  std::vector<Tensor> inputs = {Randn({5, 3})};
  for (const Variable& parameter : net->parameters()) inputs.push_back(parameter());
  const auto function = [&](Module* module) {
    return [&, module](const std::vector<Tensor>& in) {
      const StateScope scope(*net, {in.begin() + 1, in.end()});
      return (*module)(in[0]);
    };
  };
  ExpectGradients(function(&model), inputs);
  ExpectNear(function(&model)(inputs), function(net.get())(inputs));
}

TEST_F(DataParallelTest, GradientsAreAddedUpInTheModulesOwnParameters) {
  const auto affine = Make<Affine>(0, 2);
  affine->scale_.Set(Row({2, 3}));
  DataParallel model(affine, devices_);
  const Tensor x = FromHost<double>(session_, {1, 2, 3, 4, 5, 6, 7, 8}, {4, 2});
  ASSERT_TRUE(Backward(Sum(model(x))).ok());
  EXPECT_THAT(Values<double>(affine->scale_.grad()), ElementsAre(16, 20));
  EXPECT_THAT(Values<double>(affine->shift_.grad()), ElementsAre(4, 4));
  EXPECT_THAT(Values<double>(model.parameters()[0].grad()), ElementsAre(16, 20));
}

TEST_F(DataParallelTest, BuffersOfTheFirstReplicaAreTheModules) {
  const auto affine = Make<Affine>(0, 1);
  DataParallel model(affine, devices_);
  const Tensor x = FromHost<double>(session_, {1, 2, 30, 40, 500, 600}, {6, 1});
  for (int i = 1; i <= 3; ++i) {
    model(x);
    EXPECT_THAT(Values<int64_t>(affine->calls_()), ElementsAre(i));
    EXPECT_THAT(Values<double>(affine->mean_()), ElementsAre(1.5));
    EXPECT_EQ(affine->mean_().device().slot(), 0);
  }
  // Also of one piece, and of one device.
  model(Slice(x, 0, 5, 6));
  EXPECT_THAT(Values<double>(affine->mean_()), ElementsAre(600));
  DataParallelCall(*affine, Slice(x, 0, 3, 4), Of({0}));
  EXPECT_THAT(Values<double>(affine->mean_()), ElementsAre(40));
  EXPECT_THAT(Values<int64_t>(affine->calls_()), ElementsAre(5));
  // In evaluation nothing changes.
  model.Eval();
  model(x);
  EXPECT_THAT(Values<int64_t>(affine->calls_()), ElementsAre(5));
}

TEST_F(DataParallelTest, DetachedReplicasHaveNoGradients) {
  const auto affine = Make<Affine>(0, 1);
  for (const bool detach : {false, true}) {
    const auto replicas = nn::Replicate(*affine, devices_, detach);
    ASSERT_TRUE(replicas.ok()) << replicas.status();
    for (int d = 0; d < 3; ++d) {
      EXPECT_EQ((*(*replicas)[d])(Ones({1}, d)).requires_grad(), !detach) << d;
    }
    // Buffers all the same.
    EXPECT_THAT(Values<int64_t>(affine->calls_()), ElementsAre(detach ? 2 : 1));
  }
}

TEST_F(DataParallelTest, FrozenParametersStayFrozen) {
  const auto affine = Make<Affine>(0, 1);
  affine->scale_.RequireGrad(false);
  const auto replicas = nn::Replicate(*affine, devices_);
  ASSERT_TRUE(replicas.ok()) << replicas.status();
  for (int d = 0; d < 3; ++d) {
    EXPECT_FALSE((*replicas)[d]->variables()[0]().requires_grad()) << d;
    EXPECT_TRUE((*replicas)[d]->variables()[1]().requires_grad()) << d;
  }
}

TEST_F(DataParallelTest, ATiedParameterHasOneGradient) {
  struct Tied : Module {
    Tied() : Module("Tied"), a(Add<Affine>("a", 1)) { Tie("again", a.scale_); }
    Tensor Forward(const Tensor& x) override { return a(x) * a.scale_(); }
    Affine& a;
  };
  const auto tied = Make<Tied>(0);
  tied->a.scale_.Set(Row({3}));
  DataParallel model(tied, devices_);
  ASSERT_TRUE(Backward(Sum(model(FromHost<double>(session_, {1, 2, 4}, {3, 1})))).ok());
  EXPECT_THAT(Values<double>(tied->a.scale_.grad()), ElementsAre(42));  // 2 * 3 * (1 + 2 + 4)
}

TEST_F(DataParallelTest, AnyNumberOfRowsWillDo) {
  const auto affine = Make<Affine>(0, 2);
  DataParallel model(affine, devices_);
  for (const int64_t rows : {0, 1, 2, 3, 4, 5, 7}) {
    SCOPED_TRACE(rows);
    const Tensor x = Randn({rows, 2}, rows);
    const Tensor expected = x * affine->scale_() + affine->shift_();
    const Tensor y = model(x);
    ExpectNear(y, expected);
    ExpectSame(Gradients(Sum(y), *affine), Gradients(Sum(expected), *affine));
  }
  // Along another dimension.
  DataParallelOptions options;
  options.dim = 1;
  Net sine([](const Nest::Items& in, const Nest::Fields&) { return Nest(Sin(in[0].tensor())); });
  const Tensor x = Randn({2, 4});
  ExpectNear(DataParallelCall(sine, x, devices_, options), Sin(x));
}

TEST_F(DataParallelTest, ResultsGoToAnyDevice) {
  const auto affine = Make<Affine>(0, 1);
  const Tensor x = Randn({4, 1}, 1, 2);
  const Tensor expected = (*affine)(CopyTo(x, session_.device(0)));
  const std::vector<Tensor> gradients = Gradients(Sum(expected), *affine);
  for (int d = 0; d < 3; ++d) {
    DataParallelOptions options;
    options.output_device = session_.device(d);
    DataParallel model(affine, Of({0, 1}), options);
    const Tensor y = model(x);
    EXPECT_EQ(y.device().slot(), d);
    ExpectNear(y, expected);
    ExpectSame(Gradients(Sum(y), *affine), gradients);
  }
}

TEST_F(DataParallelTest, TheFirstReplicaThatFailsIsNamedWhenAllHaveBeenCalled) {
  std::vector<int> called;
  const auto net = std::make_shared<Net>([&](const Nest::Items& in, const Nest::Fields&) {
    const Tensor& x = in[0].tensor();
    called.push_back(x.device().slot());
    // Known at once: shapes that do not fit. The first device's is in order.
    const Tensor y = x.device().slot() == 0 ? x : x + FromHost<double>(x.device(), {1, 2, 3}, {3});
    return Nest::List({x, Nest::Map({{"y", y}})});
  });
  DataParallel model(net, devices_);
  const auto out = model.CallAt({"train.cc", 12}, {Randn({6, 2})}, {});
  EXPECT_EQ(ErrorOf(out.status()).reason, Reason::kBadType);
  EXPECT_THAT(TextOf(out.status()), HasSubstr("in replica 1 on device 1: "));
  EXPECT_THAT(called, ElementsAre(0, 1, 2));
  // The group stays usable.
  called.clear();
  EXPECT_TRUE(DataParallelCall(*net, {Randn({1, 2})}, {}, devices_).ok());
  EXPECT_THAT(called, ElementsAre(0));
}

TEST_F(DataParallelTest, ErrorsHaveTheLineOfTheCall) {
  const auto linear = Make<Linear>(0, 2, 2);
  DataParallel model(linear, devices_);
  const int line = __LINE__ + 1;
  const Tensor wrong_width = model(Randn({6, 3}));
  const std::string expected = "data_parallel_test.cc:" + std::to_string(line);
  EXPECT_THAT(TextOf(wrong_width.status()), HasSubstr("in replica 0 on device 0: module (Linear)"));
  EXPECT_THAT(ErrorOf(wrong_width.status()).source, HasSubstr(expected));
  const int other_line = __LINE__ + 1;
  const Tensor scalar = model(Scalar<double>(session_, 1));
  EXPECT_THAT(TextOf(scalar.status()), HasSubstr("at least one dimension"));
  EXPECT_THAT(ErrorOf(scalar.status()).source,
              HasSubstr("data_parallel_test.cc:" + std::to_string(other_line)));
}

TEST_F(DataParallelTest, FunctionsHaveTheirCallersLine) {
  const auto linear = Make<Linear>(0, 2, 2);
  const Tensor wide = Randn({6, 3});
  const int line = __LINE__ + 1;
  const auto applied = nn::ParallelApply({linear}, {{wide}});
  const Tensor called = DataParallelCall(*linear, wide, devices_);
  const auto nested = DataParallelCall(*linear, {wide}, {}, devices_);
  const auto replicated = nn::Replicate(*linear, Of({1}));
  int next = line;
  for (const absl::Status& status :
       {applied.status(), called.status(), nested.status(), replicated.status()}) {
    EXPECT_THAT(ErrorOf(status).source,
                HasSubstr("data_parallel_test.cc:" + std::to_string(next++)));
  }
}

TEST_F(DataParallelTest, ListsThatDoNotFitAreRefused) {
  const auto l = Make<Linear>(0, 1, 1);
  const Nest::Items in = {Ones({1, 1})};
  const DeviceRef device = session_;
  EXPECT_THAT(TextOf(nn::ParallelApply({l}, {in, in}).status()),
              HasSubstr("inputs for each of 1 modules, got 2"));
  EXPECT_THAT(TextOf(nn::ParallelApply({l, l}, {in, in}, {{}}).status()),
              HasSubstr("keywords for each of 2 modules, got 1"));
  EXPECT_THAT(TextOf(nn::ParallelApply({l}, {in}, {}, {device, device}).status()),
              HasSubstr("a device for each of 1 modules, got 2"));
  EXPECT_THAT(TextOf(nn::ParallelApply({l, nullptr}, {in, in}).status()),
              HasSubstr("replica 1 is no module"));
  EXPECT_TRUE(nn::ParallelApply({}, {})->empty());
  EXPECT_FALSE(nn::Replicate(*l, DeviceGroup()).ok());
  EXPECT_FALSE(DataParallelCall(*l, Ones({1, 1}), DeviceGroup()).status().ok());
  EXPECT_THAT(TextOf(DataParallel(nullptr, devices_)(Ones({1, 1})).status()),
              HasSubstr("is no module"));
  Net nothing([](const Nest::Items&, const Nest::Fields&) { return Nest(); });
  EXPECT_THAT(TextOf(DataParallelCall(nothing, Ones({3}), devices_).status()),
              HasSubstr("gives one tensor"));
  const Tensor failed = FromError(session_, absl::InternalError("before"));
  EXPECT_THAT(TextOf(DataParallelCall(*l, failed, devices_).status()), HasSubstr("before"));
}

// A call that comes to no replica is made once all the same, with what has failed, of the module
// itself: other ranks may wait for collectives in it.
TEST_F(DataParallelTest, ACallThatComesToNoReplicaIsMadeOfTheModuleWithFailedInputs) {
  int calls = 0;
  absl::Status seen;
  Nest result;
  const auto net = std::make_shared<Net>([&](const Nest::Items& in, const Nest::Fields& keywords) {
    ++calls;
    EXPECT_EQ(in.size(), 2u);
    EXPECT_EQ(in[1].kind(), Nest::Kind::kOpaque);
    seen = keywords.at("x").tensor().status();
    EXPECT_EQ(in[0].items()[0].tensor().status(), seen);
    return result.kind() == Nest::Kind::kNothing ? keywords.at("x") : result;
  });
  DataParallel model(net, devices_);
  const Tensor scalar = Scalar<double>(session_, 1);
  const auto call = [&] {
    return model.Call({Nest::List({scalar}), Nest::Opaque(7)}, {{"x", Ones({4})}}).status();
  };
  EXPECT_THAT(TextOf(call()), HasSubstr("at least one dimension"));
  EXPECT_EQ(calls, 1);
  EXPECT_THAT(TextOf(seen), HasSubstr("at least one dimension"));
  // What the module makes of it says whether others have been told, if it is an error.
  result = FromError(session_, absl::InternalError("recorded"));
  EXPECT_THAT(TextOf(call()), HasSubstr("recorded"));
  result = Ones({1});
  EXPECT_THAT(TextOf(call()), HasSubstr("at least one dimension"));
  EXPECT_EQ(calls, 3);
}

TEST_F(DataParallelTest, ARefusedCallHasFailedTensorsForWhatIsInTheTrainersMemory) {
  int calls = 0;
  absl::Status seen;
  const auto net = std::make_shared<Net>([&](const Nest::Items& in, const Nest::Fields&) {
    ++calls;
    if (in[0].kind() == Nest::Kind::kTensor) seen = in[0].tensor().status();
    return in[0];
  });
  DataParallel model(net, devices_);
  const absl::Status refused = model.Call({parallel::HostTensor::Of(Doubles{1}, {})}, {}).status();
  EXPECT_THAT(TextOf(refused), HasSubstr("at least one dimension"));
  EXPECT_EQ(calls, 1);
  EXPECT_THAT(TextOf(seen), HasSubstr("at least one dimension"));
}

TEST_F(DataParallelTest, ACallThatWouldBeMadeOfNothingThatCanFailIsNotMade) {
  // Never given its parameter.
  class Unmade : public Net {
   public:
    explicit Unmade(Function function) : Net(std::move(function)) {
      AddParameter("scale", {1}, init::Ones());
    }
  };
  int calls = 0;
  const auto net = std::make_shared<Unmade>([&](const Nest::Items&, const Nest::Fields&) {
    ++calls;
    return Nest();
  });
  // Without devices there is nowhere for a tensor to fail.
  EXPECT_THAT(TextOf(DataParallel(net, DeviceGroup()).Call({Ones({4})}, {}).status()),
              HasSubstr("expected a group of devices, got an empty one"));
  EXPECT_THAT(TextOf(DataParallel(nullptr, devices_).Call({Ones({4})}, {}).status()),
              HasSubstr("expected a module, got none"));
  EXPECT_THAT(TextOf(DataParallel(net, devices_).Call({Nest::Opaque(7)}, {}).status()),
              HasSubstr("scale is not there yet: call Init"));
  EXPECT_EQ(calls, 0);
}

TEST_F(DataParallelTest, EachStageCanBeReplaced) {
  class Logged : public nn::DataParallel {
   public:
    using DataParallel::DataParallel;
    std::vector<std::string> log;

   protected:
    absl::StatusOr<parallel::ScatteredInputs> Scatter(const Nest::Items& inputs,
                                                      const Nest::Fields& keywords) override {
      log.push_back("scatter");
      return DataParallel::Scatter(inputs, keywords);
    }
    absl::StatusOr<Modules> Replicate(int count) override {
      log.push_back("replicate " + std::to_string(count));
      return DataParallel::Replicate(count);
    }
    absl::StatusOr<std::vector<Nest>> ParallelApply(
        const Modules& replicas, const parallel::ScatteredInputs& arguments) override {
      log.push_back("parallel_apply");
      return DataParallel::ParallelApply(replicas, arguments);
    }
    absl::StatusOr<Nest> Gather(const std::vector<Nest>& results) override {
      log.push_back("gather " + std::to_string(results.size()));
      return results[1];
    }
  };
  const auto affine = Make<Affine>(0, 1);
  Logged model(affine, devices_);
  EXPECT_EQ(model(Randn({4, 1})).device().slot(), 1);
  EXPECT_THAT(model.log, ElementsAre("scatter", "replicate 2", "parallel_apply", "gather 2"));
  EXPECT_THAT(model.ToString(), HasSubstr("DataParallel(devices=[0, 1, 2])\n  module: Affine"));
}

// Counts warnings instead of writing them.
class Warned : public nn::DataParallel {
 public:
  using DataParallel::DataParallel;
  std::vector<std::string> warnings;

 protected:
  void Warn(const std::string& text) override { warnings.push_back(text); }
};

TEST_F(DataParallelTest, AWarningComesOnce) {
  const auto net = std::make_shared<Net>(
      [](const Nest::Items& in, const Nest::Fields&) { return Nest(Sum(in[0].tensor())); });
  Warned model(net, devices_);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(model(Randn({3})).shape(), Shape({3}));
  EXPECT_THAT(model.warnings, ElementsAre(HasSubstr("a vector of 3")));
  // Nobody asks, nobody hears.
  EXPECT_EQ(DataParallelCall(*net, Randn({3}), devices_).shape(), Shape({3}));
}

TEST_F(DataParallelTest, DevicesThatDifferByMoreThanAQuarterAreWarnedOf) {
  const auto warnings = [&](const std::vector<DeviceInfo>& infos) {
    const Session session = daemon_.Open(3, std::chrono::seconds(20), infos);
    const auto affine = std::make_shared<Affine>(1);
    EXPECT_TRUE(affine->Init(session, 1).ok());
    Warned model(affine, *DeviceGroup::Create(session));
    const Tensor x = Zeros(session, DType::kF32, {3, 1});
    for (int i = 0; i < 2; ++i) EXPECT_TRUE(model(x).status().ok());
    return model.warnings;
  };
  EXPECT_THAT(warnings({{"gpu:0", 1600, 80}, {"gpu:1", 1199, 80}, {"gpu:2", 1600, 59}}),
              ElementsAre(HasSubstr("device 1 (gpu:1) has less than 75% of the memory of device 0 "
                                    "(gpu:0), 1199 of 1600"),
                          HasSubstr("device 2 (gpu:2) has less than 75% of the cores of device 0 "
                                    "(gpu:0), 59 of 80")));
  EXPECT_THAT(warnings({{"gpu:0", 1200, 60}, {"gpu:1", 1600, 80}, {"gpu:2", 1600, 80}}),
              ElementsAre());
  // Of which nothing is known.
  EXPECT_THAT(warnings({{"", 0, 0}, {"", 1600, 80}}), ElementsAre());
  EXPECT_THAT(warnings({}), ElementsAre());
  // Outside the group, and in the functional form.
  const Session session = daemon_.Open(2, std::chrono::seconds(20), {{"", 1, 1}, {"", 2, 2}});
  Net sine([](const Nest::Items& in, const Nest::Fields&) { return Nest(Sin(in[0].tensor())); });
  std::vector<std::string> asked;
  const Tensor x = Zeros(session, DType::kF32, {2});
  EXPECT_TRUE(
      DataParallelCall(sine, x, *DeviceGroup::Create(session, {0}), {}, &asked).status().ok());
  EXPECT_THAT(asked, ElementsAre());
  EXPECT_TRUE(DataParallelCall(sine, x, *DeviceGroup::Create(session), {}, &asked).status().ok());
  EXPECT_THAT(asked, ElementsAre(HasSubstr("device 0 has less than 75% of the memory of device 1"),
                                 HasSubstr("cores")));
}

// --- A whole step -------------------------------------------------------------------------------

// Three steps of gradient descent, eager and compiled, on one device and on three.
TEST_F(DataParallelTest, ACompiledStepIsOneRunAndGivesTheNumbersOfEagerOnesAndOfOneDevice) {
  constexpr int kSteps = 3;
  const auto make = [&] {
    const auto net = std::make_shared<Sequential>(
        Modules{std::make_shared<Linear>(3, 4), TanhLayer(), std::make_shared<Affine>(4)});
    EXPECT_TRUE(net->Init(session_, 3, DType::kF64).ok());
    return net;
  };
  // The loss, then the next state.
  const auto step = [](Module* model, const Module& net, const Tensor& x) {
    const Tensor y = (*model)(x);
    const Tensor loss = Sum(y * y);
    std::vector<Tensor> out = {loss};
    std::vector<Tensor> parameters;
    for (const Variable& parameter : net.parameters()) parameters.push_back(parameter());
    const auto gradients = Grad({loss}, parameters);
    EXPECT_TRUE(gradients.ok()) << gradients.status();
    size_t next = 0;
    for (const Variable& variable : net.variables()) {
      out.push_back(variable.is_parameter() ? variable() - (*gradients)[next++] * 0.01
                                            : variable());
    }
    return out;
  };
  const auto x = [&](int i) { return Randn({6, 3}, 10 + i); };
  std::vector<std::vector<Doubles>> numbers;  // by way: losses, then the state
  const auto keep = [&](const std::vector<Tensor>& losses, const Module& net) {
    numbers.emplace_back();
    for (const Tensor& loss : losses) numbers.back().push_back(Values<double>(loss));
    for (const Variable& variable : net.parameters()) {
      numbers.back().push_back(Values<double>(variable()));
    }
    EXPECT_THAT(Values<int64_t>(net.buffers()[1]()), ElementsAre(kSteps));
  };
  for (const bool parallel : {false, true}) {
    for (const bool compiled : {false, true}) {
      const auto net = make();
      DataParallel data_parallel(net, devices_);
      Module* const model = parallel ? static_cast<Module*>(&data_parallel) : net.get();
      const Compiled graph = Compile([&](const std::vector<Tensor>& in) {
        const StateScope scope(*net, {in.begin(), in.end() - 1});
        return step(model, *net, in.back());
      });
      std::vector<Tensor> losses;
      for (int i = 0; i < kSteps; ++i) {
        std::vector<Tensor> out;
        if (compiled) {
          std::vector<Tensor> in;
          for (const Variable& variable : net->variables()) in.push_back(variable());
          in.push_back(x(i));
          Values<double>(in.back());  // it has been sent
          const int runs = daemon_.counts().runs;
          const auto ran = graph.Run(in);
          ASSERT_TRUE(ran.ok()) << ran.status();
          out = *ran;
          Values<double>(out[0]);
          EXPECT_EQ(daemon_.counts().runs, runs + 1);
        } else {
          out = step(model, *net, x(i));
        }
        losses.push_back(out[0]);
        for (size_t v = 0; v + 1 < out.size(); ++v) net->variables()[v].Set(out[v + 1]);
      }
      keep(losses, *net);
    }
  }
  for (size_t way = 1; way < numbers.size(); ++way) {
    ASSERT_EQ(numbers[way].size(), numbers[0].size());
    for (size_t n = 0; n < numbers[0].size(); ++n) {
      ASSERT_EQ(numbers[way][n].size(), numbers[0][n].size());
      for (size_t i = 0; i < numbers[0][n].size(); ++i) {
        EXPECT_NEAR(numbers[way][n][i], numbers[0][n][i], 1e-12) << "way " << way;
      }
    }
  }
  EXPECT_EQ(numbers[2], numbers[3]);  // bit by bit
}

TEST_F(DataParallelTest, ATrainStepOfADataParallelIsThatOfItsModule) {
  std::vector<Doubles> numbers;
  for (const bool parallel : {false, true}) {
    const auto net = Make<Affine>(0, 2);
    DataParallel data_parallel(net, devices_);
    Module* const model = parallel ? static_cast<Module*>(&data_parallel) : net.get();
    Sgd sgd(model->parameters(), Sgd::Options());
    TrainStep step(model, &sgd, [&](const std::vector<Tensor>& in) {
      const Tensor y = (*model)(in[0]);
      return Mean(y * y);
    });
    numbers.emplace_back();
    for (int i = 0; i < 3; ++i) {
      const Tensor x = Randn({6, 2}, 20 + i);
      Values<double>(x);
      const int runs = daemon_.counts().runs;
      const auto loss = step({x});
      ASSERT_TRUE(loss.ok()) << loss.status();
      numbers.back().push_back(Values<double>(*loss)[0]);
      EXPECT_EQ(daemon_.counts().runs, runs + 1);
    }
    EXPECT_THAT(Values<int64_t>(net->calls_()), ElementsAre(3));
    for (const double value : Values<double>(net->scale_())) numbers.back().push_back(value);
  }
  for (size_t i = 0; i < numbers[0].size(); ++i) EXPECT_NEAR(numbers[0][i], numbers[1][i], 1e-12);
}

// The number of the step, which the layers of all devices draw by, is on one of them.
TEST_F(DataParallelTest, LayersDropOnEveryDeviceOfACompiledFunction) {
  const auto net = std::make_shared<Sequential>();
  net->Append<Linear>(1, 64);
  net->Append<Dropout>(0.5);
  ASSERT_TRUE(net->Init(session_, 1, DType::kF64).ok());
  DataParallel model(net, devices_);
  const Tensor x = Ones({6, 1});
  const auto kept = [](const Tensor& y) { return Values<bool>(NotEqual(y, 0)); };

  Sgd sgd(model.parameters(), Sgd::Options());
  TrainStep step(&model, &sgd, [&](const std::vector<Tensor>& in) {
    const Tensor y = model(in[0]);
    return Mean(y * y);
  });
  for (int i = 0; i < 2; ++i) {
    const auto loss = step({x});
    ASSERT_TRUE(loss.ok()) << loss.status();
    EXPECT_TRUE(loss->Wait().ok()) << loss->Wait();
  }

  const Compiled forward = Compile([&](const std::vector<Tensor>& in) {
    const RandomScope random(3, in[1]);
    return std::vector<Tensor>{model(in[0])};
  });
  std::vector<std::vector<bool>> by_offset;
  for (const int64_t offset : {1, 2, 1}) {
    const auto y = forward.Run({x, Scalar<int64_t>(session_, offset)});
    ASSERT_TRUE(y.ok()) << y.status();
    by_offset.push_back(kept((*y)[0]));
    // As they do outside, where the offset stands on another device.
    const RandomScope random(3, Scalar<int64_t>(session_.device(1), offset));
    EXPECT_EQ(kept(model(x)), by_offset.back());
  }
  EXPECT_NE(by_offset[0], by_offset[1]);
  EXPECT_EQ(by_offset[0], by_offset[2]);
  EXPECT_EQ(forward.traces(), 1);
}

}  // namespace
}  // namespace nn
}  // namespace chorus
