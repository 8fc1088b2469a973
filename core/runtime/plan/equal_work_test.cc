#include "core/runtime/plan/equal_work.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/ops/testing/rank_builder.h"
#include "core/runtime/device_plan.h"
#include "core/runtime/plan/plan_testing.h"
#include "gtest/gtest.h"

namespace chorus {
namespace testing {
namespace {

using Kind = BufferSpec::Kind;

// Data in, parameters and momentum in and out: what every rank does with what all of them get.
Graph UpdateGraph(int rank, const std::string& last = "sub", int64_t size = 10000) {
  RankBuilder b(rank, 3);
  const ValueIndex data = b.Input(F32({size}));
  const ValueIndex parameters = b.Input(F32({size}));
  const ValueIndex momentum = b.Input(F32({size}));
  const ValueIndex seen = b.Op("mul", {data, parameters});
  const ValueIndex moved = b.Op("add", {momentum, b.AllReduce(seen)});
  AddOutput(&b, moved);
  AddOutput(&b, b.Op(last, {parameters, b.Op("neg", {moved})}));
  AddOutput(&b, seen);
  return b.graph().Build();
}

TEST(EqualWorkTest, AnUpdateIsAGroupOfEqualWork) {
  const Plan plan = Compile(UpdateGraph(1));
  ASSERT_EQ(plan.equal_groups.size(), 1u);
  const Plan::EqualGroup& group = plan.equal_groups[0];
  EXPECT_EQ(group.kernels, 3);
  ASSERT_EQ(group.leaves.size(), 3u);
  EXPECT_EQ(group.leaves[0].input, 2);
  EXPECT_EQ(group.leaves[1].participation, 0);
  EXPECT_EQ(group.leaves[1].index, 0);
  EXPECT_EQ(group.leaves[2].input, 1);
  ASSERT_EQ(group.results.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(plan.outputs[i].equal_group, 0);
    EXPECT_EQ(plan.outputs[i].index, static_cast<int32_t>(i));
    EXPECT_EQ(plan.outputs[i].buffer, group.results[i]);
    EXPECT_EQ(OutputSpec(plan, i).kind, Kind::kOwned);
  }
  EXPECT_EQ(plan.outputs[2].equal_group, -1) << "the collective needs it";
  // Its kernels may be left out; behind them, and behind the collective, is the barrier.
  const DevicePlan device = Slot(plan);
  EXPECT_EQ(device.num_equal_groups, 1);
  ASSERT_EQ(device.steps.size(), 6u);
  for (const size_t s : {2, 3, 4}) EXPECT_EQ(device.steps[s].equal_group, 0) << s;
  for (const size_t s : {0, 1, 5}) EXPECT_EQ(device.steps[s].equal_group, -1) << s;
  EXPECT_EQ(device.collectives[1].kind, CollectiveKind::kBarrier);
  EXPECT_EQ(device.steps[5].wait, device.steps[4].record);
  ASSERT_EQ(plan.collectives[0].size(), 2u);
  EXPECT_TRUE(plan.collectives[0][1].equal_work);
}

// Each run finds all of them again, on the node's thread: of more than it has time for, the first.
TEST(EqualWorkTest, GroupsAreSoManyThatARunFindsThemInASlice) {
  const auto graph_of = [](int leaves, int groups) {
    RankBuilder b(0, 2);
    const ValueIndex sum = b.AllReduce(b.Input(F32({10000})));
    std::vector<ValueIndex> others;
    for (int i = 1; i < leaves; ++i) others.push_back(b.Input(F32({10000})));
    for (int g = 0; g < groups; ++g) {
      std::vector<ValueIndex> factors = others;
      factors.push_back(sum);
      AddOutput(&b, b.Op("product", factors));
    }
    return b.graph().Build();
  };
  for (const auto& [leaves, groups] : {std::pair<int, int>(1, 3000), {2, 3000}, {500, 100}}) {
    const Plan plan = Compile(graph_of(leaves, groups));
    EXPECT_EQ(plan.equal_groups.size(), static_cast<size_t>(16384 / (16 + leaves))) << leaves;
    EXPECT_EQ(plan.outputs.front().equal_group, 0);
    EXPECT_EQ(plan.outputs.back().equal_group, -1);
  }
}

TEST(EqualWorkTest, GroupsOfEqualWorkAreEqualAcrossRanksAndDifferWithTheWork) {
  const auto hash = [](const Graph& graph) { return Compile(graph).equal_groups.at(0).hash; };
  EXPECT_EQ(hash(UpdateGraph(0)), hash(UpdateGraph(2)));
  EXPECT_NE(hash(UpdateGraph(0)), hash(UpdateGraph(0, "add")));
  EXPECT_NE(hash(UpdateGraph(0)), hash(UpdateGraph(0, "sub", 10001)));
}

TEST(EqualWorkTest, WhatIsNoEqualWork) {
  const Graph update = UpdateGraph(1);
  EXPECT_TRUE(Compile(UpdateGraph(1, "sub", 500)).equal_groups.empty()) << "too small";
  EXPECT_TRUE(Compile(update, /*share=*/false).equal_groups.empty()) << "devices apart";
  PlanOptions off;
  off.share_equal_work = false;
  const absl::StatusOr<Plan> alone = CompilePlan(update, off);
  ASSERT_TRUE(alone.ok());
  EXPECT_TRUE(alone->equal_groups.empty());
  EXPECT_EQ(Slot(*alone).steps.size(), 5u) << "no barrier either";
  EXPECT_EQ(alone->outputs[0].equal_group, -1);

  RankBuilder local(1, 3);
  AddOutput(&local, local.Op("neg", {local.Input(F32({100000}))}));
  AddOutput(&local, local.Op("neg", local.ApplyCollective("reduce_scatter_tensor",
                                                          {local.Input(F32({300000}))})));
  EXPECT_TRUE(Compile(local).equal_groups.empty())
      << "depends on no collective, or on one that gives each rank its own";
}

// What an output and a collective have in common is every rank's: only what follows is shared.
TEST(EqualWorkTest, EqualWorkEndsWhereSomethingElseNeedsIt) {
  RankBuilder b(1, 3);
  const ValueIndex total = b.AllReduce(b.Input(F32({10000})));
  const ValueIndex half = b.Op("neg", {total});
  AddOutput(&b, half);
  AddOutput(&b, b.Op("neg", {half}));
  AddOutput(&b, b.AllReduce(half));
  const Plan plan = Compile(b);
  ASSERT_EQ(plan.equal_groups.size(), 1u);
  EXPECT_EQ(plan.equal_groups[0].kernels, 1);
  EXPECT_EQ(plan.outputs[0].equal_group, -1);
  EXPECT_EQ(plan.outputs[1].equal_group, 0);
  EXPECT_EQ(plan.outputs[2].participation, 1);
}

}  // namespace
}  // namespace testing
}  // namespace chorus
