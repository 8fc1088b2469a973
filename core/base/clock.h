// Time for leases, timers and deadlines: it goes on evenly whatever is done to the wall clock.
//
// Threads: any. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_BASE_CLOCK_H_
#define CHORUS_CORE_BASE_CLOCK_H_

#include "absl/time/time.h"

namespace chorus {

// The wall clock's time when this process first asked, and what has passed since, also while the
// machine slept: whatever was to be waited for meanwhile is over when it wakes, leases and timeouts
// too, though nobody was late. Where the wall clock has not been set since then, it is absl::Now().
absl::Time SteadyNow();

// What the one clock says when the other says this: as far from now.
absl::Time SteadyTime(absl::Time wall);
absl::Time WallTime(absl::Time steady);

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_CLOCK_H_
