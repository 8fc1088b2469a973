#include "chorus/nn/train_step.h"

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "chorus/chorus.h"
#include "chorus/functional/math.h"
#include "chorus/nn/batch_norm.h"
#include "chorus/nn/init.h"
#include "chorus/nn/layers.h"
#include "chorus/nn/loss.h"
#include "client/testing/fake_daemon.h"
#include "client/testing/ranks.h"
#include "client/testing/values.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace nn {
namespace {

using chorus::testing::FakeDaemon;
using chorus::testing::Numbers;
using chorus::testing::Ranks;
using chorus::testing::Values;
using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pointwise;

using Doubles = std::vector<double>;
using Tensors = std::vector<Tensor>;

// Counts calls in a buffer.
class Counted : public Module {
 public:
  Counted() : Module("Counted"), linear_(Add<Linear>("linear", 3, 2)) {
    calls_ = AddBuffer("calls", {}, init::Zeros(), DType::kI64);
  }
  Tensor Forward(const Tensor& x) override {
    calls_.Set(calls_() + 1);
    return Tanh(linear_(x));
  }
  Variable calls_;

 private:
  Linear& linear_;
};

Adam::Options Rate(double rate) {
  Adam::Options options;
  options.learning_rate = rate;
  return options;
}

// Its compiled functions call it.
static_assert(!std::is_copy_constructible<TrainStep>::value, "a copy would call the original");
static_assert(!std::is_move_constructible<TrainStep>::value, "so would what was moved");

class TrainStepTest : public ::testing::Test {
 protected:
  FakeDaemon daemon_;
};

TEST_F(TrainStepTest, ACompiledStepIsTheEagerOneInOneRun) {
  const Session session = daemon_.Open();
  const Tensor x = FromHost<double>(session, Numbers(12, 1), {4, 3});
  const Tensor y = FromHost<double>(session, Numbers(8, 2), {4, 2});
  Counted eager;
  Counted model;
  ASSERT_TRUE(eager.Init(session, 1, DType::kF64).ok());
  ASSERT_TRUE(model.Init(session, 1, DType::kF64).ok());
  Adam eager_adam(eager.parameters(), Rate(0.1));
  Adam adam(model.parameters(), Rate(0.1));
  eager_adam.SetSchedule(CosineDecay(8));
  adam.SetSchedule(CosineDecay(8));
  TrainStep step(&model, &adam,
                 [&model](const Tensors& in) { return MseLoss(model(in[0]), in[1]); });
  for (int i = 0; i < 5; ++i) {
    const Tensor expected = MseLoss(eager(x), y);
    ASSERT_TRUE(Backward(expected).ok());
    ASSERT_TRUE(eager_adam.Step().ok());
    const Doubles wanted = Values<double>(expected);
    // Nothing is still to be sent.
    for (const Counted* module : {&eager, &model}) {
      for (const Variable& variable : module->variables()) ASSERT_TRUE(variable().Wait().ok());
    }
    const auto state = adam.Slots();
    ASSERT_TRUE(state.ok()) << state.status();
    for (const std::vector<Tensor>& slots : *state) {
      for (const Tensor& tensor : slots) ASSERT_TRUE(tensor.Wait().ok());
    }
    const int runs = daemon_.counts().runs;
    const absl::StatusOr<Tensor> loss = step({x, y});
    ASSERT_TRUE(loss.ok()) << loss.status();
    EXPECT_THAT(Values<double>(*loss), Pointwise(DoubleNear(1e-12), wanted));
    EXPECT_EQ(daemon_.counts().runs, runs + 1);
  }
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_THAT(Values<double>(model.parameters()[i]()),
                Pointwise(DoubleNear(1e-12), Values<double>(eager.parameters()[i]())));
  }
  EXPECT_THAT(Values<int64_t>(model.calls_()), ElementsAre(5));
  EXPECT_EQ(step.traces(), 1);
  EXPECT_EQ(step.steps(), 5);
  EXPECT_EQ(adam.steps(0), 5);
  // Both ways go on from each other.
  ASSERT_TRUE(Backward(MseLoss(model(x), y)).ok());
  ASSERT_TRUE(adam.Step().ok());
  ASSERT_TRUE(step({x, y}).ok());
}

// Without World::Step: else every later step would meet another one of the other rank.
TEST_F(TrainStepTest, AStepThatOneRankIsRefusedCountsAndTheOthersAreTold) {
  std::vector<std::vector<Doubles>> results(4);  // by whether steps are refused, and rank
  for (const bool is_refused : {false, true}) {
    FakeDaemon daemon;
    Ranks(2, &daemon).Run([&](const World& world, int r) {
      Linear model(3, 2);
      ASSERT_TRUE(model.Init(world, 1, DType::kF64).ok());
      Sgd sgd(model.parameters(), Sgd::Options());
      sgd.SetSchedule(StepDecay(1, 0.5));
      TrainStep::Options options;
      options.ranks = world.group();
      TrainStep step(
          &model, &sgd, [&](const Tensors& in) { return MseLoss(model(in[0]), in[1]); }, options);
      const auto call = [&](int turn) -> absl::StatusOr<Tensor> {
        return step({FromHost<double>(world, Numbers(6, 10 * turn + r), {2, 3}),
                     FromHost<double>(world, Numbers(4, 20 * turn + r), {2, 2})});
      };
      const auto refuse = [&](int turn) {
        Tensors before;
        for (const Variable& variable : model.variables()) before.push_back(variable());
        const absl::StatusOr<Tensor> loss = call(turn);
        const absl::Status status = loss.ok() ? loss->Wait() : loss.status();
        EXPECT_EQ(ErrorOf(status).reason == Reason::kPeerRefused, r == 0) << status;
        EXPECT_FALSE(status.ok());
        for (size_t i = 0; i < before.size(); ++i) model.variables()[i].Set(before[i]);
      };
      const auto train = [&](int turn) {
        const absl::StatusOr<Tensor> loss = call(turn);
        ASSERT_TRUE(loss.ok()) << loss.status();
        const absl::Status status = loss->Wait();
        ASSERT_TRUE(status.ok()) << status;
      };
      for (int turn = 0; turn < 3; ++turn) {
        if (is_refused) {
          // The first one comes before the ranks have the first one's variables.
          if (r == 1) model.parameters()[0].RequireGrad(false);
          refuse(10 + turn);
          model.parameters()[0].RequireGrad(true);
        }
        train(turn);
      }
      if (is_refused) {
        const int64_t steps = sgd.steps(0);
        if (r == 1) sgd.SetState(0, {{}, steps + 1});
        refuse(20);
        if (r == 1) sgd.SetState(0, {{}, steps});
      }
      train(3);
      EXPECT_EQ(step.steps(), 4);
      std::vector<Doubles>& result = results[static_cast<size_t>((is_refused ? 2 : 0) + r)];
      for (const Variable& variable : model.variables()) {
        result.push_back(Values<double>(variable()));
      }
    });
  }
  EXPECT_EQ(results[1], results[0]);
  EXPECT_EQ(results[2], results[0]);
  EXPECT_EQ(results[3], results[0]);
}

// What the caller has put back is not counted back once more, nor what has not failed.
TEST_F(TrainStepTest, OnlyTheCountOfAStepThatHasFailedIsTakenBack) {
  const Session session = daemon_.Open();
  Linear model(2, 1);
  ASSERT_TRUE(model.Init(session, 1, DType::kF64).ok());
  Sgd sgd(model.parameters(), {});
  TrainStep step(&model, &sgd, [&](const Tensors& in) { return Sum(model(in[0])); });
  const auto call = [&](bool fails) {
    if (fails) daemon_.FailTensors(1);
    const absl::StatusOr<Tensor> loss = step({Numbers(session, {10, 2}, 1)});
    ASSERT_TRUE(loss.ok()) << loss.status();
    EXPECT_EQ(loss->Wait().ok(), !fails);
  };
  const auto expect = [&](int64_t steps, int64_t of_optimizer) {
    EXPECT_EQ(step.steps(), steps);
    EXPECT_EQ(sgd.steps(0), of_optimizer);
    EXPECT_EQ(sgd.steps(1), of_optimizer);
  };
  Tensors copy;
  const auto put_back = [&] {
    for (size_t i = 0; i < copy.size(); ++i) model.variables()[i].Set(copy[i]);
  };
  call(false);
  for (const Variable& variable : model.variables()) copy.push_back(variable());
  put_back();
  call(false);
  expect(2, 2);
  call(true);
  put_back();
  call(false);
  expect(3, 3);
  call(true);
  put_back();
  step.SetSteps(7);
  for (size_t i = 0; i < 2; ++i) sgd.SetState(i, {{}, 9});
  call(false);
  expect(8, 10);
}

// And with it what that step would have said of those before it that were left out.
TEST_F(TrainStepTest, StepsThatWereLeftOutAreCountedBehindOneThatHasFailed) {
  const Session session = daemon_.Open();
  Linear model(2, 1);
  ASSERT_TRUE(model.Init(session, 1, DType::kF64).ok());
  Sgd sgd(model.parameters(), {});
  LossScaler scaler;
  TrainStep::Options options;
  options.scaler = &scaler;
  TrainStep step(
      &model, &sgd, [&](const Tensors& in) { return Sum(model(in[0])); }, options);
  const auto call = [&](double x) {
    const absl::StatusOr<Tensor> loss = step({FromHost<double>(session, Doubles(20, x), {10, 2})});
    return loss.ok() ? loss->Wait() : loss.status();
  };
  ASSERT_TRUE(call(1).ok());
  ASSERT_TRUE(call(std::numeric_limits<double>::infinity()).ok());
  Tensors copy;
  for (const Variable& variable : model.variables()) copy.push_back(variable());
  const LossScaler::State state = scaler.StateOn(session);
  daemon_.FailTensors(1);
  EXPECT_FALSE(call(1).ok());
  for (size_t i = 0; i < copy.size(); ++i) model.variables()[i].Set(copy[i]);
  scaler.SetState(state);
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(call(1).ok());
  ASSERT_TRUE(sgd.SettleSkips().ok());
  EXPECT_EQ(sgd.steps(0), 4);
  EXPECT_EQ(sgd.skipped(0), 1);
}

// The mean of the ranks' losses, of equal shards of one batch, is the loss of the batch.
TEST_F(TrainStepTest, RanksTrainAsOneWouldWithAllRows) {
  const Doubles rows = Numbers(12, 1);
  const Doubles labels = Numbers(8, 2);
  Doubles alone_loss;
  std::vector<Doubles> alone;
  {
    const Session session = daemon_.Open();
    Linear model(3, 2);
    ASSERT_TRUE(model.Init(session, 1, DType::kF64).ok());
    Adam adam(model.parameters(), Rate(0.1));
    TrainStep step(&model, &adam, [&](const Tensors& in) { return MseLoss(model(in[0]), in[1]); });
    for (int i = 0; i < 4; ++i) {
      const auto loss = step(
          {FromHost<double>(session, rows, {4, 3}), FromHost<double>(session, labels, {4, 2})});
      ASSERT_TRUE(loss.ok()) << loss.status();
      alone_loss.push_back(Values<double>(*loss)[0]);
    }
    for (const Variable& variable : model.parameters()) alone.push_back(Values<double>(variable()));
  }
  Ranks ranks(2, &daemon_);
  ranks.Run([&](const World& world, int r) {
    Linear model(3, 2);
    // The second one's are the first one's after all.
    ASSERT_TRUE(model.Init(world, 1 + static_cast<uint64_t>(r), DType::kF64).ok());
    Adam adam(model.parameters(), Rate(0.1));
    TrainStep::Options options;
    options.ranks = world.group();
    TrainStep step(
        &model, &adam, [&](const Tensors& in) { return MseLoss(model(in[0]), in[1]); }, options);
    for (size_t i = 0; i < 4; ++i) {
      const Doubles inputs(rows.begin() + 6 * r, rows.begin() + 6 * r + 6);
      const Doubles theirs(labels.begin() + 4 * r, labels.begin() + 4 * r + 4);
      const auto loss =
          step({FromHost<double>(world, inputs, {2, 3}), FromHost<double>(world, theirs, {2, 2})});
      ASSERT_TRUE(loss.ok()) << loss.status();
      EXPECT_THAT(Values<double>(*loss), Pointwise(DoubleNear(1e-12), Doubles{alone_loss[i]}));
    }
    for (size_t i = 0; i < alone.size(); ++i) {
      EXPECT_THAT(Values<double>(model.parameters()[i]()), Pointwise(DoubleNear(1e-12), alone[i]));
    }
  });
}

// Equal shapes: a mean of two different parameters' gradients would be told by nothing but numbers.
TEST_F(TrainStepTest, RanksWhoseOptimizersListParametersInOtherOrdersTrainAsOneWould) {
  const Doubles rows = Numbers(8, 1);
  const auto train = [](const DeviceRef& device, const Doubles& in, bool reversed,
                        const TrainStep::Options& options) {
    const int64_t n = static_cast<int64_t>(in.size()) / 2;
    Sequential model({Make<Linear>(2, 2), TanhLayer(), Make<Linear>(2, 2)});
    EXPECT_TRUE(model.Init(device, 1, DType::kF64).ok());
    std::vector<Variable> weights = {model.parameters()[0], model.parameters()[2]};
    if (reversed) std::swap(weights[0], weights[1]);
    Sgd sgd(weights, {});
    TrainStep step(
        &model, &sgd,
        [&](const Tensors& in) {
          const Tensor y = model(in[0]);
          return Sum(y * y) * (1 / static_cast<double>(n));
        },
        options);
    for (int i = 0; i < 3; ++i) {
      const absl::StatusOr<Tensor> loss = step({FromHost<double>(device, in, {n, 2})});
      EXPECT_TRUE(loss.ok()) << loss.status();
    }
    return std::vector<Doubles>{Values<double>(model.parameters()[0]()),
                                Values<double>(model.parameters()[2]())};
  };
  const std::vector<Doubles> alone = train(daemon_.Open(), rows, false, TrainStep::Options());
  Ranks(2, &daemon_).Run([&](const World& world, int r) {
    const Doubles own(rows.begin() + 4 * r, rows.begin() + 4 * r + 4);
    const std::vector<Doubles> together =
        train(world, own, r == 1, TrainStep::Options(world.group()));
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_THAT(together[i], Pointwise(DoubleNear(1e-12), alone[i])) << "rank " << r;
    }
  });
}

TEST_F(TrainStepTest, WhatIsFrozenStaysAndWhatIsUnusedHasGradientZero) {
  const Session session = daemon_.Open();
  Sequential model({std::make_shared<Linear>(2, 2), std::make_shared<Linear>(2, 2)});
  ASSERT_TRUE(model.Init(session, 1, DType::kF64).ok());
  const std::vector<Variable> all = model.parameters();
  all[0].RequireGrad(false);
  const Doubles frozen = Values<double>(all[0]());
  const Doubles unused = Values<double>(all[2]());
  Sgd sgd({all[1], all[2], all[3]}, {});
  TrainStep step(&model, &sgd, [&](const Tensors& in) { return Sum(model[0](in[0])); });
  const Tensor x = FromHost<double>(session, {1, 2}, {1, 2});
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(step({x}).ok());
  EXPECT_EQ(Values<double>(all[0]()), frozen);
  EXPECT_EQ(Values<double>(all[2]()), unused);
  Sgd of_frozen({all[0]}, {});
  TrainStep refused(&model, &of_frozen, [](const Tensors& in) { return in[0]; });
  EXPECT_THAT(std::string(refused({x}).status().message()), HasSubstr("parameter 0 is frozen"));
  // Behind the first step as well: momentum would go on moving it.
  all[2].RequireGrad(false);
  EXPECT_EQ(ErrorOf(step({x}).status()).reason, Reason::kBadType);
  EXPECT_THAT(std::string(step({x}).status().message()), HasSubstr("parameter 1 is frozen"));
  all[2].RequireGrad(true);
  EXPECT_TRUE(step({x}).ok());
  Linear other(2, 2);
  Sgd of_other(other.parameters(), {});
  TrainStep stranger(&model, &of_other, [](const Tensors& in) { return in[0]; });
  EXPECT_THAT(std::string(stranger({x}).status().message()), HasSubstr("none of the module's"));
}

// A parameter that follows others is the loss's to Set; one that is trained is the optimizer's.
TEST_F(TrainStepTest, WhatTheLossSetsOfAParameterIsKeptUnlessItIsTrained) {
  struct TeacherAndPupil : Module {
    TeacherAndPupil() : Module("TeacherAndPupil") {}
    Variable pupil = AddParameter("pupil", {1}, init::Constant(1));
    Variable teacher = AddParameter("teacher", {1}, init::Constant(0));
  };
  const Session session = daemon_.Open();
  const Tensor x = FromHost<double>(session, {1}, {1});
  for (const bool half : {false, true}) {
    SCOPED_TRACE(half);
    TeacherAndPupil model;
    ASSERT_TRUE(model.Init(session, 1, DType::kF64).ok());
    model.teacher.RequireGrad(false);
    TrainStep::Options options;
    if (half) options.compute = DType::kBF16;
    Sgd sgd({model.pupil}, {});
    TrainStep step(
        &model, &sgd,
        [&](const Tensors& in) {
          const Tensor before = model.teacher();
          model.teacher.Set(before * 0.5 + 1);
          return Sum((model.pupil() + before) * Cast(in[0], before.dtype()));
        },
        options);
    const Tensor before = model.teacher();
    for (const double expected : {1.0, 1.5, 1.75}) {
      const auto loss = step({x});
      ASSERT_TRUE(loss.ok()) << loss.status();
      EXPECT_EQ(model.teacher().dtype(), DType::kF64);
      EXPECT_THAT(Values<double>(model.teacher()), ElementsAre(expected));
    }
    EXPECT_THAT(Values<double>(before), ElementsAre(0));
    EXPECT_EQ(step.traces(), 1);

    TrainStep wrong(
        &model, &sgd,
        [&](const Tensors& in) {
          model.pupil.Set(model.pupil() * 0.5);
          return Sum(model.pupil() * Cast(in[0], model.pupil().dtype()));
        },
        options);
    const absl::Status refused = wrong({x}).status();
    EXPECT_EQ(ErrorOf(refused).reason, Reason::kWrongState) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("pupil was Set by the loss"));
  }
}

// What a call of the module is may change behind the first step.
TEST_F(TrainStepTest, AStepHasTheHooksAndSharedBatchesThatTheModuleHasByThen) {
  const Session session = daemon_.Open();
  Sequential model({std::make_shared<Linear>(2, 2)});
  ASSERT_TRUE(model.Init(session, 1, DType::kF64).ok());
  const std::shared_ptr<Module> clone = *model.Clone(session);
  for (Module* const module : {static_cast<Module*>(&model), clone.get()}) {
    Sgd::Options none;
    none.learning_rate = 0;
    Sgd sgd(module->parameters(), none);
    TrainStep step(module, &sgd, [&](const Tensors& in) { return Sum((*module)(in[0])); });
    const Tensor x = FromHost<double>(session, {1, 2, 4, 3}, {2, 2});
    const auto loss = [&] { return Values<double>(*step({x})).at(0); };
    const double before = loss();
    // A clone's calls are its original's.
    model[0].AddHook([](Module&, const Tensor&, const Tensor& y) { return y * 3; });
    EXPECT_NEAR(loss(), 3 * before, 1e-12);
    loss();
    EXPECT_EQ(step.traces(), 2);
  }
  WorldOptions alone;
  alone.rank = 0;
  alone.size = 1;
  const World world = *session.Join(alone);
  Sequential with_norm({std::make_shared<Linear>(2, 2), std::make_shared<BatchNorm>(2)});
  ASSERT_TRUE(with_norm.Init(session, 1, DType::kF64).ok());
  Sgd sgd(with_norm.parameters(), {});
  TrainStep step(&with_norm, &sgd, [&](const Tensors& in) { return Sum(with_norm(in[0])); });
  const Tensor x = FromHost<double>(session, {1, 2, 4, 3}, {2, 2});
  ASSERT_TRUE(step({x}).ok());
  ShareBatches(&with_norm, world);
  ASSERT_TRUE(step({x}).ok());
  EXPECT_EQ(step.traces(), 2);
}

TEST_F(TrainStepTest, AStepIsInTheModesThatTheModuleHasByThen) {
  const Session session = daemon_.Open();
  Sequential model({std::make_shared<Linear>(2, 2), std::make_shared<BatchNorm>(2)});
  ASSERT_TRUE(model.Init(session, 1, DType::kF64).ok());
  Sgd sgd(model.parameters(), {});
  TrainStep step(&model, &sgd, [&](const Tensors& in) { return Sum(model(in[0])); });
  const Tensor x = FromHost<double>(session, {1, 2, 4, 3}, {2, 2});
  const auto& norm = static_cast<const BatchNorm&>(model[1]);
  Doubles mean;
  for (const bool training : {true, false, true, false}) {
    model[1].Train(training);
    const auto loss = step({x});
    ASSERT_TRUE(loss.ok()) << loss.status();
    EXPECT_EQ(Values<double>(norm.running_mean()()) != mean, training);
    mean = Values<double>(norm.running_mean()());
  }
  EXPECT_EQ(step.traces(), 2);
  // Of more modes than are kept, the first one's graph is made anew.
  Sequential deep({std::make_shared<Linear>(2, 2)});
  for (int i = 0; i < 5; ++i) deep.Append<Sequential>();
  ASSERT_TRUE(deep.Init(session, 1, DType::kF64).ok());
  Sgd deep_sgd(deep.parameters(), {});
  TrainStep deep_step(&deep, &deep_sgd, [&](const Tensors& in) { return Sum(deep(in[0])); });
  const auto step_in = [&](int modes) {
    for (int i = 0; i < 5; ++i) deep[i + 1].Train((modes >> i & 1) != 0);
    EXPECT_TRUE(deep_step({x}).ok());
  };
  for (int modes = 0; modes < 17; ++modes) step_in(modes);
  EXPECT_EQ(deep_step.traces(), 17);
  step_in(16);
  EXPECT_EQ(deep_step.traces(), 17);
  step_in(0);
  EXPECT_EQ(deep_step.traces(), 18);
}

TEST_F(TrainStepTest, DropoutChangesFromStepToStepAndGradientsCanBeClipped) {
  const Session session = daemon_.Open();
  Sequential model({std::make_shared<Linear>(4, 4), std::make_shared<Dropout>(0.5)});
  ASSERT_TRUE(model.Init(session, 1, DType::kF64).ok());
  Sgd::Options none;
  none.learning_rate = 0;
  Sgd sgd(model.parameters(), none);
  TrainStep::Options options;
  options.seed = 3;
  options.on_gradients = [](std::vector<Tensor>* gradients) { ClipGradNorm(gradients, 1); };
  TrainStep step(
      &model, &sgd, [&](const Tensors& in) { return Sum(model(in[0])); }, options);
  const Tensor x = FromHost<double>(session, Numbers(32, 1), {8, 4});
  std::vector<double> losses;
  for (int i = 0; i < 3; ++i) {
    const auto loss = step({x});
    ASSERT_TRUE(loss.ok()) << loss.status();
    losses.push_back(Values<double>(*loss)[0]);
  }
  EXPECT_NE(losses[0], losses[1]);
  EXPECT_NE(losses[1], losses[2]);
  EXPECT_EQ(step.traces(), 1);
}

TEST_F(TrainStepTest, AStepThatIsRefusedChangesNothing) {
  const Session session = daemon_.Open();
  Linear model(2, 1);
  Sgd sgd(model.parameters(), {});
  TrainStep step(&model, &sgd, [&](const Tensors& in) { return Sum(model(in[0])); });
  const Tensor x = FromHost<double>(session, {1, 2}, {1, 2});
  EXPECT_EQ(ErrorOf(step({x}).status()).reason, Reason::kWrongState);
  ASSERT_TRUE(model.Init(session, 1, DType::kF64).ok());
  const Doubles before = Values<double>(model.weight()());
  const auto refused = step({FromHost<double>(session, {1, 2, 3}, {1, 3})});
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("Linear: expected [..., 2], got f64[1,3]"));
  TrainStep vector(&model, &sgd, [&](const Tensors& in) { return model(in[0]); });
  EXPECT_THAT(
      std::string(vector({FromHost<double>(session, {1, 2, 3, 4}, {2, 2})}).status().message()),
      HasSubstr("expected one number, got 2"));
  EXPECT_EQ(Values<double>(model.weight()()), before);
  EXPECT_EQ(step.steps(), 0);
  ASSERT_TRUE(step({x}).ok());
  EXPECT_NE(Values<double>(model.weight()()), before);
}

// Where there are no ranks nobody waits for it.
TEST_F(TrainStepTest, AnOptimizerOfOtherParametersIsRefused) {
  const Session session = daemon_.Open();
  Linear model(2, 1);
  Linear other(2, 1);
  for (Linear* const linear : {&model, &other}) {
    ASSERT_TRUE(linear->Init(session, 1, DType::kF64).ok());
  }
  std::vector<Variable> parameters = model.parameters();
  parameters.push_back(other.parameters()[0]);
  Sgd sgd(parameters, {});
  TrainStep step(&model, &sgd, [&](const Tensors& in) { return Sum(model(in[0])); });
  const Tensor x = FromHost<double>(session, {1, 2}, {1, 2});
  for (const Tensors& in : {Tensors{x}, Tensors()}) {
    const absl::Status status = step(in).status();
    EXPECT_EQ(ErrorOf(status).reason, Reason::kBadType) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("the optimizer's parameter 2 is none of the module's"));
  }
  EXPECT_EQ(step.steps(), 0);
  EXPECT_EQ(step.traces(), 0);
  EXPECT_EQ(daemon_.counts().refusals, 0);
}

// --- Mixed precision ----------------------------------------------------------------------------

// Its parameter times an input of one number: so the test chooses the gradient.
class Times : public Module {
 public:
  Times() : Module("Times") { weight = AddParameter("weight", {3}, init::Ones()); }
  Tensor Forward(const Tensor& x) override { return weight() * x; }
  Variable weight;
};

// Adam and the scale by loops, with gradients that are not finite in steps 1 and 4 (of 0 to 7). On
// two ranks, only one of which overflows.
TEST_F(TrainStepTest, AStepThatOverflowsOnAnyRankIsLeftOutOnAll) {
  const std::vector<float> factors = {0.5f, INFINITY, 0.25f, -0.5f, NAN, 1.0f, 2.0f, 1.5f};
  Ranks ranks(2, &daemon_);
  ranks.Run([&](const World& world, int r) {
    Times model;
    ASSERT_TRUE(model.Init(world, 1, DType::kF32).ok());
    Adam adam(model.parameters(), Rate(0.1));
    LossScaler::Options scaling;
    scaling.scale = 1024;
    scaling.interval = 2;
    LossScaler scaler(scaling);
    TrainStep::Options options;
    options.ranks = world.group();
    options.scaler = &scaler;
    TrainStep step(
        &model, &adam, [&](const Tensors& in) { return Sum(model(in[0])); }, options);
    double p = 1, m = 0, v = 0, scale = 1024;
    int64_t t = 0, streak = 0, skipped = 0;
    std::vector<float> kept;
    std::vector<std::vector<float>> kept_state;
    for (const float factor : factors) {
      const float other = 0.5f;
      ASSERT_TRUE(step({Scalar<float>(world, r == 1 ? factor : other)}).ok());
      const double g = (factor + other) / 2;
      const auto values = Values<float>(model.weight());
      const auto all_state = adam.Slots();
      ASSERT_TRUE(all_state.ok());
      std::vector<std::vector<float>> state;
      for (const Tensor& slot : (*all_state)[0]) state.push_back(Values<float>(slot));
      if (std::isfinite(g)) {
        ++t;
        m = 0.9 * m + 0.1 * g;
        v = 0.999 * v + 0.001 * g * g;
        p -= 0.1 * (m / (1 - std::pow(0.9, t))) / (std::sqrt(v / (1 - std::pow(0.999, t))) + 1e-8);
        if (++streak == 2) {
          scale *= 2;
          streak = 0;
        }
        EXPECT_THAT(values, Pointwise(::testing::FloatNear(1e-5f),
                                      std::vector<float>(3, static_cast<float>(p))));
      } else {
        scale /= 2;
        streak = 0;
        ++skipped;
        EXPECT_EQ(values, kept);  // bit for bit
        EXPECT_EQ(state, kept_state);
      }
      kept = values;
      kept_state = state;
      EXPECT_EQ(Values<float>(scaler.StateOn(world).scale)[0], scale);
      EXPECT_EQ(Values<int64_t>(scaler.StateOn(world).streak)[0], streak);
      EXPECT_EQ(Values<int64_t>(scaler.StateOn(world).skipped)[0], skipped);
    }
    EXPECT_EQ(step.traces(), 1);
  });
}

TEST_F(TrainStepTest, LossScalingCallByCallIsThatOfTheStep) {
  const Session session = daemon_.Open();
  Times eager, model;
  ASSERT_TRUE(eager.Init(session, 1, DType::kF32).ok());
  ASSERT_TRUE(model.Init(session, 1, DType::kF32).ok());
  Adagrad::Options adagrad;
  adagrad.learning_rate_decay = 0.5;
  Adagrad eager_optimizer(eager.parameters(), adagrad), optimizer(model.parameters(), adagrad);
  // It counts what is left out, and the rule does not.
  for (Optimizer* const each : {&eager_optimizer, &optimizer}) each->SetSchedule(WarmUp(10));
  LossScaler eager_scaler, scaler;
  TrainStep::Options options;
  options.scaler = &scaler;
  TrainStep step(
      &model, &optimizer, [&](const Tensors& in) { return Sum(model(in[0])); }, options);
  for (const float factor : {1.0f, INFINITY, -2.0f, 3.0f}) {
    const Tensor x = Scalar<float>(session, factor);
    ASSERT_TRUE(Backward(eager_scaler.Scale(Sum(eager(x)))).ok());
    const auto stepped = eager_scaler.Step(&eager_optimizer);
    ASSERT_TRUE(stepped.ok()) << stepped.status();
    EXPECT_EQ(*stepped, std::isfinite(factor));
    ASSERT_TRUE(step({x}).ok());
    EXPECT_THAT(Values<float>(model.weight()),
                Pointwise(::testing::FloatNear(1e-6f), Values<float>(eager.weight())));
    EXPECT_EQ(Values<float>(scaler.StateOn(session).scale),
              Values<float>(eager_scaler.StateOn(session).scale));
  }
  EXPECT_EQ(eager_optimizer.steps(0), 4);
  EXPECT_EQ(eager_optimizer.skipped(0), 1);
  EXPECT_EQ(eager_scaler.Step(&eager_optimizer).status().code(),
            absl::StatusCode::kFailedPrecondition);
  Times half;
  ASSERT_TRUE(half.Init(session, 1, DType::kF16).ok());
  Sgd sgd(half.parameters(), {});
  TrainStep refused(
      &half, &sgd, [&](const Tensors& in) { return Sum(half(in[0])); }, options);
  EXPECT_THAT(
      std::string(refused({Cast(Scalar<float>(session, 1), DType::kF16)}).status().message()),
      HasSubstr("expected master weights of f32 or f64"));
}

// A third is not rounded to bf16 before gradients are added.
TEST_F(TrainStepTest, TheMeanOfHalfTypesOverRanksIsExact) {
  Ranks ranks(3, &daemon_);
  ranks.Run([&](const World& world, int) {
    Times model;
    ASSERT_TRUE(model.Init(world, 1, DType::kBF16).ok());
    Sgd::Options sgd_options;
    sgd_options.learning_rate = 1;
    Sgd sgd(model.parameters(), sgd_options);
    TrainStep::Options options;
    options.ranks = world.group();
    TrainStep step(
        &model, &sgd, [&](const Tensors& in) { return Sum(model(in[0])); }, options);
    const auto loss = step({Cast(Scalar<float>(world, 127), DType::kBF16)});
    ASSERT_TRUE(loss.ok()) << loss.status();
    // That of each rank: 3 * 127, rounded.
    EXPECT_THAT(Values<float>(Cast(*loss, DType::kF32)), ElementsAre(380));
    EXPECT_THAT(Values<float>(Cast(model.weight(), DType::kF32)), ::testing::Each(1 - 127));
  });
}

// The scale that the first one's step changes is not that of the second one's gradients.
TEST_F(TrainStepTest, OptimizersBehindOneScaledLossDivideByItsScale) {
  const Session session = daemon_.Open();
  LossScaler::Options options;
  options.interval = 1;  // each step changes it
  for (const float first : {1.0f, INFINITY}) {
    Times model, other;
    ASSERT_TRUE(model.Init(session, 1, DType::kF32).ok());
    ASSERT_TRUE(other.Init(session, 1, DType::kF32).ok());
    Sgd sgd(model.parameters(), Sgd::Options()), other_sgd(other.parameters(), Sgd::Options());
    LossScaler scaler(options);
    const Tensor loss =
        Sum(model(Scalar<float>(session, first))) + Sum(other(Scalar<float>(session, 3)));
    ASSERT_TRUE(Backward(scaler.Scale(loss)).ok());
    const auto stepped = scaler.Step(&sgd);
    ASSERT_TRUE(stepped.ok()) << stepped.status();
    EXPECT_EQ(*stepped, std::isfinite(first));
    const auto other_stepped = scaler.Step(&other_sgd);
    ASSERT_TRUE(other_stepped.ok() && *other_stepped) << other_stepped.status();
    EXPECT_THAT(Values<float>(other.weight()), ::testing::Each(::testing::FloatEq(1 - 0.1f * 3)));
  }
}

// As those of two networks that train against each other: what one leaves out the other does not.
TEST_F(TrainStepTest, StepsWithOneScalerCountTheirOwn) {
  const Session session = daemon_.Open();
  Times model, other, expected;
  for (Times* const module : {&model, &other, &expected}) {
    ASSERT_TRUE(module->Init(session, 1, DType::kF32).ok());
  }
  Adam adam(model.parameters(), Rate(0.1)), other_adam(other.parameters(), Rate(0.1)),
      expected_adam(expected.parameters(), Rate(0.1));
  LossScaler scaler;
  TrainStep::Options options;
  options.scaler = &scaler;
  TrainStep other_step(
      &other, &other_adam, [&](const Tensors& in) { return Sum(other(in[0])); }, options);
  TrainStep step(
      &model, &adam, [&](const Tensors& in) { return Sum(model(in[0])); }, options);
  for (const float factor : {1.0f, -2.0f, 3.0f}) {
    for (int i = 0; i < 2; ++i) ASSERT_TRUE(other_step({Scalar<float>(session, INFINITY)}).ok());
    const Tensor x = Scalar<float>(session, factor);
    ASSERT_TRUE(step({x}).ok());
    ASSERT_TRUE(Backward(Sum(expected(x))).ok());
    ASSERT_TRUE(expected_adam.Step().ok());
    EXPECT_THAT(Values<float>(model.weight()),
                Pointwise(::testing::FloatNear(1e-6f), Values<float>(expected.weight())));
  }
  EXPECT_THAT(Values<float>(other.weight()), ::testing::Each(1));
  ASSERT_TRUE(adam.SettleSkips().ok());
  ASSERT_TRUE(other_adam.SettleSkips().ok());
  EXPECT_EQ(adam.skipped(0), 0);
  EXPECT_EQ(other_adam.steps(0), 6);
  EXPECT_EQ(other_adam.skipped(0), 6);
}

// The rate of this rule is another one in each step that counts.
TEST_F(TrainStepTest, StepsOfOtherKindsGoOnFromTheCountOfThoseThatWereNotLeftOut) {
  const Session session = daemon_.Open();
  Times model, expected;
  ASSERT_TRUE(model.Init(session, 1, DType::kF32).ok());
  ASSERT_TRUE(expected.Init(session, 1, DType::kF32).ok());
  Adagrad::Options adagrad;
  adagrad.learning_rate_decay = 0.5;
  Adagrad optimizer(model.parameters(), adagrad),
      expected_optimizer(expected.parameters(), adagrad);
  LossScaler scaler;
  TrainStep::Options options;
  options.scaler = &scaler;
  const TrainStep::Loss loss = [&](const Tensors& in) { return Sum(model(in[0])); };
  TrainStep scaled(&model, &optimizer, loss, options), plain(&model, &optimizer, loss);
  const Tensor one = Scalar<float>(session, 1);
  const Tensor infinite = Scalar<float>(session, INFINITY);
  const std::vector<std::function<absl::Status()>> kinds = {
      [&] { return scaled({one}).status(); }, [&] { return plain({one}).status(); },
      [&] {
        CHORUS_RETURN_IF_ERROR(Backward(Sum(model(one))));
        return optimizer.Step();
      },
      // As a checkpoint does that has been loaded.
      [&]() -> absl::Status {
        CHORUS_ASSIGN_OR_RETURN(const auto state, optimizer.State());
        optimizer.SetState(0, state[0]);
        return scaled({one}).status();
      }};
  for (const std::function<absl::Status()>& kind : kinds) {
    ASSERT_TRUE(scaled({infinite}).ok());
    const absl::Status status = kind();
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(Backward(Sum(expected(one))).ok());
    ASSERT_TRUE(expected_optimizer.Step().ok());
    EXPECT_THAT(Values<float>(model.weight()),
                Pointwise(::testing::FloatNear(1e-6f), Values<float>(expected.weight())));
  }
  EXPECT_EQ(optimizer.steps(0), 8);
}

// bf16 has 8 bits: an update of 2^-10 of the weight is seen by the master alone, until it has
// grown.
TEST_F(TrainStepTest, MasterWeightsKeepWhatTheirCopiesCannot) {
  const Session session = daemon_.Open();
  for (const DType compute : {DType::kBF16, DType::kF16}) {
    Times model;
    ASSERT_TRUE(model.Init(session, 1, DType::kF32).ok());
    Sgd::Options rate;
    rate.learning_rate = 1.0 / 4096;
    Sgd sgd(model.parameters(), rate);
    TrainStep::Options options;
    options.compute = compute;
    TrainStep step(
        &model, &sgd,
        [&](const Tensors& in) {
          EXPECT_EQ(model.weight().dtype(), compute);
          return Sum(Cast(model(Cast(in[0], compute)), DType::kF32));
        },
        options);
    for (int i = 1; i <= 20; ++i) {
      const auto loss = step({Scalar<float>(session, 1)});
      ASSERT_TRUE(loss.ok()) << loss.status();
      // Of the rounded copy; then the master goes on by what is exact in f32.
      const auto before = static_cast<float>(1 - (i - 1) / 4096.0);
      const Tensor copy = Cast(Scalar<float>(session, before), compute);
      EXPECT_EQ(Values<float>(*loss)[0], 3 * Values<float>(Cast(copy, DType::kF32))[0]);
      EXPECT_THAT(Values<float>(model.weight()),
                  ::testing::Each(static_cast<float>(1 - i / 4096.0)));
    }
    EXPECT_EQ(model.weight().dtype(), DType::kF32);
    // The same call by call.
    const Tensor x = Cast(Scalar<float>(session, 2), compute);
    const Tensor y = (*model.WithTensors(CastParameters(model, compute)))(x);
    EXPECT_EQ(y.dtype(), compute);
    ASSERT_TRUE(Backward(Sum(Cast(y, DType::kF32))).ok());
    EXPECT_THAT(Values<float>(model.weight.grad()), ::testing::Each(2));
  }
}

TEST_F(TrainStepTest, BuffersAreNotCast) {
  const Session session = daemon_.Open();
  BatchNorm norm(2);
  ASSERT_TRUE(norm.Init(session, 1, DType::kF32).ok());
  Sgd sgd(norm.parameters(), {});
  TrainStep::Options options;
  options.compute = DType::kBF16;
  TrainStep step(
      &norm, &sgd,
      [&](const Tensors& in) {
        EXPECT_EQ(norm.weight()().dtype(), DType::kBF16);
        EXPECT_EQ(norm.running_mean()().dtype(), DType::kF32);
        return Sum(Cast(norm(Cast(in[0], DType::kBF16)), DType::kF32));
      },
      options);
  ASSERT_TRUE(step({FromHost<float>(session, {1, 2, 2, 5}, {2, 2})}).ok());
  // Of 1.5 and 3.5, of which bf16 would keep 8 bits.
  EXPECT_THAT(Values<float>(norm.running_mean()()),
              Pointwise(::testing::FloatNear(1e-7f), std::vector<float>{0.15f, 0.35f}));
}

TEST_F(TrainStepTest, OneGradientThatIsNotFiniteIsEnough) {
  const Session session = daemon_.Open();
  for (const float bad : {INFINITY, -INFINITY, NAN}) {
    for (size_t at = 0; at < 4; ++at) {
      std::vector<Tensor> gradients = {FromHost<float>(session, {4, 8}, {2}), Tensor(),
                                       Zeros(session, DType::kF32, {0}),
                                       FromHost<float>(session, {2}, {1})};
      const bool finite = at == 1 || at == 2;
      if (at == 0) gradients[0] = FromHost<float>(session, {4, bad}, {2});
      if (at == 3) gradients[3] = FromHost<float>(session, {bad}, {1});
      const Tensor all = LossScaler::Unscale(&gradients, Scalar<float>(session, 4));
      EXPECT_EQ(Values<bool>(all)[0], finite) << bad << " at " << at;
      EXPECT_EQ(Values<float>(gradients[0])[0], 1);
    }
  }
}

}  // namespace
}  // namespace nn
}  // namespace chorus
