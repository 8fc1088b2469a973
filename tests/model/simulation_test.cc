// Many ranks, random programs, loss, delay, deaths: every run has an outcome in time, and the
// oracle finds no broken promise. --seeds=N and --first_seed=S choose the histories.
#include "tests/model/simulation.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <string>

#include "gtest/gtest.h"

namespace chorus {
namespace {

uint64_t first_seed = 1;
uint64_t seeds = 5;

TEST(SimulationTest, EveryRunHasAnOutcomeInTime) {
  std::map<std::string, int64_t> causes;
  int64_t absences = 0;
  int64_t failed_alone = 0;
  int64_t calm_steps = 0;
  int64_t postponed = 0;
  for (uint64_t seed = first_seed; seed < first_seed + seeds; ++seed) {
    const SimulationResult result = Simulate(seed, 64);
    std::cout << "seed " << seed << ": " << result.runs << " runs, " << result.published
              << " published, " << result.gangs << " gangs, " << result.epochs << " epochs, "
              << result.failed_alone << " failed alone, " << result.calm_steps << " calm steps, "
              << result.postponed << " postponed";
    for (const auto& cause : result.causes) {
      std::cout << ", " << cause.first << " " << cause.second;
      causes[cause.first] += cause.second;
    }
    std::cout << std::endl;
    ASSERT_EQ(result.fault, "") << "seed " << seed;
    EXPECT_GT(result.published, 64);
    absences += result.absences;
    failed_alone += result.failed_alone;
    calm_steps += result.calm_steps;
    postponed += result.postponed;
  }
  EXPECT_GT(postponed, 0);
  EXPECT_GT(absences, 0);
  EXPECT_GT(failed_alone, 0);
  EXPECT_GE(calm_steps, static_cast<int64_t>(2 * seeds)) << "too few steps without a fault";
  EXPECT_GE(causes.size(), 4u) << "too few kinds of faults to mean anything";
}

// Few ranks, many programs: with names by positions ranks are in line again in the step after they
// have heard of the last fault, whatever has gone wrong before, and results of no other call are
// ever taken for this one's.
TEST(SimulationTest, RanksAreInLineAgainBehindTheLastFault) {
  std::map<std::string, int64_t> causes;
  int64_t failed_alone = 0;
  int64_t calm_steps = 0;
  for (uint64_t seed = first_seed; seed < first_seed + 40 * seeds; ++seed) {
    const int ranks = 2 + static_cast<int>(seed % 4);
    const bool steps = seed % 3 != 0;
    const SimulationResult result = Simulate(seed, ranks, steps);
    ASSERT_EQ(result.fault, "") << "seed " << seed;
    for (const auto& cause : result.causes) causes[cause.first] += cause.second;
    failed_alone += result.failed_alone;
    calm_steps += result.calm_steps;
  }
  for (const auto& cause : causes) std::cout << cause.first << " " << cause.second << "\n";
  std::cout << failed_alone << " runs failed alone, " << calm_steps << " calm steps" << std::endl;
  EXPECT_GT(failed_alone, 0);
  EXPECT_GE(calm_steps, static_cast<int64_t>(40 * seeds)) << "too few steps without a fault";
}

TEST(SimulationTest, EqualSeedsGiveEqualHistories) {
  const SimulationResult a = Simulate(first_seed, 16);
  const SimulationResult b = Simulate(first_seed, 16);
  EXPECT_EQ(a.fault, "");
  EXPECT_EQ(a.runs, b.runs);
  EXPECT_EQ(a.gangs, b.gangs);
  EXPECT_EQ(a.causes, b.causes);
}

}  // namespace
}  // namespace chorus

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--seeds=", 8) == 0)
      chorus::seeds = std::strtoull(argv[i] + 8, nullptr, 10);
    if (std::strncmp(argv[i], "--first_seed=", 13) == 0) {
      chorus::first_seed = std::strtoull(argv[i] + 13, nullptr, 10);
    }
  }
  return RUN_ALL_TESTS();
}
