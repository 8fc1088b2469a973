// Random programs on logical devices of one GPU, beside the host: 500 of them, or with
// CHORUS_LONG=1 in the environment 10,000. The GPU is a stand-in's, or with CHORUS_TEST_GPU=driver
// this machine's.
#include <cstdlib>

#include "gtest/gtest.h"
#include "tests/random/suite.h"
#include "tests/random/ways.h"

namespace chorus {
namespace random_programs {
namespace {

constexpr int kCases = 4;

class RandomProgramsOnAGpu : public ::testing::TestWithParam<int> {};

TEST_P(RandomProgramsOnAGpu, AreRightAndTheSameInAllWays) {
  SuiteOptions options;
  options.ways = WaysNamed("cuda");
  options.programs = std::getenv("CHORUS_LONG") != nullptr ? 10000 : 500;
  options.cases = kCases;
  TestPrograms(options, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Some, RandomProgramsOnAGpu, ::testing::Range(0, kCases));

}  // namespace
}  // namespace random_programs
}  // namespace chorus
