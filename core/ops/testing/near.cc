#include "core/ops/testing/near.h"

#include <cmath>

namespace chorus {
namespace testing {

::testing::AssertionResult IsNear(double got, double expected, double tolerance) {
  if (got == expected || (std::isnan(got) && std::isnan(expected))) {
    return ::testing::AssertionSuccess();
  }
  if (std::isfinite(got) && std::isfinite(expected) && std::abs(got - expected) <= tolerance) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << got << ", not within " << tolerance << " of " << expected;
}

}  // namespace testing
}  // namespace chorus
