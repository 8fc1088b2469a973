// Random programs in all ways but those on a GPU: 300 of them, or with CHORUS_LONG=1 in the
// environment 20,000. Bazel deals the cases to its shards.
#include <algorithm>
#include <cstdlib>
#include <iterator>

#include "gtest/gtest.h"
#include "tests/random/suite.h"
#include "tests/random/ways.h"

namespace chorus {
namespace random_programs {
namespace {

constexpr int kCases = 12;

class RandomPrograms : public ::testing::TestWithParam<int> {};

TEST_P(RandomPrograms, AreRightAndTheSameInAllWays) {
  SuiteOptions options;
  std::copy_if(AllWays().begin(), AllWays().end(), std::back_inserter(options.ways),
               [](const Way& way) { return way.host_bits; });
  options.programs = std::getenv("CHORUS_LONG") != nullptr ? 20000 : 300;
  options.cases = kCases;
  TestPrograms(options, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Some, RandomPrograms, ::testing::Range(0, kCases));

}  // namespace
}  // namespace random_programs
}  // namespace chorus
