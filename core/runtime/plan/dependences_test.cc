#include "core/runtime/plan/dependences.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/runtime/testing/hostile_graphs.h"
#include "gtest/gtest.h"

namespace chorus::planning {
namespace {

struct Found {
  std::vector<std::vector<int32_t>> after;  // by participation
  int64_t work = 0;
  absl::Status status;
};

Found Find(const Graph& graph, int64_t max_work = std::numeric_limits<int64_t>::max()) {
  Found found;
  const ValueTable values(graph);
  Dependences dependences(graph, values, max_work);
  std::vector<Participation> participations;
  for (int32_t n = 0; n < static_cast<int32_t>(graph.nodes.size()); ++n) {
    if (!dependences.IsNeeded(n)) continue;
    absl::StatusOr<Dependences::Set> set = dependences.Take(n, participations);
    found.status = set.status();
    found.work = dependences.work();
    if (!set.ok()) return found;
    if (!graph.nodes[static_cast<size_t>(n)].collective.has_value()) {
      dependences.Give(n, *std::move(set));
      continue;
    }
    dependences.GiveOwn(n, static_cast<int32_t>(participations.size()));
    participations.emplace_back();
    if (*set != nullptr) participations.back().after.assign((*set)->begin(), (*set)->end());
    found.after.push_back(participations.back().after);
  }
  return found;
}

// As it is defined, one node after the other, without sharing anything.
std::vector<std::vector<int32_t>> FindSlowly(const Graph& graph) {
  std::vector<std::vector<int32_t>> after;
  std::vector<std::set<int32_t>> of_value(graph.inputs.size());
  for (const Node& node : graph.nodes) {
    std::set<int32_t> all;
    for (const ValueIndex v : node.inputs) {
      const std::set<int32_t>& set = of_value[static_cast<size_t>(v)];
      all.insert(set.begin(), set.end());
    }
    if (all.size() <= 16) {
      std::set<int32_t> implied;
      for (const int32_t y : all) {
        implied.insert(after[static_cast<size_t>(y)].begin(), after[static_cast<size_t>(y)].end());
      }
      for (const int32_t x : implied) all.erase(x);
    }
    if (node.collective.has_value()) {
      after.emplace_back(all.begin(), all.end());
      all = {static_cast<int32_t>(after.size()) - 1};
    }
    of_value.insert(of_value.end(), node.outputs.size(), all);
  }
  return after;
}

TEST(DependencesTest, AreThoseOfTheDefinition) {
  const uint32_t seed = std::random_device()();
  RecordProperty("seed", static_cast<int>(seed));
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 300; ++round) {
    Graph graph;
    graph.inputs.resize(2);
    int32_t values = 2;
    const int nodes = 1 + static_cast<int>(random() % 150);
    // Few collectives give long local chains, few near inputs long sets.
    const uint32_t collectives = 2 + random() % 6;
    const int32_t reach = 1 + static_cast<int32_t>(random() % 60);
    for (int n = 0; n < nodes; ++n) {
      Node node;
      for (uint32_t i = random() % 4; i > 0; --i) {
        const int32_t back = 1 + static_cast<int32_t>(random() % 60) % reach;
        node.inputs.push_back(std::max(values - back, 0));
      }
      if (random() % collectives == 0) node.collective = Collective();
      node.outputs.resize(random() % 3);
      values += static_cast<int32_t>(node.outputs.size());
      graph.nodes.push_back(node);
    }
    const Found found = Find(graph);
    ASSERT_TRUE(found.status.ok()) << found.status;
    ASSERT_EQ(found.after, FindSlowly(graph)) << "round " << round << "\n" << DebugString(graph);
  }
}

// Steps, not time: what is linear takes ten times as many for ten times the graph.
TEST(DependencesTest, LongSumsTakeAsManyStepsAsTheyAreLong) {
  using testing::HostileGraph;
  for (const HostileGraph kind : {HostileGraph::kSumFromTheEnd, HostileGraph::kUnneededSums,
                                  HostileGraph::kManyPieces, HostileGraph::kOutputsOfAChain}) {
    const Found small = Find(testing::MakeHostileGraph(kind, 500));
    const Found large = Find(testing::MakeHostileGraph(kind, 5000));
    EXPECT_TRUE(small.status.ok()) << small.status;
    EXPECT_TRUE(large.status.ok()) << large.status;
    EXPECT_LE(large.work, 3 * 5000) << testing::NameOf(kind);
    EXPECT_LE(large.work, 10 * small.work + 100) << testing::NameOf(kind);
  }
}

TEST(DependencesTest, EndsWhereItWouldBeTooMuch) {
  using testing::HostileGraph;
  const Graph graph = testing::MakeHostileGraph(HostileGraph::kSums, 2000);
  const int64_t all = Find(graph).work;
  EXPECT_GT(all, 2000 * 2000 / 2);
  EXPECT_TRUE(Find(graph, all).status.ok());
  const Found found = Find(graph, 10000);
  EXPECT_EQ(ErrorOf(found.status).reason, Reason::kQuota) << found.status;
  EXPECT_LE(found.work, 10000 + 2000) << "the last set that was not made";
  EXPECT_EQ(ErrorOf(Find(graph, all - 1).status).message,
            "which of the graph's collectives need which others: expected at most " +
                std::to_string(all - 1) + " steps to find it, got " + std::to_string(all) +
                " or more");
}

}  // namespace
}  // namespace chorus::planning
