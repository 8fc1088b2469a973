// Preloaded into a daemon: its wall clock, which all its deadlines follow, runs ahead of the real
// one by the nanoseconds in the file $CHORUS_TEST_CLOCK (8 bytes). A test that writes there need
// not wait for a deadline, and no rank of a loaded machine is late by chance.
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

using ClockGettime = int (*)(clockid_t, timespec*);

const std::atomic<int64_t>* MapAhead() {
  const char* const path = std::getenv("CHORUS_TEST_CLOCK");
  const int fd = path == nullptr ? -1 : open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) _exit(2);
  void* const mapped =
      mmap(nullptr, sizeof(std::atomic<int64_t>), PROT_READ, MAP_SHARED, fd, /*offset=*/0);
  close(fd);
  if (mapped == MAP_FAILED) _exit(2);
  return static_cast<const std::atomic<int64_t>*>(mapped);
}

}  // namespace

extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  static const auto real = reinterpret_cast<ClockGettime>(dlsym(RTLD_NEXT, "clock_gettime"));
  static const std::atomic<int64_t>* const ahead = MapAhead();
  const int result = real(clock, time);
  if (result != 0 || clock != CLOCK_REALTIME) return result;
  const int64_t nanos = time->tv_nsec + ahead->load(std::memory_order_relaxed);
  time->tv_sec += nanos / kSecond;
  time->tv_nsec = nanos % kSecond;
  return 0;
}

// abseil's own asks the system only every few seconds, and the processor's counter between.
namespace absl {
ABSL_NAMESPACE_BEGIN
Time Now() {
  timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  return TimeFromTimespec(time);
}
ABSL_NAMESPACE_END
}  // namespace absl
