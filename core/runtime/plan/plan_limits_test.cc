// What a graph from a client can make a plan cost.
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "core/base/counting_heap.h"
#include "core/base/error.h"
#include "core/base/memory_account.h"
#include "core/graph/encoding.h"
#include "core/ops/testing/rank_builder.h"
#include "core/ops/validate.h"
#include "core/runtime/plan/plan.h"
#include "core/runtime/testing/hostile_graphs.h"
#include "gtest/gtest.h"

namespace chorus {
namespace testing {
namespace {

PlanOptions Limits(int64_t max_bytes) {
  PlanOptions options;
  options.limits.max_bytes = max_bytes;
  return options;
}

// As a trainer has them: layers with a gradient each, reduced, and an update.
Graph HonestGraph(int layers) {
  RankBuilder b(1, 4);
  ValueIndex x = b.Input(TensorType(DType::kF32, {32, 64}));
  ValueIndex norm = -1;
  std::vector<std::pair<ValueIndex, ValueIndex>> updates;
  for (int i = 0; i < layers; ++i) {
    const ValueIndex w = b.Input(TensorType(DType::kF32, {64, 64}));
    x = b.Op("tanh", {b.Op("matmul", {x, w})});
    const ValueIndex g = b.AllReduce(b.Op("mul", {w, w}));
    const ValueIndex square = b.Op("sum", {b.Op("mul", {g, g})});
    norm = norm < 0 ? square : b.Op("add", {norm, square});
    updates.emplace_back(w, g);
  }
  for (const auto& [w, g] : updates) {
    GraphOutput output;
    output.value = b.Op("sub", {w, b.Op("mul", {g, norm})});
    b.graph().AddOutput(output);
  }
  GraphOutput output;
  output.value = b.AllGather(x)[0];
  b.graph().AddOutput(output);
  return b.graph().Build();
}

std::vector<std::pair<std::string, Graph>> AllGraphs(int size) {
  std::vector<std::pair<std::string, Graph>> graphs;
  for (const HostileGraph kind : kHostileGraphs) {
    const absl::string_view name = NameOf(kind);
    graphs.emplace_back(std::string(name.data(), name.size()), MakeHostileGraph(kind, size));
  }
  graphs.emplace_back("honest", HonestGraph(size / 10));
  return graphs;
}

TEST(PlanLimitsTest, HostileGraphsAreGraphs) {
  for (const auto& [name, graph] : AllGraphs(100)) {
    const absl::Status valid = ValidateGraph(graph, GraphLimits());
    EXPECT_TRUE(valid.ok()) << name << ": " << valid;
    EXPECT_TRUE(CompilePlan(graph, {}).ok()) << name;
  }
}

// The count is from above: what it lets through stays below it. And for what trainers have it is
// not from far above.
TEST(PlanLimitsTest, PlanningTakesNoMoreThanItCountsBefore) {
  for (const auto& [name, graph] : AllGraphs(1000)) {
    int64_t most = 0;
    {
      const HeapUse heap;
      const absl::StatusOr<Plan> plan = CompilePlan(graph, {});
      most = heap.most_bytes();
      ASSERT_TRUE(plan.ok()) << name << ": " << plan.status();
      std::printf("%-20s %9lld bytes at most, %9lld of plan, %9lld of graph\n", name.c_str(),
                  static_cast<long long>(most), static_cast<long long>(MemoryOf(*plan)),
                  static_cast<long long>(MemoryOf(graph)));
    }
    // What is counted is said where it is too much.
    PlanOptions none = Limits(0);
    EXPECT_EQ(ErrorOf(CompilePlan(graph, none).status()).reason, Reason::kQuota) << name;
    EXPECT_EQ(ErrorOf(CompilePlan(graph, Limits(most)).status()).reason, Reason::kQuota)
        << name << ": with less than it takes";
    if (name != "honest") continue;
    EXPECT_TRUE(CompilePlan(graph, Limits(4 * most)).ok()) << name << ": counted as too much";
  }
}

TEST(PlanLimitsTest, WhatIsTooMuchIsRefusedBeforeItIsMade) {
  for (const auto& [name, graph] : AllGraphs(1000)) {
    const absl::StatusOr<Plan> plan = CompilePlan(graph, {});
    ASSERT_TRUE(plan.ok()) << name << ": " << plan.status();
    const int64_t limit = MemoryOf(*plan) / 4;
    // The tables of values are there before.
    const ValueTable values(graph);
    const int64_t tables = 24 * values.size() + 8 * static_cast<int64_t>(graph.nodes.size());
    const HeapUse heap;
    const absl::Status status = CompilePlan(graph, Limits(limit)).status();
    EXPECT_EQ(ErrorOf(status).reason, Reason::kQuota) << name << ": " << status;
    EXPECT_LE(heap.most_bytes(), limit + tables + 4096) << name;
    EXPECT_NE(std::string(status.message())
                  .find("the graph's plan: expected one that takes at most " +
                        std::to_string(limit) + " bytes of memory, got one that takes "),
              std::string::npos)
        << status;
  }
}

TEST(PlanLimitsTest, APlanTakesWhatItsAccountSays) {
  for (const auto& [name, graph] : AllGraphs(1000)) {
    const HeapUse heap;
    const absl::StatusOr<Plan> plan = CompilePlan(graph, {});
    ASSERT_TRUE(plan.ok()) << name << ": " << plan.status();
    const int64_t bytes =
        static_cast<int64_t>(sizeof(Plan)) + heap.bytes() + heap.blocks() * kBlockOverheadBytes;
    // Lists may have as much room again.
    EXPECT_LE(MemoryOf(*plan), bytes) << name;
    EXPECT_GE(2 * MemoryOf(*plan), bytes) << name;
  }
}

TEST(PlanLimitsTest, PairsOfCollectivesAreCounted) {
  const Graph graph = MakeHostileGraph(HostileGraph::kAllAfterAll, 100);
  PlanOptions options;
  options.limits.max_dependences = 100 * 100;
  EXPECT_TRUE(CompilePlan(graph, options).ok());
  options.limits.max_dependences = 100 * 100 - 1;
  const Error error = ErrorOf(CompilePlan(graph, options).status());
  EXPECT_EQ(error.reason, Reason::kQuota);
  EXPECT_EQ(error.op, "all_reduce");
  EXPECT_NE(error.message.find("which of the graph's collectives need which others: expected at "
                               "most 9999 pairs, got 10000 or more"),
            std::string::npos)
      << error.message;
}

TEST(PlanLimitsTest, StepsToFindThemAreCounted) {
  const Graph graph = MakeHostileGraph(HostileGraph::kSums, 1000);
  PlanOptions options;
  EXPECT_TRUE(CompilePlan(graph, options).ok());
  options.limits.max_dependence_steps = 100000;
  const Error error = ErrorOf(CompilePlan(graph, options).status());
  EXPECT_EQ(error.reason, Reason::kQuota);
  EXPECT_NE(error.message.find("expected at most 100000 steps to find it"), std::string::npos)
      << error.message;
}

TEST(PlanLimitsTest, EveryGraphIsPlannedWithinTheLimitsOrRefused) {
  for (const HostileGraph kind : kHostileGraphs) {
    const Graph graph = MakeHostileGraph(kind, 20000);
    const HeapUse heap;
    const absl::StatusOr<Plan> plan = CompilePlan(graph, {});
    EXPECT_LE(heap.most_bytes(), PlanLimits().max_bytes) << NameOf(kind);
    EXPECT_TRUE(plan.ok() || ErrorOf(plan.status()).reason == Reason::kQuota) << plan.status();
  }
}

}  // namespace
}  // namespace testing
}  // namespace chorus
