// What the walk itself does; the ops' own rules are tested in their folders.

#include "core/autograd/backward.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/ops/testing/evaluator.h"
#include "core/ops/testing/rank_builder.h"
#include "core/ops/testing/value.h"
#include "core/ops/validate.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::MakeValue;
using testing::RankBuilder;
using testing::Session;
using testing::Value;
using Ints = std::vector<int64_t>;

const TensorType kX(DType::kF64, {2});

std::vector<std::string> OpsAfter(const GraphBuilder& graph, size_t first) {
  std::vector<std::string> ops;
  for (size_t i = first; i < graph.nodes().size(); ++i) ops.push_back(graph.nodes()[i].spec.op);
  return ops;
}

std::vector<int32_t> Nodes(const BackwardResult& result) {
  std::vector<int32_t> nodes;
  for (const BackwardResult::Visited& visited : result.visited) nodes.push_back(visited.node);
  return nodes;
}

std::vector<double> Only(const std::vector<std::vector<Value>>& results, int session,
                         ValueIndex value) {
  return testing::ToDoubles(results[session][value]);
}

TEST(BackwardTest, ThirdDerivativeOfSine) {
  RankBuilder b;
  const ValueIndex x = b.Input(kX);
  const ValueIndex one = b.Input(kX);
  ValueIndex y = b.Op("sin", {x});
  for (int order = 0; order < 3; ++order) {
    const auto result = AppendBackward({BackwardRoot::Value(y, one)}, {x}, &b.graph());
    ASSERT_TRUE(result.ok()) << result.status();
    y = *result->gradients[0];
  }
  const Graph graph = b.graph().Build();
  const Session session = {
      &graph,
      {MakeValue<double>(Ints{2}, {0.3, -1.1}), MakeValue<double>(Ints{2}, {1, 1})},
      {0},
      {}};
  const auto results = testing::Evaluate({session});
  ASSERT_TRUE(results.ok()) << results.status();
  const std::vector<double> third = Only(*results, 0, b.graph().FinalIndex(y));
  EXPECT_NEAR(third[0], -std::cos(0.3), 1e-12);
  EXPECT_NEAR(third[1], -std::cos(-1.1), 1e-12);
}

TEST(BackwardTest, VisitsOnlyWhatLiesBetweenRootsAndWanted) {
  RankBuilder b;
  const ValueIndex x = b.Input(kX);
  const ValueIndex constant = b.Input(kX);
  const ValueIndex seed = b.Input(kX);
  const ValueIndex s = b.Op("sin", {constant});  // 0: no wanted value before it
  const ValueIndex y = b.Op("mul", {x, s});      // 1
  b.Op("cos", {y});                              // 2: no root behind it
  const auto result = AppendBackward({BackwardRoot::Value(y, seed)}, {x, constant}, &b.graph());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(Nodes(*result), (std::vector<int32_t>{1, 0}));

  const size_t before = b.graph().nodes().size();
  const auto only_x = AppendBackward({BackwardRoot::Value(y, seed)}, {x}, &b.graph());
  ASSERT_TRUE(only_x.ok()) << only_x.status();
  EXPECT_EQ(Nodes(*only_x), (std::vector<int32_t>{1}));
  EXPECT_EQ(OpsAfter(b.graph(), before), (std::vector<std::string>{"mul"}));
}

TEST(BackwardTest, WhatTheRootsDoNotDependOnHasNoGradient) {
  RankBuilder b;
  const ValueIndex x = b.Input(kX);
  const ValueIndex other = b.Input(kX);
  const ValueIndex seed = b.Input(kX);
  const ValueIndex y = b.Op("neg", {x});
  const auto result = AppendBackward({BackwardRoot::Value(y, seed)}, {other, y, x}, &b.graph());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_FALSE(result->gradients[0].has_value());
  EXPECT_EQ(result->gradients[1], absl::optional<ValueIndex>(seed));
  EXPECT_TRUE(result->gradients[2].has_value());
}

TEST(BackwardTest, TwoRootsOnOneValueAdd) {
  RankBuilder b;
  const ValueIndex x = b.Input(kX);
  const ValueIndex u = b.Input(kX);
  const ValueIndex v = b.Input(kX);
  const auto result =
      AppendBackward({BackwardRoot::Value(x, u), BackwardRoot::Value(x, v)}, {x}, &b.graph());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(OpsAfter(b.graph(), 0), (std::vector<std::string>{"add"}));
}

// Other ranks wait for every collective's gradient, also where this rank uses nothing of it.
TEST(BackwardTest, ReachedCollectivesTakePartEvenWithoutAUseOfTheirGradient) {
  RankBuilder b(0, 3);
  const ValueIndex constant = b.Input(kX);
  const ValueIndex x = b.Input(kX);
  const ValueIndex seed = b.Input(kX);
  const ValueIndex y = b.AllReduce(constant);
  const ValueIndex z = b.Op("mul", {b.Op("sin", {y}), x});
  const size_t before = b.graph().nodes().size();
  const auto result = AppendBackward({BackwardRoot::Value(z, seed)}, {x}, &b.graph());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(OpsAfter(b.graph(), before),
            (std::vector<std::string>{"mul", "mul", "cos", "mul", "all_reduce"}));
}

TEST(BackwardTest, UnusedOutputsOfACollectiveCountAsZeros) {
  RankBuilder b(1, 3);
  const ValueIndex x = b.Input(kX);
  const ValueIndex seed = b.Input(kX);
  const std::vector<ValueIndex> parts = b.AllGather(x);
  const size_t before = b.graph().nodes().size();
  const auto result = AppendBackward({BackwardRoot::Value(parts[2], seed)}, {x}, &b.graph());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(OpsAfter(b.graph(), before),
            (std::vector<std::string>{"fill", "fill", "reduce_scatter"}));
}

TEST(BackwardTest, CollectivesComeInReverseOrderBoundToTheirForward) {
  RankBuilder b(0, 2);
  const ValueIndex x = b.Input(kX);
  const ValueIndex seed = b.Input(kX);
  const ValueIndex a = b.AllReduce(x);                                 // node 0
  const ValueIndex c = b.Broadcast(a, kX, 0);                          // node 1
  b.Send(b.Op("mul", {a, c}), 1, 7);                                   // nodes 2, 3
  const ValueIndex r = b.Recv(kX, 1, 9);                               // node 4
  const std::vector<ValueIndex> d = b.Reduce(b.Op("add", {r, c}), 0);  // nodes 5, 6
  const auto result = AppendBackward(
      {BackwardRoot::Value(d[0], seed), BackwardRoot::AbsentResult(3)}, {x}, &b.graph());
  ASSERT_TRUE(result.ok()) << result.status();
  std::vector<std::string> seen;
  for (size_t i = 7; i < b.graph().nodes().size(); ++i) {
    const NodeSpec& spec = b.graph().nodes()[i].spec;
    if (!spec.collective.has_value()) continue;
    const Collective& k = *spec.collective;
    EXPECT_EQ(k.instance.kind, InstanceRef::Kind::kGradient);
    EXPECT_EQ(k.instance.request, 0);
    EXPECT_TRUE(k.wants_grad);
    const Collective& forward = *b.graph().nodes()[k.instance.node].spec.collective;
    EXPECT_EQ(k.peer, forward.peer);
    EXPECT_EQ(k.tag, forward.tag);
    EXPECT_EQ(k.root, forward.root);
    seen.push_back(spec.op + " of " + std::to_string(k.instance.node));
  }
  EXPECT_EQ(seen, (std::vector<std::string>{"broadcast of 6", "send of 4", "recv of 3",
                                            "reduce of 1", "all_reduce of 0"}));
  EXPECT_TRUE(ValidateGraph(b.graph().Build(), GraphLimits()).ok());

  // Asked again, each is the second request of its forward instance.
  const size_t before = b.graph().nodes().size();
  ASSERT_TRUE(AppendBackward({BackwardRoot::Value(a, seed)}, {x}, &b.graph()).ok());
  EXPECT_EQ(b.graph().nodes()[before].spec.collective->instance.node, 0);
  EXPECT_EQ(b.graph().nodes()[before].spec.collective->instance.request, 1);
}

// Other ranks' losses may have their way through a collective to which no gradient comes here.
TEST(BackwardTest, CollectivesOfTheHistoryTakePartWithoutAGradient) {
  RankBuilder b(0, 2);
  const ValueIndex x = b.Input(kX);
  const ValueIndex seed = b.Input(kX);
  const ValueIndex scaled = b.Op("mul", {x, x});          // 0
  const ValueIndex a = b.AllReduce(scaled);               // 1
  b.AllReduce(x);                                         // 2: no root behind it
  const ValueIndex s = b.Op("sign", {a});                 // 3: has no gradient
  const ValueIndex c = b.AllReduce(b.Op("mul", {s, x}));  // 4, 5
  const auto result = AppendBackward({BackwardRoot::Value(c, seed)}, {x}, &b.graph());
  ASSERT_TRUE(result.ok()) << result.status();
  std::vector<std::string> seen;
  for (const BackwardResult::Visited& visited : result->visited) {
    seen.push_back(std::to_string(visited.node) + (visited.reached ? " reached" : " with zeros"));
  }
  // What came to node 0 is what others gave to node 1.
  EXPECT_EQ(seen, (std::vector<std::string>{"5 reached", "4 reached", "3 reached", "1 with zeros",
                                            "0 with zeros"}));
  std::vector<int32_t> forward;
  for (size_t i = 6; i < b.graph().nodes().size(); ++i) {
    const NodeSpec& spec = b.graph().nodes()[i].spec;
    if (spec.collective.has_value()) forward.push_back(spec.collective->instance.node);
  }
  EXPECT_EQ(forward, (std::vector<int32_t>{5, 1}));
  EXPECT_TRUE(ValidateGraph(b.graph().Build(), GraphLimits()).ok());
}

// A rank that never asks for its gradient counts as zeros; the others' losses keep theirs.
TEST(BackwardTest, AnAbandonedGradientCountsAsZeros) {
  constexpr int32_t kRanks = 3;
  std::vector<Graph> graphs;
  std::vector<Session> sessions;
  std::vector<ValueIndex> gradients;
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    RankBuilder b(rank, kRanks);
    const ValueIndex x = b.Input(kX);
    const ValueIndex seed = b.Input(kX);
    const ValueIndex y = b.AllReduce(x);
    if (rank != 1) {
      const auto result = AppendBackward({BackwardRoot::Value(y, seed)}, {x}, &b.graph());
      ASSERT_TRUE(result.ok()) << result.status();
      gradients.push_back(b.graph().FinalIndex(*result->gradients[0]));
    }
    graphs.push_back(b.graph().Build());
  }
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    const double r = rank + 1;
    sessions.push_back(
        Session{&graphs[rank],
                {MakeValue<double>(Ints{2}, {r, r}), MakeValue<double>(Ints{2}, {10 * r, 100 * r})},
                {0},
                {}});
  }
  const auto results = testing::Evaluate(sessions);
  ASSERT_TRUE(results.ok()) << results.status();
  EXPECT_EQ(Only(*results, 0, gradients[0]), (std::vector<double>{40, 400}));
  EXPECT_EQ(Only(*results, 2, gradients[1]), (std::vector<double>{40, 400}));
}

// One session with two devices and two members of the group, each with its own node; the other
// member is a session of its own.
TEST(BackwardTest, OneSessionMayHoldSeveralMembers) {
  GroupSlot two;
  two.size = 3;
  two.held = {GroupRank(0), GroupRank(2)};
  two.device_slots = {0, 1};
  GraphBuilder both(2, {two});
  GraphInput input;
  input.type = kX;
  const ValueIndex x = both.AddInput(input);
  const ValueIndex seed = both.AddInput(input);
  const auto emit = [&](const std::string& op, std::vector<ValueIndex> inputs, int32_t device,
                        int32_t member) {
    NodeSpec spec;
    spec.op = op;
    spec.inputs = std::move(inputs);
    spec.device_slot = device;
    if (member >= 0) {
      spec.collective.emplace();
      spec.collective->kind = CollectiveKind::kAllReduce;
      spec.collective->rank = GroupRank(member);
      spec.collective->reduction = Reduction::kSum;
      spec.collective->wants_grad = true;
    }
    const auto outputs = both.Emit(spec);
    EXPECT_TRUE(outputs.ok()) << outputs.status();
    return (*outputs)[0];
  };
  const ValueIndex there = emit("copy", {x}, 1, -1);
  const ValueIndex doubled = emit("add", {there, there}, 1, -1);
  const ValueIndex y0 = emit("all_reduce", {x}, 0, 0);
  const ValueIndex y2 = emit("all_reduce", {doubled}, 1, 2);
  const ValueIndex back = emit("copy", {y2}, 0, -1);
  const auto result =
      AppendBackward({BackwardRoot::Value(y0, seed), BackwardRoot::Value(back, seed)}, {x}, &both);
  ASSERT_TRUE(result.ok()) << result.status();
  const Graph first = both.Build();
  const absl::Status valid = ValidateGraph(first, GraphLimits());
  EXPECT_TRUE(valid.ok()) << valid << "\n" << DebugString(first);

  RankBuilder b(1, 3);
  const ValueIndex other_x = b.Input(kX);
  const ValueIndex other_seed = b.Input(kX);
  const ValueIndex y1 = b.AllReduce(other_x);
  const auto other = AppendBackward({BackwardRoot::Value(y1, other_seed)}, {other_x}, &b.graph());
  ASSERT_TRUE(other.ok()) << other.status();
  const Graph second = b.graph().Build();

  const Value ones = MakeValue<double>(Ints{2}, {1, 1});
  const Value tens = MakeValue<double>(Ints{2}, {10, 20});
  const auto results = testing::Evaluate(
      {Session{&first, {tens, ones}, {5}, {}}, Session{&second, {ones, ones}, {5}, {}}});
  ASSERT_TRUE(results.ok()) << results.status();
  // y = x + 2 x + x' on each of three members, each with the gradient 1.
  EXPECT_EQ(Only(*results, 0, both.FinalIndex(y0)), (std::vector<double>{31, 61}));
  EXPECT_EQ(Only(*results, 0, both.FinalIndex(*result->gradients[0])), (std::vector<double>{9, 9}));
  EXPECT_EQ(Only(*results, 1, b.graph().FinalIndex(*other->gradients[0])),
            (std::vector<double>{3, 3}));
}

// Rows of two in a grid of four: the gradient of a row's sum stays in the row.
TEST(BackwardTest, AGraphMayUseTwoGroups) {
  constexpr int32_t kRanks = 4;
  std::vector<Graph> graphs;
  std::vector<Session> sessions;
  std::vector<ValueIndex> gradients;
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    RankBuilder b(rank, kRanks);
    GroupSlot row;
    row.size = 2;
    row.held = {GroupRank(rank % 2)};
    row.device_slots = {0};
    const int32_t row_slot = b.graph().AddGroupSlot(row);
    const ValueIndex x = b.Input(kX);
    const ValueIndex seed = b.Input(kX);
    Collective in_row = b.MakeCollective(CollectiveKind::kAllReduce);
    in_row.group_slot = row_slot;
    in_row.rank = GroupRank(rank % 2);
    const ValueIndex row_sum = b.Emit(in_row, {x})[0];
    const ValueIndex y = b.AllReduce(b.Op("mul", {row_sum, row_sum}));
    const auto result = AppendBackward({BackwardRoot::Value(y, seed)}, {x}, &b.graph());
    ASSERT_TRUE(result.ok()) << result.status();
    gradients.push_back(b.graph().FinalIndex(*result->gradients[0]));
    graphs.push_back(b.graph().Build());
    const absl::Status valid = ValidateGraph(graphs.back(), GraphLimits());
    EXPECT_TRUE(valid.ok()) << valid;
  }
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    const double r = rank + 1;
    sessions.push_back(
        Session{&graphs[rank],
                {MakeValue<double>(Ints{2}, {r, 10 * r}), MakeValue<double>(Ints{2}, {1, 1})},
                {0, 1 + rank / 2},
                {}});
  }
  const auto results = testing::Evaluate(sessions);
  ASSERT_TRUE(results.ok()) << results.status();
  // L = 4 sum over ranks of s_row^2, twice for each row: dL/dx = 4 * 2 * 2 s_row.
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    const double s = rank < 2 ? 3 : 7;
    EXPECT_EQ(Only(*results, rank, gradients[rank]), (std::vector<double>{16 * s, 160 * s}));
  }
}

TEST(BackwardTest, RefusesWhatHasNoGradient) {
  RankBuilder b(0, 2);
  const TensorType i64(DType::kI64, {2});
  const ValueIndex x = b.Input(kX);
  const ValueIndex seed = b.Input(kX);
  const ValueIndex wide = b.Input(TensorType(DType::kF64, {3}));
  const ValueIndex whole = b.Input(i64);
  Collective quiet = b.MakeCollective(CollectiveKind::kAllReduce);
  quiet.wants_grad = false;
  const ValueIndex y = b.Emit(quiet, {x})[0];
  const ValueIndex constant = b.Emit(quiet, {seed})[0];
  b.Send(whole, 1);

  const auto text = [&](const BackwardRoot& root, ValueIndex wanted) {
    const auto result = AppendBackward({root}, {wanted}, &b.graph());
    if (result.ok()) return std::string("OK");
    const Error error = ErrorOf(result.status());
    return absl::StrCat(absl::StatusCodeToString(error.code), ": ", error.message);
  };
  EXPECT_EQ(text(BackwardRoot::Value(y, seed), x),
            "FAILED_PRECONDITION: backward: all_reduce was recorded without a gradient");
  EXPECT_EQ(text(BackwardRoot::Value(constant, seed), x), "OK");
  EXPECT_EQ(
      text(BackwardRoot::Value(x, wide), x),
      "INVALID_ARGUMENT: backward: the gradient of a root of type f64[2] must have that type, "
      "got f64[3]");
  EXPECT_EQ(text(BackwardRoot::Value(whole, whole), x),
            "INVALID_ARGUMENT: backward: a root must be floating point, got i64[2]");
  EXPECT_EQ(text(BackwardRoot::AbsentResult(2), x),
            "INVALID_ARGUMENT: backward: a root must be floating point, got i64[2]");
  EXPECT_EQ(text(BackwardRoot::Value(x, seed), whole),
            "INVALID_ARGUMENT: backward: only floating-point values have a gradient, got i64[2]");
  EXPECT_EQ(text(BackwardRoot::AbsentResult(99), x),
            "INVALID_ARGUMENT: backward: root node 99 is none of the 3 recorded");
}

}  // namespace
}  // namespace chorus
