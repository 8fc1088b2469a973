#include "core/collective/order.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <utility>

#include "gtest/gtest.h"

namespace chorus {
namespace {

TEST(TopologicalOrderTest, TakesTheLeastRankAmongTheFree) {
  std::vector<int32_t> order;
  ASSERT_TRUE(TopologicalOrder({3, 1, 2}, {}, &order));
  EXPECT_EQ(order, (std::vector<int32_t>{1, 2, 0}));
  ASSERT_TRUE(TopologicalOrder({3, 1, 2}, {{0, 1}}, &order));
  EXPECT_EQ(order, (std::vector<int32_t>{2, 0, 1}));
}

TEST(TopologicalOrderTest, AnElementThatWaitsForItselfIsACircle) {
  std::vector<int32_t> order;
  EXPECT_FALSE(TopologicalOrder({0, 1}, {{1, 1}}, &order));
  EXPECT_EQ(order, (std::vector<int32_t>{1}));
}

TEST(TopologicalOrderTest, RandomGraphsAreOrderedOrShowARealCircle) {
  const unsigned seed = 20261;
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  int circles = 0;
  for (int round = 0; round < 2000; ++round) {
    const int32_t n = 1 + random() % 9;
    std::vector<int32_t> rank(n);
    std::iota(rank.begin(), rank.end(), 0);
    std::shuffle(rank.begin(), rank.end(), random);
    std::vector<OrderEdge> edges;
    std::set<std::pair<int32_t, int32_t>> known;
    for (int32_t e = random() % (2 * n); e > 0; --e) {
      edges.push_back({static_cast<int32_t>(random() % n), static_cast<int32_t>(random() % n)});
      known.emplace(edges.back().before, edges.back().after);
    }
    std::vector<int32_t> order;
    if (TopologicalOrder(rank, edges, &order)) {
      std::vector<int32_t> position(n, -1);
      ASSERT_EQ(order.size(), static_cast<size_t>(n));
      for (int32_t i = 0; i < n; ++i) position[order[i]] = i;
      for (const OrderEdge& edge : edges) EXPECT_LT(position[edge.before], position[edge.after]);
    } else {
      ++circles;
      ASSERT_FALSE(order.empty());
      for (size_t i = 0; i < order.size(); ++i) {
        EXPECT_TRUE(known.count({order[i], order[(i + 1) % order.size()]}));
      }
    }
  }
  EXPECT_GT(circles, 200);
  EXPECT_LT(circles, 1800);
}

TEST(FindStuckTest, NamesWhoNeverGetsThrough) {
  EXPECT_EQ(FindStuck({}), -1);
  EXPECT_EQ(FindStuck({{}, {0}, {0}}), -1);
  EXPECT_EQ(FindStuck({{0, 1}, {0, 1}}), -1);
  EXPECT_EQ(FindStuck({{2}, {0, 1}, {1, 0}, {2}}), 1);
  // Of three, each waits for the next.
  EXPECT_EQ(FindStuck({{0, 1}, {1, 2}, {2, 0}}), 0);
  EXPECT_EQ(FindStuck({{0, 1}, {1, 2}, {0, 2}}), -1);
}

// Calls that follow one order get through, and two that are exchanged do not.
TEST(FindStuckTest, OneOrderIsEnough) {
  const unsigned seed = 20262;
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 500; ++round) {
    std::vector<std::vector<int32_t>> calls(2 + random() % 4);
    const auto meetings = static_cast<int32_t>(random() % 20);
    for (int32_t m = 0; m < meetings; ++m) {
      for (std::vector<int32_t>& own : calls) {
        if (random() % 2 == 0) own.push_back(m);
      }
    }
    ASSERT_EQ(FindStuck(calls), -1);
    calls[0].insert(calls[0].end(), {meetings, meetings + 1});
    calls[1].insert(calls[1].end(), {meetings + 1, meetings});
    EXPECT_EQ(FindStuck(calls), 0);
  }
}

}  // namespace
}  // namespace chorus
