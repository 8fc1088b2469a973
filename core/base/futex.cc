#include "core/base/futex.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace chorus {
namespace {

static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free,
              "the kernel compares the word itself");
static_assert(sizeof(std::atomic<uint64_t>) == 8 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "the low half is at the word's address");

FutexResult Wait(const void* address, uint32_t expected, absl::Duration timeout) {
  if (timeout <= absl::ZeroDuration()) return FutexResult::kTimeout;
  timespec relative;
  const timespec* limit = nullptr;
  if (timeout != absl::InfiniteDuration()) {
    relative = absl::ToTimespec(timeout);
    limit = &relative;
  }
  const long rc = syscall(SYS_futex, address, FUTEX_WAIT, expected, limit, nullptr, 0);
  return rc != 0 && errno == ETIMEDOUT ? FutexResult::kTimeout : FutexResult::kAwake;
}

void Wake(const void* address, int most) {
  syscall(SYS_futex, address, FUTEX_WAKE, most, nullptr, nullptr, 0);
}

}  // namespace

FutexResult FutexWait(const std::atomic<uint32_t>& word, uint32_t expected,
                      absl::Duration timeout) {
  return Wait(&word, expected, timeout);
}

FutexResult FutexWait(const std::atomic<uint64_t>& word, uint32_t expected_low,
                      absl::Duration timeout) {
  return Wait(&word, expected_low, timeout);
}

void FutexWakeAll(const std::atomic<uint32_t>& word) { Wake(&word, INT_MAX); }
void FutexWake(const std::atomic<uint32_t>& word, int most) { Wake(&word, most); }
void FutexWake(const std::atomic<uint64_t>& word, int most) { Wake(&word, most); }

}  // namespace chorus
