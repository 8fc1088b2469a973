// What every transport on every backend must do, as one suite of tests.
//
// A transport's test instantiates it in a few lines:
//   INSTANTIATE_TEST_SUITE_P(Direct, Conformance,
//                            ValuesIn(OnEveryBackend(DirectCluster)),
//                            ConformanceName);
// and links the library "suite". Ranks are threads of the test's process, each with a session of
// its own unless a test says otherwise.
//
// Expected values come from naive loops over whole numbers, so they are exact; gradients of
// compositions from the naive evaluator and, in it, from finite differences. Seeds are printed;
// CHORUS_TEST_SEED sets one. Every wait has a deadline.
#ifndef CHORUS_TESTS_CONFORMANCE_CONFORMANCE_H_
#define CHORUS_TESTS_CONFORMANCE_CONFORMANCE_H_

#include <cstddef>
#include <cstdlib>
#include <ostream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/conformance/cluster.h"

namespace chorus {
namespace conformance {

struct ConformanceParam {
  // How much of a matrix (collective x ranks x size x dtype x eager or compiled) is tried.
  enum Cover { kEverything, kEveryPair };

  std::string name;
  OpenCluster open;
  Cover cover = std::getenv("CHORUS_LONG") != nullptr ? kEverything : kEveryPair;
  // So many devices, in their order, do once and keep once what their ranks have in common.
  int sharing = 1;
  // Where there are some, each test takes one of these instead, in turn; the first the one of this
  // number.
  std::vector<ConformanceParam> in_turn = {};
  size_t first = 0;
};

inline void PrintTo(const ConformanceParam& param, std::ostream* out) { *out << param.name; }

inline std::string ConformanceName(const ::testing::TestParamInfo<ConformanceParam>& info) {
  return info.param.name;
}

class Conformance : public ::testing::TestWithParam<ConformanceParam> {
 public:
  // This test's: one of those that take turns.
  static const ConformanceParam& GetParam();

 protected:
  void SetUp() override;
};

// What only shows where the test is inside the daemon's process without a transport between:
// deaths of sessions, memory in use. Instantiated there alone.
class ConformanceInside : public Conformance {};

}  // namespace conformance
}  // namespace chorus

#endif  // CHORUS_TESTS_CONFORMANCE_CONFORMANCE_H_
