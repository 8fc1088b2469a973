#include "tests/random/suite.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <iostream>

#include "absl/strings/numbers.h"
#include "gtest/gtest.h"
#include "tests/random/generate.h"
#include "tests/random/search.h"

namespace chorus {
namespace random_programs {
namespace {

constexpr uint64_t kFirstSeed = 1;
constexpr int kMostFailures = 3;  // of a case

uint64_t FirstSeed() {
  uint64_t seed = kFirstSeed;
  const char* const given = std::getenv("CHORUS_TEST_SEED");
  if (given != nullptr) {
    EXPECT_TRUE(absl::SimpleAtoi(given, &seed)) << "CHORUS_TEST_SEED";
  }
  return seed;
}

}  // namespace

void TestPrograms(const SuiteOptions& options, int which) {
  const int each = (options.programs + options.cases - 1) / options.cases;
  const int begin = which * each;
  const int end = std::min(options.programs, begin + each);
  RunnerOptions runs;
  runs.seed = FirstSeed();
  runs.patience = std::chrono::seconds(60);
  runs.trainer = "tests/random/random_programs";
  runs.daemon = "server/chorusd";
  Runner runner(runs);
  Counts counts;
  int failures = 0;
  for (int i = begin; i < end && failures < kMostFailures; ++i) {
    const Program program = Generate(FirstSeed() + static_cast<uint64_t>(i));
    const Finding finding = random_programs::Test(program, options.ways, &runner, &counts);
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
  EXPECT_GT(counts.numbers, 20 * counts.unknown);
}

}  // namespace random_programs
}  // namespace chorus
