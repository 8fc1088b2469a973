// A wall clock that a test sets. It stands in for absl::Now in the whole program, so one source of
// a test alone includes this.
//
// Threads: any. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_BASE_WALL_CLOCK_H_
#define CHORUS_CORE_BASE_WALL_CLOCK_H_

#include <time.h>

#include <atomic>
#include <cstdint>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace chorus {

// How far it is set ahead of the machine's.
inline std::atomic<int64_t> wall_ahead_nanos{0};

}  // namespace chorus

namespace absl {
ABSL_NAMESPACE_BEGIN
Time Now() {
  timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  return TimeFromTimespec(time) + Nanoseconds(chorus::wall_ahead_nanos.load());
}
ABSL_NAMESPACE_END
}  // namespace absl

#endif  // CHORUS_CORE_BASE_WALL_CLOCK_H_
