// Preloaded into a daemon or a trainer: its steady clock, which all its deadlines follow, and its
// wall clock, which none may follow, run ahead of the real ones by the nanoseconds in the file
// $CHORUS_TEST_CLOCK (8 bytes each). A test that writes there need not wait for a deadline, and no
// rank of a loaded machine is late by chance. The third number of the file is how far each call of
// absl::Now sets the wall clock, as Chorus sees it: whatever goes by it ends too early, or never.
// (gRPC, which asks the system, sleeps by the wall clock itself, tenths of a second at a time.)
#include "absl/time/clock.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "absl/time/time.h"

namespace {

constexpr int64_t kSecond = 1000000000;
// After so many calls of absl::Now the wall clock is where it was.
constexpr int64_t kCalls = 4096;

using ClockGettime = int (*)(clockid_t, timespec*);

struct Ahead {
  std::atomic<int64_t> steady;
  std::atomic<int64_t> wall;
  std::atomic<int64_t> wall_step;
};

const Ahead* MapAhead() {
  const char* const path = std::getenv("CHORUS_TEST_CLOCK");
  const int fd = path == nullptr ? -1 : open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) _exit(2);
  void* const mapped = mmap(nullptr, sizeof(Ahead), PROT_READ, MAP_SHARED, fd, /*offset=*/0);
  close(fd);
  if (mapped == MAP_FAILED) _exit(2);
  return static_cast<const Ahead*>(mapped);
}

const Ahead& TheAhead() {
  static const Ahead* const ahead = MapAhead();
  return *ahead;
}

}  // namespace

extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  static const auto real = reinterpret_cast<ClockGettime>(dlsym(RTLD_NEXT, "clock_gettime"));
  const Ahead& ahead = TheAhead();
  const int result = real(clock, time);
  if (result != 0 || (clock != CLOCK_REALTIME && clock != CLOCK_BOOTTIME)) return result;
  const std::atomic<int64_t>& of_clock = clock == CLOCK_REALTIME ? ahead.wall : ahead.steady;
  const int64_t nanos = time->tv_nsec + of_clock.load(std::memory_order_relaxed);
  time->tv_sec += nanos / kSecond;
  time->tv_nsec = nanos % kSecond;
  if (time->tv_nsec < 0) {  // set back
    time->tv_nsec += kSecond;
    --time->tv_sec;
  }
  return 0;
}

// abseil's own asks the system only every few seconds, and the processor's counter between.
namespace absl {
ABSL_NAMESPACE_BEGIN
Time Now() {
  static std::atomic<int64_t> calls{0};
  timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  const int64_t call = calls.fetch_add(1, std::memory_order_relaxed) % kCalls;
  const int64_t step = TheAhead().wall_step.load(std::memory_order_relaxed);
  return TimeFromTimespec(time) + Nanoseconds(call * step);
}
ABSL_NAMESPACE_END
}  // namespace absl
