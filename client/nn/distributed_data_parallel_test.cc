#include "chorus/nn/distributed_data_parallel.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <future>
#include <iostream>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "chorus/chorus.h"
#include "chorus/functional/math.h"
#include "chorus/nn/batch_norm.h"
#include "chorus/nn/init.h"
#include "chorus/nn/layers.h"
#include "chorus/nn/loss.h"
#include "chorus/nn/optim.h"
#include "chorus/nn/train_step.h"
#include "client/internal/tape.h"
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
using chorus::testing::OnRanks;
using chorus::testing::Ranks;
using chorus::testing::Values;
using ::testing::DoubleNear;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pointwise;

using Ddp = DistributedDataParallel;
using Options = DistributedDataParallelOptions;
using Doubles = std::vector<double>;
using Tensors = std::vector<Tensor>;

// Linears, of which each call uses those that it is told, one behind the other.
class Chain : public Module {
 public:
  explicit Chain(int links, int64_t width = 3) : Module("Chain") {
    for (int i = 0; i < links; ++i) {
      links_.push_back(&Add<Linear>(absl::StrCat("link", i), width, width));
    }
    for (int i = 0; i < links; ++i) use.push_back(i);
  }
  Tensor Forward(const Tensor& x) override {
    Tensor y = x;
    for (const int i : use) y = Tanh((*links_[static_cast<size_t>(i)])(y));
    return y;
  }
  std::vector<int> use;

 private:
  std::vector<Linear*> links_;
};

// Counts its calls in a buffer, and adds the rank of the first one to what it gives.
class Counted : public Module {
 public:
  Counted() : Module("Counted"), linear_(Add<Linear>("linear", 2, 1)) {
    calls_ = AddBuffer("calls", {}, init::Zeros(), DType::kI64);
  }
  Tensor Forward(const Tensor& x) override {
    calls_.Set(calls_() + 1);
    return linear_(x);
  }
  Variable calls_;

 private:
  Linear& linear_;
};

// Two numbers, each of which has its own gradient: what goes in, and ten times that.
class Two : public Module {
 public:
  Two() : Module("Two") {
    a_ = AddParameter("a", {1}, init::Ones());
    b_ = AddParameter("b", {1}, init::Ones());
  }
  Tensor Forward(const Tensor& x) override {
    const Tensor first = uses_b_first ? x * b_() * 10.0 : Tensor();
    const Tensor y = x * a_();
    if (uses_b_first) return first + y;
    return leaves_b_out ? y : y + x * b_() * 10.0;
  }
  bool leaves_b_out = false;
  bool uses_b_first = false;

 private:
  Variable a_;
  Variable b_;
};

// The loss of some rows: half the mean over rows of the squares of what the module gives.
Tensor LossOf(Module& module, const Tensor& x) {
  const Tensor y = module(x);
  return Sum(y * y) * (0.5 / static_cast<double>(x.shape()[0]));
}

Tensor Rows(const DeviceRef& device, int from, int rows, int64_t width) {
  const Doubles all = Numbers(static_cast<int64_t>(from + rows) * width, 3);
  return FromHost(device, Doubles(all.begin() + from * width, all.end()), {rows, width});
}

std::vector<Doubles> GradsOf(const Module& module) {
  std::vector<Doubles> grads;
  for (const Variable& parameter : module.parameters()) {
    const Tensor grad = parameter.grad();
    grads.push_back(grad.defined() ? Values<double>(grad) : Doubles());
  }
  return grads;
}
std::vector<Doubles> ValuesOf(const Module& module) {
  std::vector<Doubles> values;
  for (const Variable& parameter : module.parameters()) {
    values.push_back(Values<double>(parameter()));
  }
  return values;
}
void ExpectNear(const std::vector<Doubles>& got, const std::vector<Doubles>& wanted,
                double tolerance = 1e-12) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_THAT(got[i], Pointwise(DoubleNear(tolerance), wanted[i])) << "parameter " << i;
  }
}

class DistributedDataParallelTest : public ::testing::Test {
 protected:
  // Made from other seeds: the first rank's count.
  static std::shared_ptr<Ddp> Make(const std::shared_ptr<Module>& module, const World& world,
                                   const Options& options = {}) {
    const absl::Status made =
        module->Init(world, 1 + static_cast<uint64_t>(world.rank()), DType::kF64);
    EXPECT_TRUE(made.ok()) << made;
    absl::StatusOr<std::shared_ptr<Ddp>> model = Ddp::Create(module, world, options);
    EXPECT_TRUE(model.ok()) << model.status();
    return model.ok() ? *model : nullptr;
  }

  // The gradients of a chain of two that one rank alone has: summed up over these calls, each of as
  // many rows as two ranks have in theirs together.
  std::vector<Doubles> GradsOnOne(const std::vector<int>& calls) {
    const Session session = daemon_.Open();
    Chain model(2);
    const absl::Status made = model.Init(session, 1, DType::kF64);
    EXPECT_TRUE(made.ok()) << made;
    for (const int i : calls) {
      EXPECT_TRUE(Backward(LossOf(model, Rows(session, 4 * i, 4, 3))).ok());
    }
    return GradsOf(model);
  }

  FakeDaemon daemon_;
};

TEST_F(DistributedDataParallelTest, RanksTrainAsOneWouldWithAllRowsWhateverTheBuckets) {
  const int steps = 4;
  Sgd::Options momentum;
  momentum.momentum = 0.9;
  for (const int size : {1, 2, 3}) {
    std::vector<Doubles> alone;
    {
      const Session session = daemon_.Open();
      Chain model(4);
      ASSERT_TRUE(model.Init(session, 1, DType::kF64).ok());
      Sgd sgd(model.parameters(), momentum);
      for (int i = 0; i < steps; ++i) {
        ASSERT_TRUE(Backward(LossOf(model, Rows(session, 6 * i, 6, 3))).ok());
        ASSERT_TRUE(sgd.Step().ok());
      }
      alone = ValuesOf(model);
    }
    std::vector<Doubles> first;
    for (const int64_t bytes : {int64_t{1}, int64_t{100}, int64_t{1} << 20}) {
      std::vector<std::vector<Doubles>> values(static_cast<size_t>(size));
      OnRanks(size, [&](const World& world, int rank) {
        Options options;
        options.bucket_bytes = bytes;
        options.first_bucket_bytes = bytes;
        const auto model = Make(std::make_shared<Chain>(4), world, options);
        ASSERT_NE(model, nullptr);
        // Weights of 72 bytes, biases of 24; a bucket is closed when it is full.
        EXPECT_EQ(model->buckets().size(), bytes == 1 ? 8u : bytes == 100 ? 3u : 1u);
        Sgd sgd(model->parameters(), momentum);
        for (int i = 0; i < steps; ++i) {
          const int rows = 6 / size;
          ASSERT_TRUE(world.Step(i + 1).ok());
          ASSERT_TRUE(Backward(LossOf(*model, Rows(world, 6 * i + rank * rows, rows, 3))).ok());
          ASSERT_TRUE(sgd.Step().ok());
        }
        values[static_cast<size_t>(rank)] = ValuesOf(*model);
      });
      for (const auto& of_rank : values) EXPECT_EQ(of_rank, values[0]);
      ExpectNear(values[0], alone);
      if (first.empty()) first = values[0];
      EXPECT_EQ(values[0], first) << bytes;
    }
  }
}

TEST_F(DistributedDataParallelTest, AllBeginWithWhatRankZeroHas) {
  std::vector<std::vector<Doubles>> values(2);
  OnRanks(2, [&](const World& world, int rank) {
    auto module = std::make_shared<Counted>();
    ASSERT_TRUE(module->Init(world, 7 + static_cast<uint64_t>(rank), DType::kF64).ok());
    module->calls_.Set(Scalar<int64_t>(world, 10 * (rank + 1)));
    const auto model = Ddp::Create(module, world);
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_THAT(Values<int64_t>(module->calls_()), ElementsAre(10));
    values[static_cast<size_t>(rank)] = ValuesOf(*module);
    EXPECT_EQ((*model)->named_variables()[1].name, "module.linear.weight");
    // Buffers are the first rank's before each call, unless gradients are off.
    module->calls_.Set(Scalar<int64_t>(world, 20 * (rank + 1)));
    const Tensor x = Numbers(world, {2, 2});
    ASSERT_TRUE((**model)(x).Wait().ok());
    EXPECT_THAT(Values<int64_t>(module->calls_()), ElementsAre(21));
    module->calls_.Set(Scalar<int64_t>(world, 30 * (rank + 1)));
    {
      const NoGrad no_grad;
      ASSERT_TRUE((**model)(x).Wait().ok());
    }
    EXPECT_THAT(Values<int64_t>(module->calls_()), ElementsAre(30 * (rank + 1) + 1));
    Options own;
    own.broadcast_buffers = false;
    const auto other = Ddp::Create(module, world, own);
    ASSERT_TRUE(other.ok()) << other.status();
    module->calls_.Set(Scalar<int64_t>(world, 40 * (rank + 1)));
    ASSERT_TRUE((**other)(x).Wait().ok());
    EXPECT_THAT(Values<int64_t>(module->calls_()), ElementsAre(40 * (rank + 1) + 1));
  });
  EXPECT_EQ(values[0], values[1]);
}

TEST_F(DistributedDataParallelTest, ModulesThatDifferAreRefusedByRankAndName) {
  struct Case {
    std::function<std::shared_ptr<Module>(int rank)> make;
    std::string text;
  };
  const std::vector<Case> cases = {
      {[](int rank) { return std::make_shared<Linear>(2, rank == 2 ? 3 : 4); },
       "rank 2 of the group has weight f64[3,2], trained where rank 0 has weight f64[4,2], "
       "trained"},
      {[](int rank) { return std::make_shared<Chain>(rank == 1 ? 1 : 2); },
       "rank 1 of the group has nothing more where rank 0 has link1.weight"},
      {[](int rank) { return std::make_shared<Chain>(rank == 0 ? 1 : 2); },
       "rank 1 of the group has link1.weight f64[3,3], trained where rank 0 has nothing more"},
      {[](int rank) {
         auto module = std::make_shared<Linear>(2, 2);
         if (rank == 1) module->RequireGrad(false);
         return module;
       },
       "rank 1 of the group has weight f64[2,2], frozen where rank 0 has weight f64[2,2], trained"},
  };
  for (const Case& c : cases) {
    OnRanks(3, [&](const World& world, int rank) {
      const std::shared_ptr<Module> module = c.make(rank);
      ASSERT_TRUE(module->Init(world, 1, DType::kF64).ok());
      const absl::Status status = Ddp::Create(module, world).status();
      EXPECT_EQ(ErrorOf(status).reason, Reason::kMismatch);
      EXPECT_THAT(std::string(status.message()), HasSubstr(c.text));
      EXPECT_THAT(std::string(status.message()), HasSubstr("distributed_data_parallel_test.cc:"));
    });
  }
}

TEST_F(DistributedDataParallelTest, WhatCannotBeIsRefusedAlone) {
  OnRanks(1, [&](const World& world, int /*rank*/) {
    const auto message = [](const absl::StatusOr<std::shared_ptr<Ddp>>& made) {
      return std::string(made.status().message());
    };
    EXPECT_THAT(message(Ddp::Create(nullptr, world)), HasSubstr("expected a module, got none"));
    auto linear = std::make_shared<Linear>(2, 2);
    EXPECT_THAT(message(Ddp::Create(linear, Group())), HasSubstr("expected a group, got none"));
    const auto unmade = Ddp::Create(linear, world);
    EXPECT_EQ(ErrorOf(unmade.status()).reason, Reason::kWrongState);
    EXPECT_THAT(message(unmade), HasSubstr("weight is not there yet: call Init"));
    ASSERT_TRUE(linear->Init(world, 1).ok());
    Options empty;
    empty.bucket_bytes = 0;
    EXPECT_THAT(message(Ddp::Create(linear, world, empty)),
                HasSubstr("buckets of at least 1 byte, got 0"));
    const Session session = daemon_.Open(2);
    ASSERT_TRUE(linear->Init(session.device(1), 1).ok());
    EXPECT_THAT(
        message(Ddp::Create(linear, world)),
        HasSubstr("expected all variables on device 0, the group's, got weight on device 1"));
  });
}

TEST_F(DistributedDataParallelTest, AParameterThatIsNotThereIsNamedAlsoWhereNoLossUsesIt) {
  OnRanks(1, [&](const World& world, int /*rank*/) {
    Options options;
    options.find_unused_parameters = true;
    auto chain = std::make_shared<Chain>(2);
    chain->use = {0};
    const auto model = Make(chain, world, options);
    ASSERT_NE(model, nullptr);
    const Variable unused = model->parameters()[2];
    const Tensor x = Rows(world, 0, 2, 3);
    ASSERT_TRUE(Backward(LossOf(*model, x)).ok());
    unused.Set(Tensor());
    const absl::Status none = (*model)(x).status();
    EXPECT_EQ(ErrorOf(none).reason, Reason::kWrongState) << none;
    EXPECT_THAT(std::string(none.message()), HasSubstr("link1.weight is not there"));
    EXPECT_THAT(std::string(none.message()), HasSubstr("distributed_data_parallel_test.cc:"));
    unused.Set(FromError(world.device(), MakeError(Reason::kBadType, "it was never read")));
    const absl::Status failed = (*model)(x).status();
    EXPECT_EQ(ErrorOf(failed).reason, Reason::kBadType) << failed;
    EXPECT_THAT(std::string(failed.message()), HasSubstr("link1.weight: it was never read"));
  });
}

// The order of uses is told by the tape, and rank 0's counts.
TEST_F(DistributedDataParallelTest, BucketsFollowTheOrderInWhichRankZeroHasUsedParameters) {
  OnRanks(2, [&](const World& world, int rank) {
    Options options;
    options.bucket_bytes = 96;
    options.first_bucket_bytes = 96;
    auto chain = std::make_shared<Chain>(3);
    chain->use = rank == 0 ? std::vector<int>{2, 0, 1} : std::vector<int>{1, 2, 0};
    const auto model = Make(chain, world, options);
    ASSERT_NE(model, nullptr);
    using Names = std::vector<std::vector<std::string>>;
    EXPECT_EQ(model->buckets(), (Names{{"link2.bias", "link2.weight"},
                                       {"link1.bias", "link1.weight"},
                                       {"link0.bias", "link0.weight"}}));
    std::vector<std::vector<Doubles>> grads;
    for (int i = 0; i < 3; ++i) {
      model->ClearGrads();
      ASSERT_TRUE(Backward(LossOf(*model, Rows(world, rank * 2, 2, 3))).ok());
      grads.push_back(GradsOf(*model));
      if (i == 0) continue;
      EXPECT_EQ(model->buckets(), (Names{{"link1.bias", "link1.weight"},
                                         {"link0.bias", "link0.weight"},
                                         {"link2.bias", "link2.weight"}}));
      EXPECT_EQ(grads[static_cast<size_t>(i)], grads[0]);
    }
  });
}

// A rank may have traced before the order has come, and another one trace anew behind it.
TEST_F(DistributedDataParallelTest, CompiledStepsKeepTheOrderOfCreateWheneverTheyAreTraced) {
  OnRanks(2, [&](const World& world, int rank) {
    auto chain = std::make_shared<Chain>(2);
    chain->use = {1, 0};
    const auto model = Make(chain, world);
    ASSERT_NE(model, nullptr);
    const double rate = 0.5;
    Sgd::Options options;
    options.learning_rate = rate;
    Sgd sgd(model->parameters(), options);
    TrainStep step(model.get(), &sgd, [&](const Tensors& in) { return LossOf(*model, in[0]); });
    ASSERT_TRUE(step({Rows(world, 4 * rank, 4, 3)}).ok());
    for (int i = 0; i < 2; ++i) {
      ASSERT_TRUE(Backward(LossOf(*model, Rows(world, 4 * rank, 4, 3))).ok());
    }
    EXPECT_EQ(model->buckets()[0][0], "link0.bias");
    const Tensor x = Rows(world, 4 * rank, rank == 0 ? 4 : 3, 3);
    model->ClearGrads();
    ASSERT_TRUE(Backward(LossOf(*model, x)).ok());
    std::vector<Doubles> wanted = ValuesOf(*model);
    const std::vector<Doubles> grads = GradsOf(*model);
    for (size_t i = 0; i < wanted.size(); ++i) {
      for (size_t e = 0; e < wanted[i].size(); ++e) wanted[i][e] -= rate * grads[i][e];
    }
    ASSERT_TRUE(step({x}).ok());
    EXPECT_EQ(step.traces(), rank == 0 ? 1 : 2);
    ExpectNear(ValuesOf(*model), wanted);
  });
}

TEST_F(DistributedDataParallelTest, ARankThatHasNotHeardOfTheOrderMeetsNobodyElsesBuckets) {
  std::vector<Session> sessions;
  std::vector<World> worlds;
  for (int rank = 0; rank < 2; ++rank) {
    // What does not come at once does not come to rank 1.
    sessions.push_back(daemon_.Open(1, std::chrono::seconds(rank == 0 ? 20 : 2)));
    WorldOptions options;
    options.rank = rank;
    options.size = 2;
    const auto world = sessions.back().Join(options);
    ASSERT_TRUE(world.ok()) << world.status();
    worlds.push_back(*world);
  }
  std::promise<void> rank_1_has_failed;
  std::promise<void> rank_0_has_called;
  const auto take_part = [&](int rank) {
    const World& world = worlds[static_cast<size_t>(rank)];
    auto two = std::make_shared<Two>();
    two->uses_b_first = true;
    const auto model = Make(two, world);
    ASSERT_NE(model, nullptr);
    for (int turn = 1; turn <= 4; ++turn) {
      ASSERT_TRUE(world.Step(turn).ok());
      model->ClearGrads();
      if (turn == 2 && rank == 0) rank_1_has_failed.get_future().wait();
      const Tensor loss = (*model)(FromHost<double>(world, {rank == 0 ? 1.0 : 100.0}, {1}));
      if (turn == 2 && rank == 1) {
        EXPECT_FALSE(loss.status().ok());
        rank_1_has_failed.set_value();
        rank_0_has_called.get_future().wait();
      }
      if (turn == 2 && rank == 0) {
        rank_0_has_called.set_value();
        EXPECT_THAT(model->buckets(), ElementsAre(ElementsAre("a", "b")));
      }
      absl::Status status = Backward(loss);
      if (status.ok()) status = model->parameters()[0].grad().Wait();
      EXPECT_EQ(status.ok(), turn == 1) << status;
      if (turn > 2 && rank == 1) {
        EXPECT_THAT(std::string(status.message()), HasSubstr("Create it anew"));
      }
    }
  };
  std::thread rank_1(take_part, 1);
  take_part(0);
  rank_1.join();
}

// Whichever turns a rank leaves out, the first ones too: all hear of the order in the same turn.
TEST_F(DistributedDataParallelTest, ATurnThatOneRankLeavesOutBeforeTheOrderHasComeIsNoOtherTurns) {
  for (const int left_out : {1, 2, 3}) {
    OnRanks(2, [&](const World& world, int rank) {
      auto two = std::make_shared<Two>();
      two->uses_b_first = true;
      const auto model = Make(two, world);
      ASSERT_NE(model, nullptr);
      for (int turn = 1; turn <= 5; ++turn) {
        ASSERT_TRUE(world.Step(turn).ok());
        if (turn == left_out && rank == 1) continue;
        model->ClearGrads();
        absl::Status status =
            Backward((*model)(FromHost<double>(world, {rank == 0 ? 1.0 : 100.0}, {1})));
        for (size_t i = 0; i < 2; ++i) {
          const Tensor grad = model->parameters()[i].grad();
          if (status.ok()) status = grad.Wait();
          EXPECT_EQ(status.ok(), turn != left_out) << "turn " << turn << ": " << status;
          if (status.ok()) {
            EXPECT_THAT(Values<double>(grad), ElementsAre(i == 0 ? 50.5 : 505));
          }
        }
      }
      EXPECT_THAT(model->buckets(), ElementsAre(ElementsAre("a", "b")));
    });
  }
}

// Rank 0 of these calls what a rank would whose order has come: something else.
TEST_F(DistributedDataParallelTest, WhatIsNoOrderOfTheParametersIsRefusedAndAskedForAgain) {
  OnRanks(2, [&](const World& world, int rank) {
    const auto model = Make(std::make_shared<Two>(), world);
    ASSERT_NE(model, nullptr);
    const Tensor x = FromHost<double>(world, {1}, {1});
    ASSERT_TRUE((*model)(x).Wait().ok());
    const auto send = [&world](const std::vector<int64_t>& order) {
      ASSERT_TRUE(Broadcast(FromHost(world, order, {2}), 0, world).Wait().ok());
    };
    if (rank == 0) {
      send({0, 0});
      send({0, 1});
      return;
    }
    const absl::Status status = (*model)(x).status();
    EXPECT_EQ(ErrorOf(status).reason, Reason::kMismatch) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("what rank 0 has sent is no order of the parameters"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("Create it anew"));
    EXPECT_THAT(model->buckets(), ElementsAre(ElementsAre("b", "a")));
    EXPECT_TRUE((*model)(x).Wait().ok());
    EXPECT_THAT(model->buckets(), ElementsAre(ElementsAre("a", "b")));
  });
}

TEST_F(DistributedDataParallelTest, WhatIsNotUsedComesLast) {
  OnRanks(1, [&](const World& world, int /*rank*/) {
    Options options;
    options.find_unused_parameters = true;
    auto chain = std::make_shared<Chain>(3);
    chain->use = {1, 0};
    const auto model = Make(chain, world, options);
    ASSERT_NE(model, nullptr);
    for (int i = 0; i < 2; ++i) {
      ASSERT_TRUE(Backward(LossOf(*model, Rows(world, 0, 1, 3))).ok());
    }
    ASSERT_EQ(model->buckets().size(), 1u);
    EXPECT_THAT(model->buckets()[0], ElementsAre("link0.bias", "link0.weight", "link1.bias",
                                                 "link1.weight", "link2.bias", "link2.weight"));
  });
}

TEST_F(DistributedDataParallelTest, NoSyncAddsUpAndTheNextBackwardTakesTheMeanOfAll) {
  const int size = 2;
  const std::vector<Doubles> wanted = GradsOnOne({0, 1, 2});
  std::vector<std::vector<Doubles>> grads(size);
  OnRanks(size, [&](const World& world, int rank) {
    const auto model = Make(std::make_shared<Chain>(2), world);
    ASSERT_NE(model, nullptr);
    const auto backward = [&](int i) {
      ASSERT_TRUE(Backward(LossOf(*model, Rows(world, 4 * i + 2 * rank, 2, 3))).ok());
    };
    {
      const Ddp::NoSync no_sync(model.get());
      backward(0);
      const Ddp::NoSync inner(model.get());
      backward(1);
    }
    const std::vector<Doubles> local = GradsOf(*model);
    // What Grad gives is of its own call alone, and leaves what has been added up.
    const auto asked =
        Grad({LossOf(*model, Rows(world, 8 + 2 * rank, 2, 3))}, {model->parameters()[0]()});
    ASSERT_TRUE(asked.ok()) << asked.status();
    EXPECT_EQ(GradsOf(*model), local);
    backward(2);
    grads[static_cast<size_t>(rank)] = GradsOf(*model);
    // And once more: of what all have in common the mean is what it was.
    backward(0);
    const std::vector<Doubles> more = GradsOf(*model);
    model->ClearGrads();
    backward(0);
    std::vector<Doubles> sum = GradsOf(*model);
    for (size_t i = 0; i < sum.size(); ++i) {
      for (size_t e = 0; e < sum[i].size(); ++e) {
        sum[i][e] += grads[static_cast<size_t>(rank)][i][e];
      }
    }
    ExpectNear(more, sum);
  });
  EXPECT_EQ(grads[0], grads[1]);
  ExpectNear(grads[0], wanted);
}

TEST_F(DistributedDataParallelTest, TheGradientsOfCastParametersAreThoseOfTheirMasters) {
  const int size = 2;
  const double tolerance = 1e-5;  // f32's
  const std::vector<Doubles> wanted = GradsOnOne({0, 1, 2});
  const std::vector<Doubles> wanted_of_two = GradsOnOne({0, 1});
  std::vector<std::vector<Doubles>> grads(size);
  OnRanks(size, [&](const World& world, int rank) {
    const auto model = Make(std::make_shared<Chain>(2), world);
    ASSERT_NE(model, nullptr);
    const auto cast = [&] { return model->WithTensors(CastParameters(*model, DType::kF32)); };
    const auto loss = [&](Module& module, int i) {
      const Tensor x = Rows(world, 4 * i + 2 * rank, 2, 3);
      const Tensor y = LossOf(module, Cast(x, DType::kF32));
      EXPECT_EQ(y.dtype(), DType::kF32);
      return Cast(y, DType::kF64);
    };
    {
      const Ddp::NoSync no_sync(model.get());
      ASSERT_TRUE(Backward(loss(*cast(), 0)).ok());
      ASSERT_TRUE(Backward(loss(*cast(), 1)).ok());
    }
    ASSERT_TRUE(Backward(loss(*cast(), 2)).ok());
    grads[static_cast<size_t>(rank)] = GradsOf(*model);
    ExpectNear(GradsOf(*model), wanted, tolerance);
    // Two calls of the same casts make one loss.
    model->ClearGrads();
    const std::shared_ptr<Module> same = cast();
    ASSERT_TRUE(Backward(loss(*same, 0) + loss(*same, 1)).ok());
    ExpectNear(GradsOf(*model), wanted_of_two, tolerance);
    // What reads a master past the call: c w w, with another c on each rank.
    model->ClearGrads();
    const Tensor w = model->parameters()[0]();
    const double c = rank == 0 ? 1 : 3;
    ASSERT_TRUE(Backward(loss(*cast(), 0) + loss(*cast(), 1) + Sum(w * w) * c).ok());
    std::vector<Doubles> with_penalty = wanted_of_two;
    const Doubles of_w = Values<double>(w);
    for (size_t e = 0; e < of_w.size(); ++e) with_penalty[0][e] += 4 * of_w[e];
    ExpectNear(GradsOf(*model), with_penalty, tolerance);
    // And compiled.
    model->ClearGrads();
    ASSERT_TRUE(Backward(loss(*cast(), 0)).ok());
    std::vector<Doubles> values = ValuesOf(*model);
    const std::vector<Doubles> gradients = GradsOf(*model);
    Sgd::Options rate;
    rate.learning_rate = 0.5;
    for (size_t i = 0; i < values.size(); ++i) {
      for (size_t e = 0; e < values[i].size(); ++e) values[i][e] -= 0.5 * gradients[i][e];
    }
    Sgd sgd(model->parameters(), rate);
    TrainStep::Options compute;
    compute.compute = DType::kF32;
    TrainStep step(
        model.get(), &sgd,
        [&model](const Tensors& in) { return LossOf(*model, Cast(in[0], DType::kF32)); }, compute);
    ASSERT_TRUE(step({Rows(world, 2 * rank, 2, 3)}).ok());
    ExpectNear(ValuesOf(*model), values, tolerance);
  });
  EXPECT_EQ(grads[0], grads[1]);
}

// What is cast at the call is used where the cast is read.
TEST_F(DistributedDataParallelTest, BucketsFollowTheOrderInWhichCastParametersAreUsed) {
  OnRanks(2, [&](const World& world, int rank) {
    Options options;
    options.bucket_bytes = 96;
    options.first_bucket_bytes = 96;
    auto chain = std::make_shared<Chain>(3);
    chain->use = {2, 0, 1};
    const auto model = Make(chain, world, options);
    ASSERT_NE(model, nullptr);
    for (int i = 0; i < 2; ++i) {
      const auto cast = model->WithTensors(CastParameters(*model, DType::kF32));
      const Tensor x = Cast(Rows(world, rank * 2, 2, 3), DType::kF32);
      ASSERT_TRUE(Backward(LossOf(*cast, x)).ok());
    }
    using Names = std::vector<std::vector<std::string>>;
    EXPECT_EQ(model->buckets(), (Names{{"link1.bias", "link1.weight"},
                                       {"link0.bias", "link0.weight"},
                                       {"link2.bias", "link2.weight"}}));
  });
}

TEST_F(DistributedDataParallelTest, WhatNoSyncAddsUpLateOrOnceMoreGoesIntoTheNextMean) {
  const int size = 2;
  for (const bool late : {true, false}) {
    SCOPED_TRACE(late ? "late" : "once more");
    // The losses in the order of their Backward: the first call's behind the second's.
    const std::vector<int> order = late ? std::vector<int>{1, 0, 2} : std::vector<int>{0, 1, 0, 2};
    const std::vector<Doubles> wanted = GradsOnOne(order);
    std::vector<std::vector<Doubles>> grads(size);
    OnRanks(size, [&](const World& world, int rank) {
      const auto model = Make(std::make_shared<Chain>(2), world);
      ASSERT_NE(model, nullptr);
      const auto loss = [&](int i) { return LossOf(*model, Rows(world, 4 * i + 2 * rank, 2, 3)); };
      Tensors losses;
      {
        const Ddp::NoSync no_sync(model.get());
        losses.push_back(loss(0));
      }
      losses.push_back(loss(1));
      losses.push_back(loss(2));
      BackwardOptions retain;
      retain.retain_graph = true;
      for (const int i : order) {
        const absl::Status backward = Backward(losses[static_cast<size_t>(i)], retain);
        ASSERT_TRUE(backward.ok()) << backward;
      }
      grads[static_cast<size_t>(rank)] = GradsOf(*model);
    });
    EXPECT_EQ(grads[0], grads[1]);
    ExpectNear(grads[0], wanted);
  }
}

// What the last mean has left is there on all ranks, and one alone adds to it, whether the other
// has a call of its own under NoSync or none.
TEST_F(DistributedDataParallelTest, WhatOneRankAloneAddsUpBehindAMeanGoesIntoTheNext) {
  const int size = 2;
  std::vector<Doubles> wanted;
  {
    const Session session = daemon_.Open();
    Chain model(2);
    ASSERT_TRUE(model.Init(session, 1, DType::kF64).ok());
    for (const int i : {0, 2}) {
      ASSERT_TRUE(Backward(LossOf(model, Rows(session, 4 * i, 4, 3))).ok());
    }
    ASSERT_TRUE(Backward(LossOf(model, Rows(session, 4, 2, 3)) * 0.5).ok());  // of one of two
    wanted = GradsOf(model);
  }
  for (const bool both_call : {true, false}) {
    SCOPED_TRACE(both_call ? "both call" : "one calls");
    std::vector<std::vector<Doubles>> grads(size);
    OnRanks(size, [&](const World& world, int rank) {
      const auto model = Make(std::make_shared<Chain>(2), world);
      ASSERT_NE(model, nullptr);
      const auto loss = [&](int i) { return LossOf(*model, Rows(world, 4 * i + 2 * rank, 2, 3)); };
      ASSERT_TRUE(Backward(loss(0)).ok());
      if (both_call || rank == 0) {
        const Ddp::NoSync no_sync(model.get());
        const Tensor local = loss(1);
        if (rank == 0) {
          ASSERT_TRUE(Backward(local).ok());
        }
      }
      ASSERT_TRUE(Backward(loss(2)).ok());
      grads[static_cast<size_t>(rank)] = GradsOf(*model);
    });
    EXPECT_EQ(grads[0], grads[1]);
    ExpectNear(grads[0], wanted);
  }
}

TEST_F(DistributedDataParallelTest, ABackwardThatFailsKeepsWhatWasAddedUp) {
  OnRanks(1, [](const World& world, int) {
    int buckets_left = 0;
    Options options;
    options.first_bucket_bytes = options.bucket_bytes = 1;
    // Shows which gradients have come through it.
    options.hook = [&buckets_left](const Tensors& gradients,
                                   const Group&) -> absl::StatusOr<Tensors> {
      if (buckets_left-- == 0) return MakeError(Reason::kWrongState, "the hook has had enough");
      return Tensors{gradients[0] * 2};
    };
    const auto model = Make(std::make_shared<Chain>(2), world, options);
    ASSERT_NE(model, nullptr);
    const auto backward = [&](int buckets) {
      buckets_left = buckets;
      return Backward(LossOf(*model, Rows(world, 0, 2, 3)));
    };
    {
      const Ddp::NoSync no_sync(model.get());
      ASSERT_TRUE(backward(0).ok());
    }
    const std::vector<Doubles> local = GradsOf(*model);
    for (int buckets = 0; buckets < 4; ++buckets) {
      SCOPED_TRACE(buckets);
      EXPECT_THAT(std::string(backward(buckets).message()), HasSubstr("has had enough"));
      EXPECT_EQ(GradsOf(*model), local);
    }
    ASSERT_TRUE(backward(4).ok());
    std::vector<Doubles> wanted = local;
    for (Doubles& grad : wanted) {
      for (double& element : grad) element *= 4;
    }
    EXPECT_EQ(GradsOf(*model), wanted);
    // The next one's are added to it, and the hook gets the sum.
    ASSERT_TRUE(backward(4).ok());
    for (size_t i = 0; i < wanted.size(); ++i) {
      for (size_t e = 0; e < wanted[i].size(); ++e) wanted[i][e] = 2 * (wanted[i][e] + local[i][e]);
    }
    EXPECT_EQ(GradsOf(*model), wanted);
  });
}

TEST_F(DistributedDataParallelTest, AParameterWithoutGradientIsNamedOnAllRanks) {
  OnRanks(2, [&](const World& world, int rank) {
    auto chain = std::make_shared<Chain>(3);
    if (rank == 1) chain->use = {0, 2};
    const auto model = Make(chain, world);
    ASSERT_NE(model, nullptr);
    ASSERT_TRUE(world.Step(1).ok());
    absl::Status status = Backward(LossOf(*model, Rows(world, 0, 2, 3)));
    if (rank == 0) {
      // It has asked before it could hear.
      ASSERT_TRUE(status.ok()) << status;
      status = model->parameters()[0].grad().Wait();
      EXPECT_EQ(ErrorOf(status).reason, Reason::kPeerRefused);
    } else {
      EXPECT_EQ(ErrorOf(status).reason, Reason::kWrongState);
    }
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("on rank 1 of the group the loss does not depend on link1.weight, "
                          "link1.bias; find_unused_parameters"));
    // The next step is as any other.
    chain->use = {0, 1, 2};
    model->ClearGrads();
    ASSERT_TRUE(world.Step(2).ok());
    ASSERT_TRUE(Backward(LossOf(*model, Rows(world, 0, 2, 3))).ok());
    EXPECT_TRUE(model->parameters()[0].grad().Wait().ok());
  });
}

// Of buffers too, which the ranks that were there have got of a broadcast that failed.
TEST_F(DistributedDataParallelTest, ATurnThatOneRankLeavesOutIsNoOtherTurns) {
  OnRanks(3, [&](const World& world, int rank) {
    auto counted = std::make_shared<Counted>();
    const auto model = Make(counted, world);
    ASSERT_NE(model, nullptr);
    for (int turn = 1; turn <= 5; ++turn) {
      const bool is_whole = turn != 3;
      ASSERT_TRUE(world.Step(turn).ok());
      if (!is_whole && rank == 1) continue;
      model->ClearGrads();
      absl::Status status = Backward(LossOf(*model, Rows(world, 3 * turn + rank, 1, 2)));
      if (!is_whole && rank == 2) continue;  // it has not heard yet
      if (status.ok()) status = model->parameters()[0].grad().Wait();
      EXPECT_EQ(status.ok(), is_whole) << "turn " << turn << ": " << status;
      // Those of rank 0, which was there at each turn.
      EXPECT_THAT(Values<int64_t>(counted->calls_()), ElementsAre(turn));
    }
  });
}

TEST_F(DistributedDataParallelTest, BuffersMayGetAnotherShape) {
  OnRanks(2, [&](const World& world, int rank) {
    auto counted = std::make_shared<Counted>();
    const auto model = Make(counted, world);
    ASSERT_NE(model, nullptr);
    counted->calls_.Set(FromHost<int64_t>(world, {7 + rank, 8}, {2}));
    ASSERT_TRUE((*model)(Rows(world, rank, 1, 2)).Wait().ok());
    EXPECT_THAT(Values<int64_t>(counted->calls_()), ElementsAre(8, 9));
  });
}

TEST_F(DistributedDataParallelTest, AMeanOfParametersThatFailsLeavesThemAsTheyWere) {
  OnRanks(2, [&](const World& world, int rank) {
    Chain chain(1);
    ASSERT_TRUE(chain.Init(world, 1 + static_cast<uint64_t>(rank), DType::kF64).ok());
    const std::vector<Doubles> before = ValuesOf(chain);
    ASSERT_TRUE(world.Step(1).ok());
    if (rank == 0) {
      EXPECT_FALSE(AverageParameters(chain, world).ok());
    }
    EXPECT_EQ(ValuesOf(chain), before);
    ASSERT_TRUE(world.Step(2).ok());
    const absl::Status status = AverageParameters(chain, world);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_NE(ValuesOf(chain), before);
  });
}

// Ranks whose calls are not in line with each other's, and no steps to be in line again at: every
// gradient of turn t is the mean of its ranks' own, t and 100 t, or an error.
class WithoutStepsTest : public DistributedDataParallelTest {
 protected:
  using Part = std::function<void(Ddp* model, const World& world, int rank)>;

  static Tensor In(const World& world, int turn) {
    return FromHost<double>(world, {turn * (world.rank() == 0 ? 1.0 : 100.0)}, {1});
  }
  // `turn`: of the gradients that are there.
  static void ExpectRightOrErrors(const Ddp& model, int turn) {
    for (size_t i = 0; i < 2; ++i) {
      const Tensor grad = model.parameters()[i].grad();
      if (!grad.defined()) continue;
      const auto values = grad.Read<double>();
      if (!values.ok()) continue;
      EXPECT_THAT(*values, ElementsAre(turn * 50.5 * (i == 0 ? 1 : 10)))
          << "turn " << turn << " parameter " << i;
    }
  }
  static absl::Status TakeTurn(Ddp* model, const World& world, int turn) {
    model->ClearGrads();
    const absl::Status status = Backward((*model)(In(world, turn)));
    ExpectRightOrErrors(*model, turn);
    return status;
  }

  // One part of the program, to whose end all ranks come before the next.
  void OnBoth(const Part& part) {
    ranks_.Run([&](const World& world, int rank) {
      Ddp* const model = models_[static_cast<size_t>(rank)].get();
      ASSERT_NE(model, nullptr);
      part(model, world, rank);
    });
  }
  void MakeBoth(const std::function<Options(int rank)>& options) {
    ranks_.Run([&](const World& world, int rank) {
      models_[static_cast<size_t>(rank)] =
          Make(modules_[static_cast<size_t>(rank)], world, options(rank));
    });
  }
  // `fail`: in the place of rank 1's second bucket, the first time.
  void MakeBothWithTwoBuckets(const std::function<absl::Status()>& fail) {
    MakeBoth([&](int rank) {
      Options options;
      options.bucket_bytes = options.first_bucket_bytes = 1;
      options.hook = [fail, rank, calls = 0](
                         const Tensors& gradients,
                         const Group& group) mutable -> absl::StatusOr<Tensors> {
        if (++calls == 2 && rank == 1) CHORUS_RETURN_IF_ERROR(fail());
        return AllReduceCoalesced(gradients, group, Reduction::kAvg);
      };
      return options;
    });
  }
  void TakeTurns(int first, int last) {
    OnBoth([&](Ddp* model, const World& world, int /*rank*/) {
      for (int turn = first; turn <= last; ++turn) {
        const absl::Status status = TakeTurn(model, world, turn);
        ASSERT_TRUE(status.ok()) << status;
        EXPECT_TRUE(model->parameters()[0].grad().Wait().ok());
      }
    });
  }
  // After a call that was refused on rank 1: all hear of it, until their next step.
  void ExpectOutOfLine(int first_turn) {
    OnBoth([&](Ddp* model, const World& world, int rank) {
      for (int turn = first_turn; turn < first_turn + 4; ++turn) {
        absl::Status status = TakeTurn(model, world, turn);
        if (status.ok()) status = model->parameters()[0].grad().Wait();
        EXPECT_FALSE(status.ok()) << "turn " << turn;
        if (rank == 1) {
          EXPECT_EQ(ErrorOf(status).reason, Reason::kOutOfLine) << status;
        }
      }
    });
    OnBoth([](Ddp*, const World& world, int) { ASSERT_TRUE(world.Step(1).ok()); });
    TakeTurns(first_turn + 4, first_turn + 4);
  }

  Ranks ranks_{2, &daemon_};
  std::vector<std::shared_ptr<Two>> modules_ = {std::make_shared<Two>(), std::make_shared<Two>()};
  std::vector<std::shared_ptr<Ddp>> models_ = std::vector<std::shared_ptr<Ddp>>(2);
};

TEST_F(WithoutStepsTest, ARankThatHasLeftAParameterOutMeetsNoOtherTurnOfOthers) {
  MakeBoth([](int) { return Options(); });
  TakeTurns(1, 2);
  modules_[1]->leaves_b_out = true;
  OnBoth([](Ddp* model, const World& world, int rank) {
    const absl::Status status = TakeTurn(model, world, 3);
    if (rank == 1) {
      EXPECT_EQ(ErrorOf(status).reason, Reason::kWrongState) << status;
    }
  });
  modules_[1]->leaves_b_out = false;
  ExpectOutOfLine(4);
}

TEST_F(WithoutStepsTest, ALossThatHasFailedMayHaveLedToBuckets) {
  MakeBoth([](int) { return Options(); });
  TakeTurns(1, 2);
  OnBoth([](Ddp* model, const World& world, int rank) {
    if (rank == 0) {
      TakeTurn(model, world, 3).IgnoreError();
    } else {
      EXPECT_FALSE(Backward((*model)(Reshape(In(world, 3), {2}))).ok());
    }
  });
  ExpectOutOfLine(4);
}

// While the rank has any module with buckets.
TEST_F(WithoutStepsTest, ALossThatHasFailedLedToNoBucketsOnceAllModulesAreGone) {
  std::vector<std::shared_ptr<Ddp>> models;  // of rank 1
  for (int i = 0; i < 2; ++i) {
    MakeBoth([](int) { return Options(); });
    models.push_back(std::move(models_[1]));
  }
  const World& world = ranks_.worlds[1];
  for (int step = 1; step <= 3; ++step) {
    ASSERT_TRUE(world.Step(step).ok());
    const Tensor x = In(world, 1);
    EXPECT_EQ(ErrorOf(Backward(MatMul(x, x))).reason, Reason::kBadType);
    const absl::Status status = AllReduce(x, world).status();
    if (step < 3) {
      EXPECT_EQ(ErrorOf(status).reason, Reason::kOutOfLine) << status;
      models.pop_back();
    } else {
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TEST_F(WithoutStepsTest, WhatWasRefusedBetweenTwoBucketsCannotBeAskedForAgain) {
  MakeBothWithTwoBuckets([] { return MakeError(Reason::kWrongState, "no second bucket"); });
  std::vector<Tensor> losses(2);
  const auto ask = [&losses](Ddp* model, int rank) {
    BackwardOptions retain;
    retain.retain_graph = true;
    model->ClearGrads();
    const absl::Status status = Backward(losses[static_cast<size_t>(rank)], retain);
    ExpectRightOrErrors(*model, 1);
    return status;
  };
  OnBoth([&](Ddp* model, const World& world, int rank) {
    losses[static_cast<size_t>(rank)] = (*model)(In(world, 1));
    absl::Status status = ask(model, rank);
    if (rank == 1) {
      EXPECT_THAT(std::string(status.message()), HasSubstr("no second bucket"));
    }
    for (int i = 0; i < 3; ++i) {
      status = ask(model, rank);
      if (rank == 1) {
        EXPECT_EQ(ErrorOf(status).reason, Reason::kTapeConsumed) << status;
      }
    }
  });
  ExpectOutOfLine(2);
  // Nor in another step, where others' calls would be met by what comes next here.
  OnBoth([&](Ddp* model, const World& world, int rank) {
    ASSERT_TRUE(world.Step(2).ok());
    absl::Status status = ask(model, rank);
    if (rank == 1) {
      EXPECT_EQ(ErrorOf(status).reason, Reason::kTapeConsumed) << status;
    }
    status = TakeTurn(model, world, 7);
    if (rank == 1) {
      EXPECT_EQ(ErrorOf(status).reason, Reason::kOutOfLine) << status;
    }
  });
}

// A program may catch what its hook throws, and leave the batch out.
TEST_F(WithoutStepsTest, AHookThatThrowsLeavesItsRankOutOfLine) {
  MakeBothWithTwoBuckets([]() -> absl::Status { throw std::runtime_error("thrown"); });
  OnBoth([](Ddp* model, const World& world, int rank) {
    if (rank == 1) {
      EXPECT_THROW(TakeTurn(model, world, 1).IgnoreError(), std::runtime_error);
    } else {
      TakeTurn(model, world, 1).IgnoreError();
    }
  });
  ExpectOutOfLine(2);
}

// What was recorded and refused while the rank was out of line is not asked for in a later step:
// others would take it for that step's.
TEST_F(WithoutStepsTest, WhatWasRefusedOutOfLineCannotBeAskedForInTheNextStep) {
  MakeBoth([](int) { return Options(); });
  TakeTurns(1, 2);
  modules_[1]->leaves_b_out = true;
  Tensor late;
  OnBoth([&](Ddp* model, const World& world, int rank) {
    TakeTurn(model, world, 3).IgnoreError();
    if (rank == 0) return;
    modules_[1]->leaves_b_out = false;
    late = (*model)(In(world, 4));
    EXPECT_EQ(ErrorOf(Backward(late)).reason, Reason::kOutOfLine);
  });
  OnBoth([&](Ddp* model, const World& world, int rank) {
    ASSERT_TRUE(world.Step(1).ok());
    if (rank == 1) {
      model->ClearGrads();
      EXPECT_EQ(ErrorOf(Backward(late)).reason, Reason::kTapeConsumed);
    }
    // Right, or an error.
    TakeTurn(model, world, 5).IgnoreError();
  });
}

TEST_F(WithoutStepsTest, WhatIsUsedUpOnOneRankHasLedToBucketsToo) {
  MakeBoth([](int) { return Options(); });
  OnBoth([](Ddp* model, const World& world, int rank) {
    const Tensor loss = (*model)(In(world, 1));
    BackwardOptions retain;
    retain.retain_graph = rank == 0;
    ASSERT_TRUE(Backward(loss, retain).ok());
    ExpectRightOrErrors(*model, 1);
    model->ClearGrads();
    const absl::Status again = Backward(loss);
    if (rank == 1) {
      EXPECT_THAT(std::string(again.message()), HasSubstr("was taken before"));
    }
    ExpectRightOrErrors(*model, 1);
  });
  ExpectOutOfLine(2);
}

TEST_F(WithoutStepsTest, UnderNoSyncARefusedBackwardIsTheRanksOwn) {
  MakeBoth([](int) { return Options(); });
  OnBoth([](Ddp* model, const World& world, int rank) {
    const Ddp::NoSync no_sync(model);
    const Tensor loss = (*model)(In(world, 1));
    ASSERT_TRUE(Backward(loss).ok());
    if (rank == 1) {
      EXPECT_FALSE(Backward(loss).ok());
    }
    model->ClearGrads();
  });
  TakeTurns(2, 4);
}

// Of the mean over ranks of x w + c w * w, the loss of a call and what goes past it.
TEST_F(WithoutStepsTest, WhatReadsAParameterBesideTheCallGoesIntoTheMean) {
  for (const bool before : {false, true}) {
    MakeBoth([](int) {
      Options options;
      options.find_unused_parameters = true;  // a gradient may depend on one alone
      return options;
    });
    OnBoth([&](Ddp* model, const World& world, int rank) {
      const Tensor a = model->parameters()[0]();
      const Tensor penalty = before ? a * a : Tensor();
      const Tensor y = (*model)(In(world, 1));
      const double weight = rank == 0 ? 1 : 3;
      const Tensor loss = y + (before ? penalty : a * a) * weight;
      // A parameter may be a root, too.
      BackwardOptions options;
      options.create_graph = true;
      const auto grads = Grad({loss, model->parameters()[1]()},
                              {model->parameters()[0](), model->parameters()[1]()}, options);
      ASSERT_TRUE(grads.ok()) << grads.status();
      EXPECT_THAT(Values<double>((*grads)[0]), ElementsAre(50.5 + 4));
      EXPECT_THAT(Values<double>((*grads)[1]), ElementsAre(505 + 1));
      BackwardOptions retain;
      retain.retain_graph = true;
      ASSERT_TRUE(Backward(loss, retain).ok());
      EXPECT_THAT(Values<double>(a.grad()), ElementsAre(50.5 + 4));
      // The mean's own gradient is 2 c, and its mean 4.
      const auto second = Grad({(*grads)[0]}, {a});
      ASSERT_TRUE(second.ok()) << second.status();
      EXPECT_THAT(Values<double>((*second)[0]), ElementsAre(4));
    });
  }
}

// What stands in the trainer's own memory is copied where an op keeps it for its gradient, and may
// not be what the module has read.
TEST_F(DistributedDataParallelTest, AMappedParameterWhoseBytesWereKeptPastTheCallIsRefused) {
  OnRanks(1, [&](const World& world, int /*rank*/) {
    const auto model = Make(std::make_shared<Two>(), world);
    ASSERT_NE(model, nullptr);
    absl::StatusOr<MappedTensor<double>> mapped = Map<double>(world, {1});
    ASSERT_TRUE(mapped.ok()) << mapped.status();
    mapped->data()[0] = 3;
    model->parameters()[0].Set(mapped->tensor());
    const Tensor a = model->parameters()[0]();
    const Tensor x = FromHost<double>(world, {2}, {1});
    // Nothing of `a` is kept for the gradient of a sum.
    ASSERT_TRUE(Backward((*model)(x) + (a + a)).ok());
    EXPECT_THAT(Values<double>(a.grad()), ElementsAre(2 + 2));
    const absl::Status status = Backward((*model)(x) + a * a);
    EXPECT_EQ(ErrorOf(status).reason, Reason::kWrongState) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("reads a parameter, in the trainer's own memory, past the module that "
                          "shares it"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("backward: mul at "));
    EXPECT_THAT(Values<double>(a.grad()), ElementsAre(4));
  });
}

// A bucket's mean is asked for before the first reader of any of its parameters is differentiated;
// what has made the others must stand before that reader, too.
TEST_F(DistributedDataParallelTest, AParameterIsReadPastTheCallWhenAllOfItsBucketAreMade) {
  for (const bool too_early : {false, true}) {
    OnRanks(1, [&](const World& world, int /*rank*/) {
      const auto model = Make(std::make_shared<Two>(), world);
      ASSERT_NE(model, nullptr);
      ASSERT_EQ(model->buckets().size(), 1u);
      const Tensor w = FromHost<double>(world, {5}, {1}).RequireGrad();
      const Tensor a = w * 2.0;
      Tensor penalty = a * a;
      const Tensor b = w * 3.0;
      if (!too_early) penalty = a * a;
      const StateScope scope(*model, {a, b});
      const absl::Status status = Backward((*model)(FromHost<double>(world, {7}, {1})) + penalty);
      if (too_early) {
        EXPECT_EQ(ErrorOf(status).reason, Reason::kWrongState) << status;
        EXPECT_THAT(std::string(status.message()),
                    HasSubstr("a parameter is read past DistributedDataParallel at "));
        EXPECT_THAT(std::string(status.message()), HasSubstr(" has made another one"));
        EXPECT_FALSE(w.grad().defined());
        return;
      }
      ASSERT_TRUE(status.ok()) << status;
      // 7 a + 70 b + a a.
      EXPECT_THAT(Values<double>(w.grad()), ElementsAre(2 * 7 + 3 * 70 + 8 * 5));
    });
  }
}

TEST_F(DistributedDataParallelTest, UnusedParametersCountWithZerosOrKeepWhatTheyHave) {
  std::vector<std::vector<Doubles>> grads(2);
  std::vector<std::vector<Doubles>> local(2);
  OnRanks(2, [&](const World& world, int rank) {
    Options options;
    options.find_unused_parameters = true;
    options.bucket_bytes = 1;
    options.first_bucket_bytes = 1;
    auto chain = std::make_shared<Chain>(4);
    const auto model = Make(chain, world, options);
    ASSERT_NE(model, nullptr);
    ASSERT_TRUE(Backward(LossOf(*model, Rows(world, 0, 1, 3))).ok());
    const Doubles kept = Values<double>(model->parameters()[6].grad());
    for (int i = 0; i < 6; ++i) model->parameters()[static_cast<size_t>(i)]().ClearGrad();
    // 0 and 2; 0 and 1: nobody has 3.
    chain->use = rank == 0 ? std::vector<int>{0, 2} : std::vector<int>{0, 1};
    ASSERT_TRUE(Backward(LossOf(*model, Rows(world, rank * 2, 2, 3))).ok());
    grads[static_cast<size_t>(rank)] = GradsOf(*model);
    EXPECT_EQ(grads[static_cast<size_t>(rank)][6], kept);
    model->ClearGrads();
    ASSERT_TRUE(Backward(LossOf(*chain, Rows(world, rank * 2, 2, 3))).ok());
    local[static_cast<size_t>(rank)] = GradsOf(*model);
    EXPECT_THAT(local[static_cast<size_t>(rank)][6], IsEmpty());
    model->ClearGrads();
    ASSERT_TRUE(Backward(LossOf(*model, Rows(world, rank * 2, 2, 3))).ok());
    EXPECT_FALSE(model->parameters()[6].grad().defined());
    // A loss that nothing of the model comes into asks nobody.
    chain->use = {};
    const Tensor x = Rows(world, 0, 1, 3).RequireGrad();
    ASSERT_TRUE(Backward(LossOf(*model, x)).ok());
    EXPECT_TRUE(x.grad().defined());
  });
  EXPECT_EQ(grads[0], grads[1]);
  for (size_t i = 0; i < 6; ++i) {
    for (size_t e = 0; e < grads[0][i].size(); ++e) {
      double sum = 0;
      for (const auto& of_rank : local) sum += of_rank[i].empty() ? 0 : of_rank[i][e];
      EXPECT_NEAR(grads[0][i][e], sum / 2, 1e-12) << i << " " << e;
    }
  }
}

TEST_F(DistributedDataParallelTest, AStaticGraphIsAskedForOnceAndHeldTo) {
  OnRanks(2, [&](const World& world, int rank) {
    Options options;
    options.static_graph = true;
    auto chain = std::make_shared<Chain>(3);
    chain->use = rank == 0 ? std::vector<int>{0, 1} : std::vector<int>{0};
    const auto model = Make(chain, world, options);
    ASSERT_NE(model, nullptr);
    std::vector<Doubles> first;
    for (int i = 0; i < 3; ++i) {
      model->ClearGrads();
      ASSERT_TRUE(world.Step(i + 1).ok());
      ASSERT_TRUE(Backward(LossOf(*model, Rows(world, 0, 2, 3))).ok());
      if (i == 0) first = GradsOf(*model);
      EXPECT_EQ(GradsOf(*model), first);
      EXPECT_FALSE(model->parameters()[4].grad().defined());
      EXPECT_TRUE(model->parameters()[2].grad().defined());
    }
    ASSERT_TRUE(world.Step(4).ok());
    if (rank == 0) chain->use = {0, 2};
    absl::Status status = Backward(LossOf(*model, Rows(world, 0, 2, 3)));
    if (rank == 1 && status.ok()) status = model->parameters()[0].grad().Wait();
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("on rank 0 of the group the loss depends on link1.weight, link1.bias, "
                          "link2.weight, link2.bias at one step and not at another"));
  });
}

// Each mean leaves a gradient on the rank that does not use the parameter.
TEST_F(DistributedDataParallelTest, UnderNoSyncAStaticGraphIsWhatLossesDependOn) {
  std::vector<std::vector<Doubles>> grads(2);
  std::vector<std::vector<Doubles>> own(2);
  OnRanks(2, [&](const World& world, int rank) {
    const size_t r = static_cast<size_t>(rank);
    Options options;
    options.static_graph = true;
    auto chain = std::make_shared<Chain>(3);
    chain->use = rank == 0 ? std::vector<int>{0} : std::vector<int>{0, 1};
    const auto model = Make(chain, world, options);
    ASSERT_NE(model, nullptr);
    const auto alone = chain->Clone(world);
    ASSERT_TRUE(alone.ok()) << alone.status();
    const auto backward = [&](int i) {
      const Tensor x = Rows(world, 4 * i + 2 * rank, 2, 3);
      ASSERT_TRUE(Backward(LossOf(**alone, x)).ok());
      const absl::Status status = Backward(LossOf(*model, x));
      ASSERT_TRUE(status.ok()) << status;
    };
    for (int i = 0; i < 3; ++i) {
      ASSERT_TRUE(world.Step(i + 1).ok());
      {
        const Ddp::NoSync no_sync(model.get());
        backward(2 * i);
      }
      backward(2 * i + 1);
    }
    grads[r] = GradsOf(*model);
    own[r] = GradsOf(**alone);

    // A loss under NoSync is held to it like any other.
    ASSERT_TRUE(world.Step(4).ok());
    if (rank == 0) {
      const Ddp::NoSync no_sync(model.get());
      chain->use = {0, 2};
      ASSERT_TRUE(Backward(LossOf(*model, Rows(world, 0, 2, 3))).ok());
      chain->use = {0};
    }
    absl::Status status = Backward(LossOf(*model, Rows(world, 0, 2, 3)));
    if (rank == 1 && status.ok()) status = model->parameters()[0].grad().Wait();
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("on rank 0 of the group the loss depends on link2.weight, link2.bias at "
                          "one step and not at another"));
  });
  std::vector<Doubles> wanted;
  for (size_t p = 0; p < own[1].size(); ++p) {
    wanted.push_back(own[1][p]);
    for (size_t e = 0; e < wanted[p].size(); ++e) {
      wanted[p][e] = (wanted[p][e] + (own[0][p].empty() ? 0 : own[0][p][e])) / 2;
    }
  }
  EXPECT_EQ(grads[0], grads[1]);
  ExpectNear(grads[0], wanted);
}

TEST_F(DistributedDataParallelTest, HooksTakeTheMeansPlace) {
  std::vector<std::vector<Doubles>> means(2);
  std::vector<std::vector<Doubles>> local(2);
  std::vector<std::vector<Doubles>> apart(2);
  std::vector<std::vector<Doubles>> together(2);
  OnRanks(2, [&](const World& world, int rank) {
    const size_t r = static_cast<size_t>(rank);
    const Tensor x = Rows(world, rank, 1, 3);
    auto chain = std::make_shared<Chain>(1);
    Options options;
    const auto with = [&](GradientHook hook) {
      options.hook = std::move(hook);
      auto model = Make(chain, world, options);
      chain->ClearGrads();
      return model;
    };
    auto model = with(nullptr);
    ASSERT_TRUE(Backward(LossOf(*model, x)).ok());
    means[r] = GradsOf(*model);
    model = with(MeanInBf16());
    ASSERT_TRUE(Backward(LossOf(*model, x)).ok());
    const std::vector<Doubles> in_bf16 = GradsOf(*model);
    EXPECT_NE(in_bf16, means[r]);
    for (size_t i = 0; i < in_bf16.size(); ++i) {
      for (size_t e = 0; e < in_bf16[i].size(); ++e) {
        EXPECT_NEAR(in_bf16[i][e], means[r][i][e], 0.02 * std::abs(means[r][i][e]) + 0.01);
      }
    }
    // Each by its own, until they meet.
    model = with(KeepLocal());
    Sgd sgd(model->parameters(), {});
    ASSERT_TRUE(Backward(LossOf(*model, x)).ok());
    local[r] = GradsOf(*model);
    ASSERT_TRUE(sgd.Step().ok());
    apart[r] = ValuesOf(*model);
    ASSERT_TRUE(AverageParameters(*model, world).ok());
    together[r] = ValuesOf(*model);
    EXPECT_TRUE(model->parameters()[0].requires_grad());

    ASSERT_TRUE(world.Step(1).ok());
    model = with([](const Tensors& gradients, const Group&) {
      return absl::StatusOr<Tensors>(Tensors(gradients.begin() + 1, gradients.end()));
    });
    EXPECT_THAT(std::string(Backward(LossOf(*model, x)).message()),
                HasSubstr("expected 2 gradients of the hook, got 1"));
    // It has called less than others may have.
    ASSERT_TRUE(world.Step(2).ok());
    model = with([](const Tensors& gradients, const Group&) {
      return absl::StatusOr<Tensors>(Tensors(gradients.size(), gradients[0]));
    });
    EXPECT_THAT(std::string(Backward(LossOf(*model, x)).message()),
                HasSubstr("DistributedDataParallel: expected f64[3,3] on device 0 for gradient 1, "
                          "got f64[3] on device 0"));
  });
  EXPECT_EQ(means[0], means[1]);
  EXPECT_NE(local[0], local[1]);
  for (size_t i = 0; i < 2; ++i) {
    for (size_t e = 0; e < means[0][i].size(); ++e) {
      EXPECT_NEAR(means[0][i][e], (local[0][i][e] + local[1][i][e]) / 2, 1e-12);
      EXPECT_EQ(together[0][i][e], (apart[0][i][e] + apart[1][i][e]) / 2);
    }
  }
  EXPECT_EQ(together[0], together[1]);
}

// The penalty is of the mean of the gradients: not what the ranks' own penalties add up to.
TEST_F(DistributedDataParallelTest, GradientsOfGradientsAreThoseOfOneRankWithAllRows) {
  const auto penalty = [](Module& model, const Tensor& x) -> absl::StatusOr<Tensor> {
    Tensors parameters;
    for (const Variable& parameter : model.parameters()) parameters.push_back(parameter());
    BackwardOptions create;
    create.create_graph = true;
    const Tensor loss = LossOf(model, x);
    CHORUS_ASSIGN_OR_RETURN(const Tensors gradients, Grad({loss}, parameters, create));
    Tensor total = loss;
    for (const Tensor& gradient : gradients) total = total + Sum(gradient * gradient);
    return total;
  };
  for (const int64_t bytes : {int64_t{1}, int64_t{1} << 20}) {
    std::vector<Doubles> wanted;
    {
      const Session session = daemon_.Open();
      Chain model(2);
      ASSERT_TRUE(model.Init(session, 1, DType::kF64).ok());
      const auto total = penalty(model, Rows(session, 0, 6, 3));
      ASSERT_TRUE(total.ok()) << total.status();
      ASSERT_TRUE(Backward(*total).ok());
      wanted = GradsOf(model);
    }
    std::vector<std::vector<Doubles>> grads(3);
    OnRanks(3, [&](const World& world, int rank) {
      Options options;
      options.bucket_bytes = bytes;
      options.first_bucket_bytes = bytes;
      const auto model = Make(std::make_shared<Chain>(2), world, options);
      ASSERT_NE(model, nullptr);
      const auto total = penalty(*model, Rows(world, 2 * rank, 2, 3));
      ASSERT_TRUE(total.ok()) << total.status();
      const absl::Status backward = Backward(*total);
      ASSERT_TRUE(backward.ok()) << backward;
      grads[static_cast<size_t>(rank)] = GradsOf(*model);
    });
    for (const auto& of_rank : grads) EXPECT_EQ(of_rank, grads[0]);
    ExpectNear(grads[0], wanted, 1e-11);
  }
}

// A caller that wants one parameter's gradient differentiated takes part for all that were asked
// for.
TEST_F(DistributedDataParallelTest, RanksMayDifferentiateTheGradientsOfDifferentParameters) {
  std::vector<Doubles> wanted;
  const auto penalty = [](Module& model, const Tensor& x,
                          const std::vector<size_t>& of) -> absl::StatusOr<Tensor> {
    Tensors parameters;
    for (const Variable& parameter : model.parameters()) parameters.push_back(parameter());
    BackwardOptions create;
    create.create_graph = true;
    CHORUS_ASSIGN_OR_RETURN(const Tensors gradients, Grad({LossOf(model, x)}, parameters, create));
    Tensor total = Sum(gradients[of[0]] * gradients[of[0]]);
    for (size_t i = 1; i < of.size(); ++i) total = total + Sum(gradients[of[i]] * gradients[of[i]]);
    return total;
  };
  {
    const Session session = daemon_.Open();
    Chain model(3);
    ASSERT_TRUE(model.Init(session, 1, DType::kF64).ok());
    const auto total = penalty(model, Rows(session, 0, 4, 3), {0, 5});
    ASSERT_TRUE(total.ok()) << total.status();
    ASSERT_TRUE(Backward(*total * 0.5).ok());  // the mean of the ranks' two
    wanted = GradsOf(model);
  }
  std::vector<std::vector<Doubles>> grads(2);
  OnRanks(2, [&](const World& world, int rank) {
    Options options;
    options.find_unused_parameters = true;
    options.bucket_bytes = 1;
    options.first_bucket_bytes = 1;
    const auto model = Make(std::make_shared<Chain>(3), world, options);
    ASSERT_NE(model, nullptr);
    const auto total =
        penalty(*model, Rows(world, 2 * rank, 2, 3), {rank == 0 ? size_t{0} : size_t{5}});
    ASSERT_TRUE(total.ok()) << total.status();
    const absl::Status backward = Backward(*total);
    ASSERT_TRUE(backward.ok()) << backward;
    grads[static_cast<size_t>(rank)] = GradsOf(*model);
  });
  EXPECT_EQ(grads[0], grads[1]);
  ExpectNear(grads[0], wanted, 1e-11);
}

// A gradient that is constant here stands for the gates too: another rank's loss may lead to them.
TEST_F(DistributedDataParallelTest, WhoDifferentiatesConstantGradientsTakesPartInAllGates) {
  std::vector<std::vector<Doubles>> grads(2);
  OnRanks(2, [&](const World& world, int rank) {
    Options options;
    options.find_unused_parameters = true;
    const auto model = Make(std::make_shared<Linear>(3, 2), world, options);
    ASSERT_NE(model, nullptr);
    const Tensor loss = Sum((*model)(Rows(world, rank, 1, 3)));
    BackwardOptions create;
    create.create_graph = true;
    const auto gradients = Grad({loss}, {model->parameters()[0]()}, create);
    ASSERT_TRUE(gradients.ok()) << gradients.status();
    const Tensor penalty = Sum((*gradients)[0] * (*gradients)[0]);
    const absl::Status backward = Backward(rank == 0 ? penalty + loss : penalty);
    ASSERT_TRUE(backward.ok()) << backward;
    grads[static_cast<size_t>(rank)] = GradsOf(*model);
  });
  // Half of the first rank's row for each output; the penalty depends on no parameter.
  Doubles wanted;
  const Doubles row = Numbers(3, 3);
  for (int o = 0; o < 2; ++o) {
    for (const double x : row) wanted.push_back(x / 2);
  }
  for (const auto& of_rank : grads) {
    EXPECT_EQ(of_rank[0], wanted);
    EXPECT_THAT(of_rank[1], Each(0.5));
  }
}

// One number, times what goes in; and the sum of that over ranks.
class Shares : public Module {
 public:
  explicit Shares(const Group& ranks) : Module("Shares"), ranks_(ranks) {
    w_ = AddParameter("w", {1}, init::Ones());
  }
  Tensor Forward(const Tensor& x) override {
    const Tensor y = x * w_();
    shared = AllReduce(y, ranks_);
    return y;
  }
  Tensor shared;

 private:
  const Group ranks_;
  Variable w_;
};

// A rank that gives up its part of a collective in the module gives up a part of everybody's mean.
TEST_F(DistributedDataParallelTest, APartThatIsGivenUpIsMissedByWhoseGradientGoesIntoTheMean) {
  for (const bool gives_up : {false, true}) {
    SCOPED_TRACE(gives_up);
    OnRanks(2, [&](const World& world, int rank) {
      const auto shares = std::make_shared<Shares>(world);
      const auto model = Make(shares, world);
      ASSERT_NE(model, nullptr);
      const Tensor y = (*model)(FromHost<double>(world, {1.0 + rank}, {1}));
      Tensors roots = {Sum(rank == 0 ? shares->shared : y)};
      BackwardOptions options;
      options.seeds = {Tensor()};
      if (rank == 1 && !gives_up) {
        roots.push_back(shares->shared);
        options.seeds.push_back(Zeros(world, DType::kF64, {1}));
      }
      if (rank == 1) shares->shared = Tensor();
      const absl::Status status = Backward(roots, options);
      if (!gives_up) {
        ASSERT_TRUE(status.ok()) << status;
        // 3 w on the one, 2 w on the other.
        EXPECT_THAT(GradsOf(*model)[0], ElementsAre(2.5));
        return;
      }
      const absl::Status told = status.ok() ? model->parameters()[0].grad().Wait() : status;
      EXPECT_FALSE(told.ok());
      if (rank == 1) return;
      EXPECT_EQ(ErrorOf(told).reason, Reason::kGradientLost) << told;
      EXPECT_THAT(std::string(told.message()), HasSubstr("rank 1"));
    });
  }
}

TEST_F(DistributedDataParallelTest, ARankThatHasNotRecordedItsGradientsIsNamedToThoseThatHave) {
  OnRanks(2, [&](const World& world, int rank) {
    const auto model = Make(std::make_shared<Chain>(2), world);
    ASSERT_NE(model, nullptr);
    Tensors parameters;
    for (const Variable& parameter : model->parameters()) parameters.push_back(parameter());
    BackwardOptions options;
    options.create_graph = rank == 0;
    const auto gradients = Grad({LossOf(*model, Rows(world, rank, 1, 3))}, parameters, options);
    ASSERT_TRUE(gradients.ok()) << gradients.status();
    ASSERT_TRUE((*gradients)[0].Wait().ok());
    if (rank == 1) return;
    const auto second = Grad({Sum((*gradients)[0] * (*gradients)[0])}, {parameters[0]});
    const absl::Status status = second.ok() ? (*second)[0].Wait() : second.status();
    EXPECT_EQ(ErrorOf(status).reason, Reason::kGradientLost) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
  });
}

// The same of a hook whose function was called outside of any gradient before: there what comes of
// its collective leads nowhere.
TEST_F(DistributedDataParallelTest, AFunctionThatAHookCallsIsNotTheOneOfCallsOutside) {
  OnRanks(2, [&](const World& world, int rank) {
    const Compiled mean = Compile(
        [&world](const Tensors& in) { return Tensors{AllReduce(in[0], world, Reduction::kAvg)}; });
    const auto take_mean = [&](const Tensor& x) -> absl::StatusOr<Tensor> {
      if (rank == 0) return AllReduce(x, world, Reduction::kAvg);
      CHORUS_ASSIGN_OR_RETURN(const Tensors out, mean.Run({x}));
      return out[0];
    };
    Options options;
    options.hook = [&](const Tensors& gradients, const Group&) -> absl::StatusOr<Tensors> {
      Tensors means;
      for (const Tensor& gradient : gradients) {
        CHORUS_ASSIGN_OR_RETURN(const Tensor of_one, take_mean(gradient));
        means.push_back(of_one);
      }
      return means;
    };
    const auto model = Make(std::make_shared<Two>(), world, options);
    ASSERT_NE(model, nullptr);
    const Tensor x = FromHost<double>(world, {1.0 + rank}, {1});
    {
      const NoGrad no_grad;
      const auto outside = take_mean(x);
      ASSERT_TRUE(outside.ok()) << outside.status();
      EXPECT_THAT(Values<double>(*outside), ElementsAre(1.5));
    }
    EXPECT_EQ(mean.traces(), rank);
    const Tensor a = model->parameters()[0]();
    BackwardOptions create;
    create.create_graph = rank == 0;
    const Tensor y = (*model)(x);
    const auto gradients = Grad({y * y}, {a}, create);
    ASSERT_TRUE(gradients.ok()) << gradients.status();
    // Half of 2 * 11 x x of each rank.
    EXPECT_THAT(Values<double>((*gradients)[0]), ElementsAre(11 * (1 + 4)));
    EXPECT_EQ(mean.traces(), 2 * rank);
    if (rank == 1) return;
    const auto second = Grad({(*gradients)[0]}, {a});
    const absl::Status status = second.ok() ? (*second)[0].Wait() : second.status();
    EXPECT_EQ(ErrorOf(status).reason, Reason::kGradientLost) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
  });
}

TEST_F(DistributedDataParallelTest, ABucketIsAskedForWhileOthersAreStillToBeComputed) {
  OnRanks(2, [&](const World& world, int /*rank*/) {
    std::vector<uint64_t> recorded;
    Options options;
    options.bucket_bytes = 96;
    options.first_bucket_bytes = 96;
    options.hook = [&recorded](const Tensors& gradients, const Group& /*group*/) {
      recorded.push_back(internal::NextOrder());
      return absl::StatusOr<Tensors>(gradients);
    };
    const auto model = Make(std::make_shared<Chain>(4), world, options);
    ASSERT_NE(model, nullptr);
    BackwardOptions create;  // so that what is computed is recorded, and counted
    create.create_graph = true;
    ASSERT_TRUE(Backward(LossOf(*model, Rows(world, 0, 1, 3)), create).ok());
    ASSERT_EQ(recorded.size(), 4u);
    // Two products and what Tanh makes of them, at the least.
    for (size_t b = 1; b < recorded.size(); ++b) EXPECT_GE(recorded[b], recorded[b - 1] + 3);
    // They and their parameters keep each other.
    for (const Variable& parameter : model->parameters()) parameter().ClearGrad();
  });
}

// Collectives of the module beside those of its gradients.
TEST_F(DistributedDataParallelTest, WithABatchOfAllRanksItIsOneRankWithAllRows) {
  const auto make = [] {
    return std::make_shared<Sequential>(
        Modules{nn::Make<Linear>(3, 4), nn::Make<BatchNorm>(4), nn::Make<Linear>(4, 2)});
  };
  const auto keep = [](const Module& module) {
    std::vector<Doubles> values = ValuesOf(module);
    for (const Variable& buffer : module.buffers()) {
      if (buffer().dtype() == DType::kF64) values.push_back(Values<double>(buffer()));
    }
    return values;
  };
  std::vector<Doubles> wanted;
  {
    const Session session = daemon_.Open();
    const auto model = make();
    ASSERT_TRUE(model->Init(session, 1, DType::kF64).ok());
    Sgd sgd(model->parameters(), {});
    for (int i = 0; i < 3; ++i) {
      ASSERT_TRUE(Backward(LossOf(*model, Rows(session, 6 * i, 6, 3))).ok());
      ASSERT_TRUE(sgd.Step().ok());
    }
    wanted = keep(*model);
  }
  for (const int64_t bytes : {int64_t{1}, int64_t{1} << 20}) {
    OnRanks(3, [&](const World& world, int rank) {
      Options options;
      options.bucket_bytes = bytes;
      const auto module = make();
      ShareBatches(module.get(), world);
      const auto model = Make(module, world, options);
      ASSERT_NE(model, nullptr);
      Sgd sgd(model->parameters(), {});
      for (int i = 0; i < 3; ++i) {
        ASSERT_TRUE(Backward(LossOf(*model, Rows(world, 6 * i + 2 * rank, 2, 3))).ok());
        ASSERT_TRUE(sgd.Step().ok());
      }
      ExpectNear(keep(*module), wanted, 1e-10);
    });
  }
}

TEST_F(DistributedDataParallelTest, InACompiledStepItIsThePartOfTheGraphThatTakesTheMean) {
  std::vector<std::vector<Doubles>> values(2);
  OnRanks(2, [&](const World& world, int rank) {
    const auto compiled = Make(std::make_shared<Chain>(2), world);
    const auto eager = Make(std::make_shared<Chain>(2), world);
    ASSERT_NE(eager, nullptr);
    Adam::Options rate;
    rate.learning_rate = 0.01;
    Adam compiled_adam(compiled->parameters(), rate);
    Adam eager_adam(eager->parameters(), rate);
    TrainStep step(compiled.get(), &compiled_adam,
                   [&](const Tensors& in) { return LossOf(*compiled, in[0]); });
    for (int i = 0; i < 3; ++i) {
      const Tensor x = Rows(world, 4 * i + 2 * rank, 2, 3);
      ASSERT_TRUE(world.Step(2 * i + 1).ok());
      const auto loss = step({x});
      ASSERT_TRUE(loss.ok()) << loss.status();
      ASSERT_TRUE(world.Step(2 * i + 2).ok());
      ASSERT_TRUE(Backward(LossOf(*eager, x)).ok());
      ASSERT_TRUE(eager_adam.Step().ok());
      ExpectNear(ValuesOf(*compiled), ValuesOf(*eager));
    }
    EXPECT_EQ(step.traces(), 1);
    values[static_cast<size_t>(rank)] = ValuesOf(*compiled);
  });
  EXPECT_EQ(values[0], values[1]);
}

// As eagerly, where the others' gradients are there and nobody takes them.
TEST_F(DistributedDataParallelTest, ACompiledStepMayTrainSomeOfTheParametersAlone) {
  Options options;
  options.first_bucket_bytes = 1;  // one of a parameter that is not trained
  OnRanks(2, [&](const World& world, int rank) {
    std::vector<std::vector<Doubles>> values;
    for (const bool compiled : {false, true}) {
      SCOPED_TRACE(compiled ? "compiled" : "eager");
      const auto model = Make(std::make_shared<Chain>(3), world, options);
      ASSERT_NE(model, nullptr);
      const std::vector<Variable> all = model->parameters();
      Sgd sgd({all[2], all[3]}, {});
      const Tensor x = Rows(world, 2 * rank, 2, 3);
      if (compiled) {
        TrainStep step(model.get(), &sgd,
                       [&model](const Tensors& in) { return LossOf(*model, in[0]); });
        const auto loss = step({x});
        ASSERT_TRUE(loss.ok()) << loss.status();
      } else {
        ASSERT_TRUE(Backward(LossOf(*model, x)).ok());
        ASSERT_TRUE(sgd.Step().ok());
      }
      values.push_back(ValuesOf(*model));
    }
    ExpectNear(values[1], values[0]);
  });
}

TEST_F(DistributedDataParallelTest, RanksWhoseCompiledStepsTrainOtherParametersAreToldSo) {
  for (const int64_t bytes : {int64_t{1}, int64_t{1} << 20}) {
    SCOPED_TRACE(bytes);
    Options options;
    options.bucket_bytes = options.first_bucket_bytes = bytes;
    OnRanks(2, [&](const World& world, int rank) {
      const auto model = Make(std::make_shared<Chain>(2), world, options);
      ASSERT_NE(model, nullptr);
      const std::vector<Variable> all = model->parameters();
      Sgd sgd(
          rank == 0 ? std::vector<Variable>{all[0], all[1]} : std::vector<Variable>{all[2], all[3]},
          {});
      TrainStep step(model.get(), &sgd,
                     [&model](const Tensors& in) { return LossOf(*model, in[0]); });
      const auto loss = step({Rows(world, 2 * rank, 2, 3)});
      const absl::Status status = loss.ok() ? loss->Wait() : loss.status();
      EXPECT_EQ(ErrorOf(status).reason, Reason::kMismatch) << status;
    });
  }
}

// Its graph would take no mean at later calls either.
TEST_F(DistributedDataParallelTest, NoSyncIsNoPartOfACompiledStep) {
  OnRanks(2, [](const World& world, int rank) {
    const auto model = Make(std::make_shared<Chain>(2), world);
    ASSERT_NE(model, nullptr);
    Sgd sgd(model->parameters(), {});
    TrainStep step(model.get(), &sgd, [&](const Tensors& in) { return LossOf(*model, in[0]); });
    const Tensor x = Rows(world, 2 * rank, 2, 3);
    ASSERT_TRUE(world.Step(1).ok());
    {
      const Ddp::NoSync no_sync(model.get());
      EXPECT_THAT(std::string(step({x}).status().message()),
                  HasSubstr("NoSync is no part of a compiled function"));
    }
    ASSERT_TRUE(world.Step(2).ok());
    const std::vector<Doubles> before = ValuesOf(*model);
    const auto loss = step({x});
    ASSERT_TRUE(loss.ok()) << loss.status();
    // All have gone the same way.
    for (const Variable& parameter : model->parameters()) {
      const NoGrad no_grad;
      EXPECT_EQ(Values<double>(AllReduce(parameter(), world, Reduction::kAvg)),
                Values<double>(parameter()));
    }
    EXPECT_NE(ValuesOf(*model), before);
  });
}

TEST_F(DistributedDataParallelTest, ItStandsForItsModuleWhereNothingIsTrained) {
  OnRanks(2, [&](const World& world, int rank) {
    auto chain = std::make_shared<Chain>(1);
    const auto model = Make(chain, world);
    ASSERT_NE(model, nullptr);
    const Tensor x = Rows(world, 0, 2, 3);
    if (rank == 0) {
      // The other one does not call at all.
      const NoGrad no_grad;
      EXPECT_EQ(Values<double>((*model)(x)), Values<double>((*chain)(x)));
    }
    chain->RequireGrad(false);
    const auto frozen = Ddp::Create(chain, world);
    ASSERT_TRUE(frozen.ok()) << frozen.status();
    if (rank == 1) {
      EXPECT_EQ(Values<double>((**frozen)(x)), Values<double>((*chain)(x)));
    }
    EXPECT_THAT((*frozen)->buckets(), IsEmpty());
    // What is thawed later would go by itself.
    chain->parameters()[1].RequireGrad(true);
    chain->parameters()[0].RequireGrad(true);
    (*model)(x);
    auto mixed = std::make_shared<Chain>(2);
    ASSERT_TRUE(mixed->Init(world, 1, DType::kF64).ok());
    mixed->parameters()[0].RequireGrad(false);
    const auto partly = Ddp::Create(mixed, world);
    ASSERT_TRUE(partly.ok()) << partly.status();
    ASSERT_TRUE(Backward(LossOf(**partly, x)).ok());
    EXPECT_FALSE(mixed->parameters()[0].grad().defined());
    EXPECT_TRUE(mixed->parameters()[1].grad().defined());
    mixed->parameters()[0].RequireGrad(true);
    EXPECT_THAT(std::string((**partly)(x).status().message()),
                HasSubstr("link0.weight was frozen when it was created, and is not now"));
  });
}

TEST_F(DistributedDataParallelTest, ItStandsForItsModuleWhileAllIsFrozen) {
  OnRanks(2, [&](const World& world, int rank) {
    auto counted = std::make_shared<Counted>();
    const auto model = Make(counted, world);
    ASSERT_NE(model, nullptr);
    const Tensor x = Rows(world, 0, 2, 2);
    model->RequireGrad(false);
    if (rank == 1) {
      // The other one does not call at all, and no call counts among those that are in common.
      for (int i = 1; i <= 3; ++i) {
        const Tensor y = (*model)(x);
        ASSERT_TRUE(y.Wait().ok()) << y.status();
        EXPECT_THAT(Values<int64_t>(counted->calls_()), ElementsAre(i));
      }
    }
    model->RequireGrad(true);
    std::vector<Doubles> first;
    for (int i = 1; i <= 3; ++i) {
      model->ClearGrads();
      ASSERT_TRUE(Backward(LossOf(*model, x)).ok());
      EXPECT_THAT(Values<int64_t>(counted->calls_()), ElementsAre(i));
      if (first.empty()) first = GradsOf(*model);
      EXPECT_EQ(GradsOf(*model), first);
    }
  });
}

TEST_F(DistributedDataParallelTest, ATapeMayBeUsedTwiceAndTwoCallsMayMakeOneLoss) {
  std::vector<Doubles> wanted;
  {
    const Session session = daemon_.Open();
    Chain model(2);
    ASSERT_TRUE(model.Init(session, 1, DType::kF64).ok());
    for (int i = 0; i < 2; ++i) {
      ASSERT_TRUE(
          Backward(LossOf(model, Rows(session, 0, 4, 3)) + LossOf(model, Rows(session, 4, 4, 3)))
              .ok());
    }
    wanted = GradsOf(model);
  }
  std::vector<std::vector<Doubles>> grads(2);
  OnRanks(2, [&](const World& world, int rank) {
    Options options;
    options.bucket_bytes = 1;
    options.first_bucket_bytes = 1;
    const auto model = Make(std::make_shared<Chain>(2), world, options);
    ASSERT_NE(model, nullptr);
    const Tensor loss = LossOf(*model, Rows(world, 2 * rank, 2, 3)) +
                        LossOf(*model, Rows(world, 4 + 2 * rank, 2, 3));
    BackwardOptions retain;
    retain.retain_graph = true;
    ASSERT_TRUE(Backward(loss, retain).ok());
    ASSERT_TRUE(Backward(loss).ok());
    grads[static_cast<size_t>(rank)] = GradsOf(*model);
    const absl::Status again = Backward(loss);
    EXPECT_THAT(std::string(again.message()), HasSubstr("was taken before"));
  });
  EXPECT_EQ(grads[0], grads[1]);
  ExpectNear(grads[0], wanted);
}

// --- Join ---------------------------------------------------------------------------------------

// Rank r has inputs[r] batches of one row.
struct Uneven {
  std::vector<int> inputs;
  bool divide_by_all = true;
  bool counts_steps = false;
  bool find_unused = false;
};

TEST_F(DistributedDataParallelTest, RanksWithFewerInputsTakePartUntilAllHaveNone) {
  Sgd::Options momentum;
  momentum.momentum = 0.5;
  for (const Uneven& c : std::vector<Uneven>{{{2, 2}},
                                             {{0, 0, 0}},
                                             {{1, 3}},
                                             {{3, 1}, false},
                                             {{2, 0, 5}, true, true},
                                             {{2, 4, 3}, false, true},
                                             {{3, 1}, true, false, true},
                                             {{0, 3}, false, true, true}}) {
    const int size = static_cast<int>(c.inputs.size());
    SCOPED_TRACE(::testing::PrintToString(c.inputs));
    // The step of those that are still there, on one rank: a mean over ranks, by hand.
    std::vector<Doubles> wanted;
    const int most = *std::max_element(c.inputs.begin(), c.inputs.end());
    {
      const Session session = daemon_.Open();
      Chain model(2);
      ASSERT_TRUE(model.Init(session, 1, DType::kF64).ok());
      Sgd sgd(model.parameters(), momentum);
      for (int i = 0; i < most; ++i) {
        int live = 0;
        for (int r = 0; r < size; ++r) {
          if (i >= c.inputs[static_cast<size_t>(r)]) continue;
          ++live;
          ASSERT_TRUE(Backward(LossOf(model, Rows(session, 10 * r + i, 1, 3))).ok());
        }
        Tensors gradients;
        for (const Tensor& gradient : sgd.gradients()) {
          gradients.push_back(gradient * (1.0 / (c.divide_by_all ? size : live)));
        }
        model.ClearGrads();
        ASSERT_TRUE(sgd.Step(gradients).ok());
      }
      wanted = ValuesOf(model);
    }
    std::vector<std::vector<Doubles>> values(static_cast<size_t>(size));
    std::vector<std::vector<Doubles>> states(static_cast<size_t>(size));
    OnRanks(size, [&](const World& world, int rank) {
      const size_t r = static_cast<size_t>(rank);
      Options options;
      options.find_unused_parameters = c.find_unused;
      options.bucket_bytes = 1;
      const auto model = Make(std::make_shared<Chain>(2), world, options);
      ASSERT_NE(model, nullptr);
      Sgd sgd(model->parameters(), momentum);
      // As after compiled steps of which a scaler left two out.
      constexpr int kBefore = 5;
      auto state = sgd.State();
      ASSERT_TRUE(state.ok()) << state.status();
      for (size_t p = 0; p < state->size(); ++p) {
        sgd.SetState(p, {(*state)[p].slots, kBefore, 2});
      }
      Ddp::Join::Options joining;
      joining.divide_by_all_ranks = c.divide_by_all;
      if (c.counts_steps) {
        ASSERT_TRUE(world.Step(1).ok());
      }
      {
        Ddp::Join join(model.get(), joining);
        for (int i = 0; i < c.inputs[r]; ++i) {
          if (c.counts_steps) {
            ASSERT_TRUE(world.Step(world.step() + 1).ok());
          }
          const absl::Status backward = Backward(LossOf(*model, Rows(world, 10 * rank + i, 1, 3)));
          ASSERT_TRUE(backward.ok()) << backward;
          ASSERT_TRUE(sgd.Step().ok());
        }
        const absl::Status finished = join.Finish(&sgd);
        ASSERT_TRUE(finished.ok()) << finished;
      }
      values[r] = ValuesOf(*model);
      state = sgd.State();
      ASSERT_TRUE(state.ok()) << state.status();
      for (const Optimizer::ParameterState& of_parameter : *state) {
        states[r].push_back(Values<double>(of_parameter.slots[0]));
        EXPECT_EQ(of_parameter.steps, kBefore + most);
        EXPECT_EQ(of_parameter.skipped, 2);
      }
      // All go on as before.
      if (c.counts_steps) {
        ASSERT_TRUE(world.Step(world.step() + 1).ok());
      }
      ASSERT_TRUE(Backward(LossOf(*model, Rows(world, 0, 1, 3))).ok());
      EXPECT_TRUE(model->parameters()[0].grad().Wait().ok());
    });
    for (size_t r = 0; r < values.size(); ++r) {
      EXPECT_EQ(values[r], values[0]);
      EXPECT_EQ(states[r], states[0]);
    }
    ExpectNear(values[0], wanted);
  }
}

// Of a module with a buffer and a parameter that nobody uses.
TEST_F(DistributedDataParallelTest, BuffersAndAStaticGraphAreThoseOfTheRanksThatAreStillThere) {
  OnRanks(3, [&](const World& world, int rank) {
    Options options;
    options.static_graph = true;
    auto counted = std::make_shared<Counted>();
    auto chain = std::make_shared<Chain>(2, 2);
    chain->use = {0};
    const auto model = Make(std::make_shared<Sequential>(Modules{chain, counted}), world, options);
    ASSERT_NE(model, nullptr);
    Ddp::Join join(model.get());
    for (int i = 0; i < (rank == 1 ? 4 : rank); ++i) {
      ASSERT_TRUE(Backward(LossOf(*model, Rows(world, i, 1, 2))).ok());
      model->ClearGrads();
    }
    const absl::Status finished = join.Finish();
    ASSERT_TRUE(finished.ok()) << finished;
    EXPECT_THAT(Values<int64_t>(counted->calls_()), ElementsAre(4));
  });
}

// That it had no loss at first is not how its losses are.
TEST_F(DistributedDataParallelTest, ARankMayBeginAStaticGraphWithoutInputs) {
  OnRanks(2, [&](const World& world, int rank) {
    Options options;
    options.static_graph = true;
    auto chain = std::make_shared<Chain>(2, 2);
    chain->use = {0};
    const auto model = Make(chain, world, options);
    ASSERT_NE(model, nullptr);
    for (const int inputs : {2 * rank, 1}) {
      Ddp::Join join(model.get());
      for (int i = 0; i < inputs; ++i) {
        const absl::Status backward = Backward(LossOf(*model, Rows(world, i, 1, 2)));
        ASSERT_TRUE(backward.ok()) << backward;
        model->ClearGrads();
      }
      const absl::Status finished = join.Finish();
      ASSERT_TRUE(finished.ok()) << finished;
    }
    if (rank != 0) return;
    // Afterwards it is held to them.
    chain->use = {0, 1};
    const absl::Status other = Backward(LossOf(*model, Rows(world, 9, 1, 2)));
    EXPECT_THAT(std::string(other.message()), HasSubstr("at one step and not at another"));
  });
}

TEST_F(DistributedDataParallelTest, UnderOneJoinAnEpochMayHaveNoInputsOnAnyRank) {
  OnRanks(2, [&](const World& world, int rank) {
    const auto model = Make(std::make_shared<Chain>(1), world);
    ASSERT_NE(model, nullptr);
    Sgd sgd(model->parameters(), {});
    Ddp::Join join(model.get());
    std::vector<Doubles> values;
    for (const int inputs : {rank, 0, 0, 1 - rank}) {
      for (int i = 0; i < inputs; ++i) {
        ASSERT_TRUE(Backward(LossOf(*model, Rows(world, rank, 1, 3))).ok());
        ASSERT_TRUE(sgd.Step().ok());
        model->ClearGrads();
      }
      const absl::Status finished = join.Finish(&sgd);
      ASSERT_TRUE(finished.ok()) << finished;
      values.push_back(Values<double>(model->parameters()[0]()));
    }
    EXPECT_EQ(values[1], values[0]);
    EXPECT_EQ(values[2], values[0]);
    EXPECT_NE(values[3], values[0]);
  });
}

TEST_F(DistributedDataParallelTest, WhereAllAreToStopAtOnceTheRanksThatHaveFinishedAreNamed) {
  OnRanks(3, [&](const World& world, int rank) {
    const auto model = Make(std::make_shared<Chain>(1), world);
    ASSERT_NE(model, nullptr);
    Ddp::Join::Options joining;
    joining.stop_at_first = true;
    Ddp::Join join(model.get(), joining);
    absl::Status status;
    for (int i = 0; i < (rank == 1 ? 1 : 4) && status.ok(); ++i) {
      const Tensor loss = LossOf(*model, Rows(world, i, 1, 3));
      status = loss.status();
      if (status.ok()) status = Backward(loss);
    }
    if (rank == 1) {
      ASSERT_TRUE(status.ok()) << status;
      status = join.Finish();
    }
    EXPECT_EQ(ErrorOf(status).reason, Reason::kWrongState);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("ranks 1 of the group have no more inputs, and others have"));
  });
}

// --- Anything -----------------------------------------------------------------------------------

// Chains of which each rank uses what it draws at each step, with and without NoSync, in buckets of
// any size; against the mean over ranks of what each one's own clone gives.
TEST_F(DistributedDataParallelTest, RandomTrainingsGiveTheMeanOfWhatEachRankGivesAlone) {
  const char* const given = std::getenv("CHORUS_TEST_SEED");
  const uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
  std::cout << "CHORUS_TEST_SEED=" << seed << std::endl;
  for (uint64_t program = 0; program < 100; ++program) {
    std::mt19937_64 common(seed + program);
    const auto below = [](std::mt19937_64* random, int n) {
      return static_cast<int>((*random)() % static_cast<uint64_t>(n));
    };
    const int size = 1 + below(&common, 4);
    const int links = 1 + below(&common, 5);
    const int steps = 1 + below(&common, 5);
    Options options;
    options.find_unused_parameters = true;
    options.bucket_bytes = 1 + below(&common, 300);
    options.first_bucket_bytes = 1 + below(&common, 300);
    SCOPED_TRACE(absl::StrCat("program ", program, ": ", size, " ranks, ", links, " links"));
    const size_t ranks = static_cast<size_t>(size);
    // [rank][step]
    std::vector<std::vector<std::vector<Doubles>>> got(ranks);
    std::vector<std::vector<std::vector<Doubles>>> own(ranks);
    std::vector<bool> syncs;
    for (int i = 0; i < steps; ++i) syncs.push_back(below(&common, 3) != 0);
    OnRanks(size, [&](const World& world, int rank) {
      const size_t r = static_cast<size_t>(rank);
      std::mt19937_64 random(seed + 1000 * (program + 1) + r);
      auto chain = std::make_shared<Chain>(links);
      const auto model = Make(chain, world, options);
      ASSERT_NE(model, nullptr);
      const auto alone = chain->Clone(world);
      ASSERT_TRUE(alone.ok()) << alone.status();
      for (int i = 0; i < steps; ++i) {
        chain->use.clear();
        for (int l = below(&random, links + 1); l >= 0; --l) {
          chain->use.push_back(below(&random, links));
        }
        const Tensor x = Rows(world, below(&random, 50), 1 + below(&random, 3), 3);
        ASSERT_TRUE(Backward(LossOf(**alone, x)).ok());
        own[r].push_back(GradsOf(**alone));
        (*alone)->ClearGrads();
        absl::optional<Ddp::NoSync> no_sync;
        if (!syncs[static_cast<size_t>(i)]) no_sync.emplace(model.get());
        const absl::Status backward = Backward(LossOf(*model, x));
        ASSERT_TRUE(backward.ok()) << backward;
        got[r].push_back(GradsOf(*model));
        if (syncs[static_cast<size_t>(i)]) model->ClearGrads();
      }
    });
    if (HasFailure()) return;
    for (size_t r = 0; r < ranks; ++r) {
      size_t begin = 0;
      for (size_t i = 0; i < static_cast<size_t>(steps); ++i) {
        for (size_t p = 0; p < got[r][i].size(); ++p) {
          Doubles wanted;
          for (size_t k = 0; k < ranks; ++k) {
            if (!syncs[i] && k != r) continue;
            for (size_t s = begin; s <= i; ++s) {
              const Doubles& part = own[k][s][p];
              if (wanted.size() < part.size()) wanted.resize(part.size());
              for (size_t e = 0; e < part.size(); ++e) {
                wanted[e] += part[e] / (syncs[i] ? size : 1);
              }
            }
          }
          EXPECT_THAT(got[r][i][p], Pointwise(DoubleNear(1e-12), wanted))
              << "rank " << r << " step " << i << " parameter " << p;
        }
        if (syncs[i]) begin = i + 1;
      }
    }
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace nn
}  // namespace chorus
