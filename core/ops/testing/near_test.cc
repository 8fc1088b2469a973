#include "core/ops/testing/near.h"

#include <limits>

#include "gtest/gtest.h"

namespace chorus {
namespace testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

TEST(NearTest, NumbersAreNearThatAreNotFurtherApart) {
  EXPECT_TRUE(IsNear(1.25, 1, 0.25));
  EXPECT_TRUE(IsNear(0.75, 1, 0.25));
  EXPECT_FALSE(IsNear(1.375, 1, 0.25));
  EXPECT_FALSE(IsNear(0.625, 1, 0.25));
  EXPECT_FALSE(IsNear(-1, 1, 1));
  EXPECT_TRUE(IsNear(3, 3, 0));
  EXPECT_TRUE(IsNear(-0.0, 0, 0));
  EXPECT_FALSE(IsNear(3, 3.5, 0));
  EXPECT_FALSE(IsNear(3, 3.5, kNaN));
}

TEST(NearTest, AnInfinityIsNearItselfWhateverTheTolerance) {
  for (const double tolerance : {0.0, 1.0, kInfinity, kNaN}) {
    SCOPED_TRACE(tolerance);
    EXPECT_TRUE(IsNear(kInfinity, kInfinity, tolerance));
    EXPECT_TRUE(IsNear(-kInfinity, -kInfinity, tolerance));
    EXPECT_FALSE(IsNear(kInfinity, -kInfinity, tolerance));
    EXPECT_FALSE(IsNear(1, kInfinity, tolerance));
    EXPECT_FALSE(IsNear(-kInfinity, 1, tolerance));
  }
}

TEST(NearTest, NaNIsNearNaN) {
  for (const double tolerance : {0.0, 1.0, kInfinity, kNaN}) {
    SCOPED_TRACE(tolerance);
    EXPECT_TRUE(IsNear(kNaN, kNaN, tolerance));
    EXPECT_TRUE(IsNear(-kNaN, kNaN, tolerance));
    EXPECT_FALSE(IsNear(kNaN, 0, tolerance));
    EXPECT_FALSE(IsNear(0, kNaN, tolerance));
    EXPECT_FALSE(IsNear(kNaN, kInfinity, tolerance));
  }
}

TEST(NearTest, SaysWhatItGotAndAllItsDigits) {
  EXPECT_STREQ(IsNear(0.1, 0.3, 0.125).message(),
               "0.10000000000000001, not within 0.125 of 0.29999999999999999");
}

}  // namespace
}  // namespace testing
}  // namespace chorus
