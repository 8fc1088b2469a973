#include "core/base/clock.h"

#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

// The wall clock of a machine that runs tests may be set: it is close, and no more is said of it.
constexpr absl::Duration kClose = absl::Hours(1);

TEST(ClockTest, GoesOnAndIsTheWallClockAsLongAsNobodySetsIt) {
  const absl::Time before = SteadyNow();
  EXPECT_LE(before, SteadyNow());
  EXPECT_LT(absl::AbsDuration(before - absl::Now()), kClose);
}

TEST(ClockTest, TimesGoThereAndBack) {
  const absl::Time due = SteadyNow() + absl::Hours(24);
  EXPECT_LT(absl::AbsDuration(SteadyTime(WallTime(due)) - due), kClose);
  EXPECT_EQ(SteadyTime(absl::InfiniteFuture()), absl::InfiniteFuture());
  EXPECT_EQ(WallTime(absl::InfiniteFuture()), absl::InfiniteFuture());
}

}  // namespace
}  // namespace chorus
