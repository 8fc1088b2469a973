// What is tried of each collective.
#ifndef CHORUS_TESTS_CONFORMANCE_CASES_H_
#define CHORUS_TESTS_CONFORMANCE_CASES_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "chorus/chorus.h"
#include "tests/conformance/collectives.h"
#include "tests/conformance/conformance.h"

namespace chorus {
namespace conformance {

struct Case {
  int64_t size = 0;
  int dtype = 0;  // as the suite counts them
  bool compiled = false;
};

struct Matrix {
  std::vector<int> ranks;
  std::vector<int64_t> sizes;
  int dtypes = 1;
};

using CheckCase = std::function<void(const Place& place, const World& world, const Case& one)>;
// Calls `check` on each rank of each case, until one fails: of every case that the kind has, or of
// few in which each two of number of ranks, size, dtype and compiled or not meet, as the parameter
// says. Fails the test where that leaves out what it is for.
void CheckCases(const ConformanceParam& param, Kind kind, const Matrix& matrix,
                const CheckCase& check);

}  // namespace conformance
}  // namespace chorus

#endif  // CHORUS_TESTS_CONFORMANCE_CASES_H_
