// Random programs as cases of a test, for a test of each set of ways.
#ifndef CHORUS_TESTS_RANDOM_SUITE_H_
#define CHORUS_TESTS_RANDOM_SUITE_H_

#include <vector>

#include "tests/random/ways.h"

namespace chorus {
namespace random_programs {

struct SuiteOptions {
  std::vector<Way> ways;
  int programs = 0;
  int cases = 1;  // among which these are dealt
};

// Runs the programs of one case in all ways. A failure of the test for each that goes wrong, as
// small as it gets, with the command that runs it again. Seeds count on from 1, or from
// CHORUS_TEST_SEED in the environment, and are printed.
void TestPrograms(const SuiteOptions& options, int which);

}  // namespace random_programs
}  // namespace chorus

#endif  // CHORUS_TESTS_RANDOM_SUITE_H_
