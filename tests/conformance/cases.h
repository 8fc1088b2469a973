// What is tried of each collective.
#ifndef CHORUS_TESTS_CONFORMANCE_CASES_H_
#define CHORUS_TESTS_CONFORMANCE_CASES_H_

#include <cstdint>
#include <map>
#include <vector>

#include "tests/conformance/collectives.h"

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

// By number of ranks. `everything`: each case that the kind has; else few in which each two of
// number, size, dtype and compiled or not meet. Fails the test where that leaves out what it is
// for.
std::map<int, std::vector<Case>> CasesOf(const Matrix& matrix, Kind kind, bool everything);

}  // namespace conformance
}  // namespace chorus

#endif  // CHORUS_TESTS_CONFORMANCE_CASES_H_
