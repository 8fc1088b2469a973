// Random programs in all ways: 300 of them, or with CHORUS_LONG=1 in the environment 20,000. Bazel
// deals the cases to its shards. Seeds count on from a fixed one; CHORUS_TEST_SEED sets another.
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <string>

#include "absl/strings/numbers.h"
#include "gtest/gtest.h"
#include "tests/random/generate.h"
#include "tests/random/search.h"
#include "tests/random/ways.h"

namespace chorus {
namespace random_programs {
namespace {

constexpr uint64_t kFirstSeed = 1;
constexpr int kCases = 12;
constexpr int kMostFailures = 3;  // of a case

int Programs() { return std::getenv("CHORUS_LONG") != nullptr ? 20000 : 300; }

uint64_t FirstSeed() {
  uint64_t seed = kFirstSeed;
  const char* const given = std::getenv("CHORUS_TEST_SEED");
  if (given != nullptr) {
    EXPECT_TRUE(absl::SimpleAtoi(given, &seed)) << "CHORUS_TEST_SEED";
  }
  return seed;
}

class RandomPrograms : public ::testing::TestWithParam<int> {};

TEST_P(RandomPrograms, AreRightAndTheSameInAllWays) {
  const int each = (Programs() + kCases - 1) / kCases;
  const int begin = GetParam() * each;
  const int end = std::min(Programs(), begin + each);
  RunnerOptions options;
  options.seed = FirstSeed();
  options.patience = std::chrono::seconds(60);
  options.trainer = "tests/random/random_programs";
  options.daemon = "server/chorusd";
  Runner runner(options);
  Counts counts;
  int failures = 0;
  for (int i = begin; i < end && failures < kMostFailures; ++i) {
    const Program program = Generate(FirstSeed() + static_cast<uint64_t>(i));
    const Finding finding = random_programs::Test(program, AllWays(), &runner, &counts);
    if (!finding.found()) continue;
    ++failures;
    const Program least = Shrink(program, finding, &runner, 100);
    ADD_FAILURE() << "seed " << program.seed << " in " << finding.way << ": " << finding.text
                  << "\nsmaller:\n"
                  << Lines(least)
                  << "\nagain: bazel run //tests/random:random_programs -- --seed=" << program.seed
                  << " --ways=" << finding.way;
  }
  std::cout << "seeds " << FirstSeed() + static_cast<uint64_t>(begin) << " to "
            << FirstSeed() + static_cast<uint64_t>(end) - 1 << ": " << CountsText(counts)
            << std::endl;
  EXPECT_GT(counts.numbers, 0);
}

INSTANTIATE_TEST_SUITE_P(Some, RandomPrograms, ::testing::Range(0, kCases));

}  // namespace
}  // namespace random_programs
}  // namespace chorus
