#include "chorus/nn/sharded_optimizer.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "chorus/chorus.h"
#include "chorus/nn/distributed_data_parallel.h"
#include "chorus/nn/layers.h"
#include "chorus/nn/optim.h"
#include "client/internal/access.h"
#include "client/internal/member.h"
#include "client/testing/ranks.h"
#include "client/testing/values.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace nn {
namespace {

using chorus::testing::Numbers;
using chorus::testing::OnRanks;
using chorus::testing::Values;
using ::testing::HasSubstr;

using Doubles = std::vector<double>;

// 3 * 5 + 5 + 5 * 2 + 2 elements, which no two to four ranks share evenly.
std::shared_ptr<Module> Net() {
  return std::make_shared<Sequential>(Modules{Make<Linear>(3, 5), TanhLayer(), Make<Linear>(5, 2)});
}
Tensor LossOf(Module& module, const World& world, int step) {
  const Tensor y = module(Numbers(world, {2, 3}, 10 * step + world.rank()));
  return Sum(y * y);
}
std::vector<Doubles> ValuesOf(const std::vector<Tensor>& tensors) {
  std::vector<Doubles> values;
  for (const Tensor& tensor : tensors) values.push_back(Values<double>(tensor));
  return values;
}
std::vector<Doubles> ValuesOf(const Module& module) {
  std::vector<Tensor> tensors;
  for (const Variable& parameter : module.parameters()) tensors.push_back(parameter());
  return ValuesOf(tensors);
}
// The first layer learns as the optimizer says, the second one by its own rate.
std::vector<ParameterGroup> TwoGroups(const Module& module) {
  const std::vector<Variable> all = module.parameters();
  std::vector<ParameterGroup> groups(2);
  groups[0].parameters = {all[0], all[1]};
  groups[1].parameters = {all[2], all[3]};
  groups[1].learning_rate = 0.03;
  groups[1].weight_decay = 0.2;
  return groups;
}
std::unique_ptr<Optimizer> MakeAdamW(const std::vector<ParameterGroup>& groups) {
  AdamW::Options options;
  options.learning_rate = 0.01;
  auto adam = std::make_unique<AdamW>(groups, options);
  adam->SetSchedule(CosineDecay(10));
  return adam;
}

TEST(ShardedOptimizerTest, ItGivesTheBitsOfTheSameOptimizerOnEveryRank) {
  for (const int size : {1, 2, 3, 4}) {
    OnRanks(size, [&](const World& world, int /*rank*/) {
      const auto whole = Net();
      ASSERT_TRUE(whole->Init(world, 1, DType::kF64).ok());
      const auto parallel = DistributedDataParallel::Create(whole, world);
      ASSERT_TRUE(parallel.ok()) << parallel.status();
      const std::unique_ptr<Optimizer> adam = MakeAdamW(TwoGroups(*whole));
      const auto sharded = Net();
      ASSERT_TRUE(sharded->Init(world, 1, DType::kF64).ok());
      ShardedOptimizer optimizer(TwoGroups(*sharded), world, MakeAdamW);
      for (int i = 0; i < 4; ++i) {
        if (i == 2) {
          // As a load does, or a clamp.
          const NoGrad no_grad;
          for (const auto& module : {whole, sharded}) {
            const Variable weight = module->parameters()[2];
            weight.Set(weight() * 0.5);
          }
        }
        ASSERT_TRUE(Backward(LossOf(**parallel, world, i)).ok());
        ASSERT_TRUE(adam->Step().ok());
        ASSERT_TRUE(Backward(LossOf(*sharded, world, i)).ok());
        const absl::Status step = optimizer.Step();
        ASSERT_TRUE(step.ok()) << step;
        EXPECT_EQ(ValuesOf(*sharded), ValuesOf(*whole)) << size << " ranks, step " << i;
      }
      // Its share of the state: 20 and 12 elements, of two kinds.
      const auto state = optimizer.pieces()->State();
      ASSERT_TRUE(state.ok()) << state.status();
      ASSERT_EQ(state->size(), 2u);
      EXPECT_EQ((*state)[0].slots[0].num_elements(), (20 + size - 1) / size);
      EXPECT_EQ((*state)[1].slots[1].num_elements(), (12 + size - 1) / size);
    });
  }
}

// As World::Reform leaves the group: some pieces went with a rank, others have another place.
TEST(ShardedOptimizerTest, RanksThatWereReformedAreOthers) {
  OnRanks(2, [](const World& world, int /*rank*/) {
    const auto module = Net();
    ASSERT_TRUE(module->Init(world, 1, DType::kF64).ok());
    ShardedOptimizer optimizer(TwoGroups(*module), world, MakeAdamW);
    const std::unique_ptr<Optimizer> whole = MakeAdamW(TwoGroups(*module));
    ASSERT_TRUE(Backward(LossOf(*module, world, 0)).ok());
    ASSERT_TRUE(optimizer.Step().ok());
    const std::vector<Doubles> values = ValuesOf(*module);
    ++internal::CoreOf(world)->generation;
    for (const absl::Status& status :
         {optimizer.Step(), optimizer.Gather(whole.get()), optimizer.Scatter(whole.get())}) {
      EXPECT_EQ(ErrorOf(status).reason, Reason::kWrongState) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("reformed"));
    }
    EXPECT_EQ(ValuesOf(*module), values);
    // Nothing was called: who makes it anew is in line.
    ShardedOptimizer anew(TwoGroups(*module), world, MakeAdamW);
    EXPECT_TRUE(anew.Step().ok());
    EXPECT_NE(ValuesOf(*module), values);
  });
}

// Three ranks' state, by way of what a checkpoint has, to two ranks.
TEST(ShardedOptimizerTest, StateIsGatheredByOneNumberOfRanksAndScatteredToAnother) {
  std::vector<Doubles> values;
  std::vector<std::vector<Doubles>> state;
  std::vector<Doubles> wanted;
  const auto train = [](Module& module, const World& world, ShardedOptimizer* optimizer, int step) {
    // The same on every rank, however many there are.
    const Tensor y = module(Numbers(world, {2, 3}, step));
    ASSERT_TRUE(Backward(Sum(y * y)).ok());
    const absl::Status status = optimizer->Step();
    ASSERT_TRUE(status.ok()) << status;
  };
  const auto keep = [&](const Module& module, Optimizer* whole) {
    values = ValuesOf(module);
    const auto all = whole->State();
    ASSERT_TRUE(all.ok()) << all.status();
    for (const auto& of_parameter : *all) state.push_back(ValuesOf(of_parameter.slots));
  };
  OnRanks(4, [&](const World& world, int rank) {
    const auto module = Net();
    ASSERT_TRUE(module->Init(world, 1, DType::kF64).ok());
    ShardedOptimizer optimizer(TwoGroups(*module), world, MakeAdamW);
    for (int i = 0; i < 3; ++i) train(*module, world, &optimizer, i);
    const std::unique_ptr<Optimizer> whole = MakeAdamW(TwoGroups(*module));
    const absl::Status gathered = optimizer.Gather(whole.get());
    ASSERT_TRUE(gathered.ok()) << gathered;
    EXPECT_EQ(whole->steps(3), 3);
    if (rank == 2) keep(*module, whole.get());
    for (int i = 3; i < 6; ++i) train(*module, world, &optimizer, i);
    if (rank == 0) wanted = ValuesOf(*module);
  });
  ASSERT_EQ(state.size(), 4u);
  OnRanks(2, [&](const World& world, int) {
    const auto module = Net();
    ASSERT_TRUE(module->Init(world, 5, DType::kF64).ok());
    const std::vector<Variable> parameters = module->parameters();
    const std::unique_ptr<Optimizer> whole = MakeAdamW(TwoGroups(*module));
    for (size_t i = 0; i < parameters.size(); ++i) {
      const Shape& shape = parameters[i].shape();
      parameters[i].Set(FromHost(world, values[i], shape));
      whole->SetState(
          i, {{FromHost(world, state[i][0], shape), FromHost(world, state[i][1], shape)}, 3});
    }
    ShardedOptimizer optimizer(TwoGroups(*module), world, MakeAdamW);
    const absl::Status scattered = optimizer.Scatter(whole.get());
    ASSERT_TRUE(scattered.ok()) << scattered;
    for (int i = 3; i < 6; ++i) train(*module, world, &optimizer, i);
    EXPECT_EQ(ValuesOf(*module), wanted);
    // A call that is refused fails what is under way.
    EXPECT_TRUE(Barrier(world).Wait().ok());
    Sgd other(parameters, {});
    EXPECT_THAT(std::string(optimizer.Gather(&other).message()),
                HasSubstr("expected an optimizer of 4 parameters with 2 tensors each, got one of 4 "
                          "with 0"));
  });
}

// As the groups have them, and as the module has them.
TEST(ShardedOptimizerTest, StateIsEachParametersInWhateverOrderAnOptimizerHasThem) {
  OnRanks(2, [&](const World& world, int) {
    const auto module = Net();
    ASSERT_TRUE(module->Init(world, 1, DType::kF64).ok());
    const std::vector<Variable> parameters = module->parameters();
    std::vector<ParameterGroup> groups(2);
    groups[0].parameters = {parameters[0], parameters[2]};
    groups[1].parameters = {parameters[1], parameters[3]};
    ShardedOptimizer optimizer(groups, world, MakeAdamW);
    ASSERT_TRUE(Backward(LossOf(*module, world, 0)).ok());
    ASSERT_TRUE(optimizer.Step().ok());
    AdamW by_group(groups, AdamW::Options());
    AdamW by_module(parameters, AdamW::Options());
    ASSERT_TRUE(optimizer.Gather(&by_group).ok());
    ASSERT_TRUE(optimizer.Gather(&by_module).ok());
    ShardedOptimizer other(groups, world, MakeAdamW);
    ASSERT_TRUE(other.Scatter(&by_module).ok());
    AdamW after(groups, AdamW::Options());
    ASSERT_TRUE(other.Gather(&after).ok());
    const auto wanted = by_group.State();
    const auto gathered = by_module.State();
    const auto scattered = after.State();
    for (size_t i = 0; i < 4; ++i) {
      const size_t place = std::vector<size_t>{0, 2, 1, 3}[i];
      EXPECT_EQ(ValuesOf((*gathered)[place].slots), ValuesOf((*wanted)[i].slots)) << i;
      EXPECT_EQ(ValuesOf((*scattered)[i].slots), ValuesOf((*wanted)[i].slots)) << i;
    }
    const auto stranger = Net();
    ASSERT_TRUE(stranger->Init(world, 1, DType::kF64).ok());
    AdamW of_stranger(stranger->parameters(), AdamW::Options());
    const absl::Status refused = optimizer.Scatter(&of_stranger);
    EXPECT_EQ(ErrorOf(refused).reason, Reason::kBadType) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("parameter 0 is none of the other"));
  });
}

// Of the second group, so that of the first one nothing is scattered either.
TEST(ShardedOptimizerTest, StateThatHasFailedIsNotScattered) {
  OnRanks(2, [&](const World& world, int) {
    const auto module = Net();
    ASSERT_TRUE(module->Init(world, 1, DType::kF64).ok());
    ShardedOptimizer optimizer(TwoGroups(*module), world, MakeAdamW);
    ASSERT_TRUE(Backward(LossOf(*module, world, 0)).ok());
    ASSERT_TRUE(optimizer.Step().ok());
    const std::unique_ptr<Optimizer> whole = MakeAdamW(TwoGroups(*module));
    ASSERT_TRUE(optimizer.Gather(whole.get()).ok());
    const auto before = optimizer.pieces()->State();
    const auto state = whole->State();
    for (size_t i = 0; i < 4; ++i) whole->SetState(i, {(*state)[i].slots, 5});
    const Tensor failed = FromError(world, absl::InternalError("gone"));
    whole->SetState(3, {{(*state)[3].slots[0], failed}, 5});
    const absl::Status refused = optimizer.Scatter(whole.get());
    EXPECT_THAT(std::string(refused.message()), HasSubstr("gone"));
    const auto after = optimizer.pieces()->State();
    for (size_t f = 0; f < 2; ++f) {
      EXPECT_EQ(ValuesOf((*after)[f].slots), ValuesOf((*before)[f].slots));
      EXPECT_EQ((*after)[f].steps, 1);
    }
  });
}

// A piece of several parameters counts one number of steps.
TEST(ShardedOptimizerTest, StateOfDifferentNumbersOfStepsIsNotScattered) {
  OnRanks(2, [&](const World& world, int) {
    const auto module = Net();
    ASSERT_TRUE(module->Init(world, 1, DType::kF64).ok());
    const std::unique_ptr<Optimizer> whole = MakeAdamW(TwoGroups(*module));
    const auto state = whole->State();
    ASSERT_TRUE(state.ok()) << state.status();
    for (size_t i = 0; i < 4; ++i) whole->SetState(i, {(*state)[i].slots, 3, i < 2 ? 1 : 2});
    ShardedOptimizer optimizer(TwoGroups(*module), world, MakeAdamW);
    for (const auto& [steps, skipped] : std::vector<std::pair<int, int>>{{4, 2}, {3, 1}}) {
      whole->SetState(3, {(*state)[3].slots, steps, skipped});
      const absl::Status refused = optimizer.Scatter(whole.get());
      EXPECT_EQ(ErrorOf(refused).reason, Reason::kWrongState) << refused;
      EXPECT_THAT(std::string(refused.message()), HasSubstr("parameters 2 and 3"));
      EXPECT_EQ(optimizer.pieces()->steps(0), 0);
    }
    whole->SetState(3, {(*state)[3].slots, 3, 2});
    const absl::Status scattered = optimizer.Scatter(whole.get());
    ASSERT_TRUE(scattered.ok()) << scattered;
    const std::unique_ptr<Optimizer> gathered = MakeAdamW(TwoGroups(*module));
    ASSERT_TRUE(optimizer.Gather(gathered.get()).ok());
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(gathered->steps(i), 3);
      EXPECT_EQ(gathered->skipped(i), i < 2 ? 1 : 2);
    }
  });
}

TEST(ShardedOptimizerTest, AParameterWithoutGradientCountsWithZerosAndOneThatIsNotThereIsRefused) {
  OnRanks(2, [&](const World& world, int rank) {
    const auto module = Net();
    ShardedOptimizer optimizer(module->parameters(), world,
                               [](const std::vector<ParameterGroup>& pieces) {
                                 return std::make_unique<Sgd>(pieces, Sgd::Options());
                               });
    const absl::Status early = optimizer.Step();
    EXPECT_EQ(ErrorOf(early).reason, Reason::kWrongState);
    EXPECT_THAT(std::string(early.message()), HasSubstr("call Init first"));
    ASSERT_TRUE(module->Init(world, 1, DType::kF64).ok());
    const std::vector<Doubles> before = ValuesOf(*module);
    if (rank == 1) {
      ASSERT_TRUE(Backward(LossOf(*module, world, 0)).ok());
    }
    const Tensor own = module->parameters()[3].grad();
    const Doubles gradient = own.defined() ? Values<double>(own) : Doubles();
    ASSERT_TRUE(optimizer.Step().ok());
    const std::vector<Doubles> after = ValuesOf(*module);
    if (rank == 1) {
      ASSERT_EQ(gradient.size(), 2u);
      for (size_t e = 0; e < gradient.size(); ++e) {
        EXPECT_EQ(after[3][e], before[3][e] - gradient[e] / 2 * 0.1);
      }
    }
    ASSERT_TRUE(Backward(LossOf(*module, world, 0)).ok());
    optimizer.ClearGrads();
    EXPECT_FALSE(module->parameters()[0].grad().defined());
  });
}

// Wherever it ends for want of names: what one group cannot do no group has done.
TEST(ShardedOptimizerTest, AStepThatIsRefusedChangesNothing) {
  OnRanks(1, [&](const World& world, int) {
    std::vector<std::vector<Doubles>> results;
    for (const bool fails_first : {false, true}) {
      const auto module = Net();
      ASSERT_TRUE(module->Init(world, 1, DType::kF64).ok());
      ShardedOptimizer optimizer(TwoGroups(*module), world, MakeAdamW);
      ASSERT_TRUE(Backward(LossOf(*module, world, 0)).ok());
      ASSERT_TRUE(optimizer.Step().ok());  // moments are not zeros
      ASSERT_TRUE(Backward(LossOf(*module, world, 1)).ok());
      const std::vector<Doubles> before = ValuesOf(*module);
      if (fails_first) {
        std::vector<Tensor> held = chorus::testing::TakeAllNames(world);
        for (int left = 0; left < 8; ++left) {
          EXPECT_FALSE(optimizer.Step().ok()) << left;
          EXPECT_EQ(ValuesOf(*module), before) << left;
          held.pop_back();
        }
      }
      const absl::Status stepped = optimizer.Step();
      ASSERT_TRUE(stepped.ok()) << stepped;
      results.push_back(ValuesOf(*module));
    }
    EXPECT_EQ(results[0], results[1]);
  });
}

std::unique_ptr<Optimizer> MakeSgd(const std::vector<ParameterGroup>& groups) {
  return std::make_unique<Sgd>(groups, Sgd::Options());
}

// Without steps: else every later call would meet another one of the other rank.
TEST(ShardedOptimizerTest, AStepThatOneRankIsRefusedCountsAndTheOthersAreTold) {
  std::vector<std::vector<Doubles>> results(2);
  for (const bool is_refused : {false, true}) {
    OnRanks(2, [&](const World& world, int rank) {
      const auto module = Net();
      const auto train = [&](ShardedOptimizer* optimizer, int turn) {
        ASSERT_TRUE(Backward(LossOf(*module, world, turn)).ok());
        const absl::Status status = optimizer->Step();
        ASSERT_TRUE(status.ok()) << status;
        optimizer->ClearGrads();
        // A call that is refused fails what is under way.
        for (const Variable& parameter : module->parameters()) {
          EXPECT_TRUE(parameter().Wait().ok());
        }
        EXPECT_TRUE(Barrier(world).Wait().ok());
      };
      const std::vector<ParameterGroup> groups = TwoGroups(*module);
      ShardedOptimizer optimizer(groups, world, MakeSgd);
      const Variable first = module->parameters()[0];
      const auto refuse = [&] {
        if (!is_refused) return;
        std::vector<Tensor> before;
        for (const Variable& parameter : module->parameters()) before.push_back(parameter());
        absl::Status status = optimizer.Step();
        if (rank == 0) {
          if (status.ok()) status = first().Wait();
          EXPECT_EQ(ErrorOf(status).reason, Reason::kPeerRefused) << status;
        } else {
          EXPECT_FALSE(status.ok());
        }
        for (size_t i = 0; i < before.size(); ++i) {
          if (before[i].defined()) module->parameters()[i].Set(before[i]);
        }
      };
      // Not there yet, frozen, failed.
      if (rank == 0) {
        ASSERT_TRUE(module->Init(world, 1, DType::kF64).ok());
      }
      refuse();
      ASSERT_TRUE(module->Init(world, 1, DType::kF64).ok());
      train(&optimizer, 0);
      first.RequireGrad(rank == 0);
      refuse();
      first.RequireGrad(true);
      train(&optimizer, 1);
      const Tensor before = first();
      if (rank == 1) first.Set(FromError(world, absl::InternalError("gone")));
      refuse();
      first.Set(before);
      for (int turn = 2; turn < 4; ++turn) train(&optimizer, turn);
      std::vector<Doubles>& result = results[is_refused ? 1 : 0];
      if (rank == 1) result = ValuesOf(*module);
    });
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST(ShardedOptimizerTest, AGatherThatOneRankIsRefusedIsOneCall) {
  OnRanks(2, [&](const World& world, int rank) {
    const auto module = Net();
    ASSERT_TRUE(module->Init(world, 1, DType::kF64).ok());
    ShardedOptimizer optimizer(TwoGroups(*module), world, MakeAdamW);
    ASSERT_TRUE(Backward(LossOf(*module, world, 0)).ok());
    ASSERT_TRUE(optimizer.Step().ok());
    const auto gather = [&] {
      std::vector<std::vector<Doubles>> values;
      const std::unique_ptr<Optimizer> whole = MakeAdamW(TwoGroups(*module));
      const absl::Status gathered = optimizer.Gather(whole.get());
      EXPECT_TRUE(gathered.ok()) << gathered;
      const auto state = whole->State();
      EXPECT_TRUE(state.ok()) << state.status();
      for (const auto& of_parameter : *state) values.push_back(ValuesOf(of_parameter.slots));
      return values;
    };
    const std::vector<std::vector<Doubles>> wanted = gather();
    EXPECT_TRUE(Barrier(world).Wait().ok());  // a call that is refused fails what is under way
    const std::unique_ptr<Optimizer> whole = MakeAdamW(TwoGroups(*module));
    Sgd other(module->parameters(), {});
    absl::Status refused = optimizer.Gather(rank == 0 ? whole.get() : &other);
    if (rank == 0) {
      if (refused.ok()) refused = (*whole->State())[0].slots[0].Wait();
      EXPECT_EQ(ErrorOf(refused).reason, Reason::kPeerRefused) << refused;
    } else {
      EXPECT_EQ(ErrorOf(refused).reason, Reason::kBadType) << refused;
    }
    EXPECT_EQ(gather(), wanted);
    // A tensor of one piece's state.
    const auto state = optimizer.pieces()->State();
    if (rank == 1) {
      const Tensor failed = FromError(world, absl::InternalError("gone"));
      optimizer.pieces()->SetState(0, {{failed, (*state)[0].slots[1]}, 1});
    }
    refused = optimizer.Gather(whole.get());
    if (refused.ok()) refused = (*whole->State())[0].slots[0].Wait();
    EXPECT_FALSE(refused.ok());
    optimizer.pieces()->SetState(0, (*state)[0]);
    EXPECT_EQ(gather(), wanted);
  });
}

// Its piece would go on moving.
TEST(ShardedOptimizerTest, AParameterThatIsGivenTwiceIsRefused) {
  OnRanks(2, [&](const World& world, int) {
    const auto module = Net();
    ASSERT_TRUE(module->Init(world, 1, DType::kF64).ok());
    const std::vector<Doubles> before = ValuesOf(*module);
    for (const bool in_one_group : {false, true}) {
      std::vector<ParameterGroup> groups = TwoGroups(*module);
      groups[in_one_group ? 0 : 1].parameters.push_back(module->parameters()[0]);
      ShardedOptimizer optimizer(groups, world, MakeAdamW);
      ASSERT_TRUE(Backward(LossOf(*module, world, 0)).ok());
      const absl::Status refused = optimizer.Step();
      EXPECT_EQ(ErrorOf(refused).reason, Reason::kBadType) << refused;
      EXPECT_THAT(std::string(refused.message()),
                  HasSubstr("an optimizer expects each parameter once, got one twice"));
      EXPECT_EQ(ValuesOf(*module), before);
    }
  });
}

// In two orders they are as many elements: what comes of them would be told by numbers alone.
TEST(ShardedOptimizerTest, ParametersInOtherOrdersAreRefusedByRankAndParameter) {
  OnRanks(2, [&](const World& world, int rank) {
    const auto module = Net();
    ASSERT_TRUE(module->Init(world, 1, DType::kF64).ok());
    const std::vector<Variable> parameters = module->parameters();
    std::vector<Variable> others = parameters;
    if (rank == 1) std::swap(others[0], others[3]);
    ASSERT_TRUE(Backward(LossOf(*module, world, 0)).ok());
    const std::vector<Doubles> before = ValuesOf(*module);
    ShardedOptimizer optimizer(others, world, MakeAdamW);
    AdamW whole(parameters, AdamW::Options());
    for (const bool gathers : {true, false, false}) {
      const absl::Status refused = gathers ? optimizer.Gather(&whole) : optimizer.Step();
      EXPECT_EQ(ErrorOf(refused).reason, Reason::kMismatch) << refused;
      EXPECT_THAT(std::string(refused.message()),
                  HasSubstr("ShardedOptimizer: rank 1 of the group has parameter 0, of group 0, "
                            "f64[2] where rank 0 has parameter 0, of group 0, f64[5,3]"));
      EXPECT_EQ(ValuesOf(*module), before);
    }
    // As many calls on both: they are in line.
    ShardedOptimizer ordered(parameters, world, MakeAdamW);
    const absl::Status stepped = ordered.Step();
    ASSERT_TRUE(stepped.ok()) << stepped;
    EXPECT_NE(ValuesOf(*module), before);
    // The same parameters in other groups.
    std::vector<ParameterGroup> groups = TwoGroups(*module);
    if (rank == 1) groups = OneGroup(parameters);
    ShardedOptimizer grouped(groups, world, MakeAdamW);
    EXPECT_THAT(std::string(grouped.Step().message()), HasSubstr("has parameter 2, of group"));
  });
}

TEST(ShardedOptimizerTest, AFrozenParameterIsRefused) {
  OnRanks(2, [&](const World& world, int) {
    const auto module = Net();
    ASSERT_TRUE(module->Init(world, 1, DType::kF64).ok());
    module->parameters()[1].RequireGrad(false);
    ShardedOptimizer optimizer(module->parameters(), world,
                               [](const std::vector<ParameterGroup>& pieces) {
                                 return std::make_unique<AdamW>(pieces, AdamW::Options());
                               });
    const std::vector<Doubles> before = ValuesOf(*module);
    const absl::Status refused = optimizer.Step();
    EXPECT_EQ(ErrorOf(refused).reason, Reason::kBadType) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("parameter 1 is frozen"));
    EXPECT_EQ(ValuesOf(*module), before);
    // Nothing moves there.
    AdamW whole(module->parameters(), AdamW::Options());
    EXPECT_TRUE(optimizer.Gather(&whole).ok());
    module->parameters()[1].RequireGrad(true);
    ASSERT_TRUE(optimizer.Step().ok());
    module->parameters()[0].RequireGrad(false);
    EXPECT_EQ(ErrorOf(optimizer.Step()).reason, Reason::kBadType);
  });
}

}  // namespace
}  // namespace nn
}  // namespace chorus
