// Sleeping on a word of shared memory until another thread or process changes it.
//
// The words are shared between processes: the private flavour of the system call is not used.
//
// Threads: any. Ownership: the words are the caller's. Errors: none.
#ifndef CHORUS_CORE_BASE_FUTEX_H_
#define CHORUS_CORE_BASE_FUTEX_H_

#include <atomic>
#include <cstdint>

#include "absl/time/time.h"

namespace chorus {

enum class FutexResult {
  kAwake,    // woken, interrupted by a signal, or the word had another value: look again
  kTimeout,  // not woken within the timeout
};

// Sleeps while `word` is `expected`. A timeout that is not positive returns kTimeout at once;
// absl::InfiniteDuration() is allowed. Reading the word again after the return is up to the caller.
FutexResult FutexWait(const std::atomic<uint32_t>& word, uint32_t expected, absl::Duration timeout);
// The same for the low half of a 64-bit word.
FutexResult FutexWait(const std::atomic<uint64_t>& word, uint32_t expected_low,
                      absl::Duration timeout);

// Wakes everything that sleeps on `word`: as much work as that is.
void FutexWakeAll(const std::atomic<uint32_t>& word);
// Wakes those that sleep on `word`, the first ones first, at most so many. The overload fits the
// 64-bit wait.
void FutexWake(const std::atomic<uint32_t>& word, int most);
void FutexWake(const std::atomic<uint64_t>& word, int most);

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_FUTEX_H_
