#include "core/base/clock.h"

#include <time.h>

#include "absl/time/clock.h"

namespace chorus {
namespace {

absl::Duration SinceBoot() {
  timespec time;
  clock_gettime(CLOCK_BOOTTIME, &time);
  return absl::DurationFromTimespec(time);
}

}  // namespace

absl::Time SteadyNow() {
  static const absl::Time boot = absl::Now() - SinceBoot();
  return boot + SinceBoot();
}

absl::Time SteadyTime(absl::Time wall) { return SteadyNow() + (wall - absl::Now()); }
absl::Time WallTime(absl::Time steady) { return absl::Now() + (steady - SteadyNow()); }

}  // namespace chorus
