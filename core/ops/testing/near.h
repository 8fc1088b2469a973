// Whether a number that was computed is the one that is expected, but for rounding.
//
// Threads: a pure function. Ownership: none. Errors: the result says what is wrong.
#ifndef CHORUS_CORE_OPS_TESTING_NEAR_H_
#define CHORUS_CORE_OPS_TESTING_NEAR_H_

#include "gtest/gtest.h"

namespace chorus {
namespace testing {

// For EXPECT_TRUE. Equal numbers are near, and so are two NaN; others where both are finite and not
// further apart than `tolerance`. So an infinity is near itself alone, also where the tolerance is
// a part of it, and within that every number would be.
::testing::AssertionResult IsNear(double got, double expected, double tolerance);

}  // namespace testing
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_TESTING_NEAR_H_
