#include "benchmarks/stats.h"

#include <algorithm>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace chorus {
namespace bench {
namespace {

std::vector<double> OneTo(int n) {
  std::vector<double> samples;
  for (int i = 1; i <= n; ++i) samples.push_back(i);
  std::mt19937 random(7);
  std::shuffle(samples.begin(), samples.end(), random);
  return samples;
}

TEST(StatsTest, PercentilesAreSamplesByNearestRank) {
  std::vector<double> samples = OneTo(200);
  EXPECT_EQ(Percentile(&samples, 0.5), 100);
  EXPECT_EQ(Percentile(&samples, 0.99), 198);
  EXPECT_EQ(Percentile(&samples, 1.0), 200);
  EXPECT_EQ(Percentile(&samples, 0.0001), 1);
  samples = OneTo(3);
  EXPECT_EQ(Percentile(&samples, 0.5), 2);
  EXPECT_EQ(Percentile(&samples, 0.99), 3);
  samples = {42};
  EXPECT_EQ(Percentile(&samples, 0.5), 42);
}

TEST(StatsTest, ARoundKnowsItsEnds) {
  const RoundStats stats = StatsOf(OneTo(1000));
  EXPECT_EQ(stats.count, 1000);
  EXPECT_EQ(stats.min, 1);
  EXPECT_EQ(stats.p50, 500);
  EXPECT_EQ(stats.p99, 990);
  EXPECT_EQ(stats.max, 1000);
  EXPECT_EQ(StatsOf({}).count, 0);
}

TEST(StatsTest, OneDisturbedRoundMovesTheSpreadAlone) {
  std::vector<RoundStats> rounds(5);
  for (int i = 0; i < 5; ++i) {
    rounds[i].p50 = 10 + i;
    rounds[i].p99 = 20 + i;
  }
  rounds[1].p50 = 1e9;
  rounds[1].p99 = 1e9;
  const Summary summary = Summarize(rounds);
  EXPECT_EQ(summary.p50, 13);
  EXPECT_EQ(summary.p99, 23);
  EXPECT_EQ(summary.p50_least, 10);
  EXPECT_EQ(summary.p50_most, 1e9);
  EXPECT_EQ(summary.rounds.size(), 5u);
}

}  // namespace
}  // namespace bench
}  // namespace chorus
