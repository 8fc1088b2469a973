// A mutex that clang's thread-safety analysis and ThreadSanitizer both understand.
//
// It wraps std::mutex: the system's absl::Mutex is not instrumented, so tsan reports races that are
// none in every user of it.
//
// Threads: any. Ownership: none. Errors: none; misuse is clang's to find.
#ifndef CHORUS_CORE_BASE_MUTEX_H_
#define CHORUS_CORE_BASE_MUTEX_H_

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"

namespace chorus {

class ABSL_LOCKABLE Mutex {
 public:
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mutex_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex* mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) : mutex_(mutex) {
    mutex_->Lock();
  }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mutex_->Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex* mutex_;
};

class CondVar {
 public:
  // Releases `mutex`, waits for a signal or (spuriously) less, and takes it again.
  void Wait(Mutex* mutex) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::unique_lock<std::mutex> lock(mutex->mutex_, std::adopt_lock);
    condition_.wait(lock);
    lock.release();
  }

  // The same, at most until `timeout` has passed. Returns false when it had.
  bool WaitFor(Mutex* mutex, absl::Duration timeout) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::unique_lock<std::mutex> lock(mutex->mutex_, std::adopt_lock);
    const auto limit = absl::ToChronoNanoseconds(timeout);
    // A steady-clock deadline would overflow for an infinite timeout: an hour is asked for again.
    const bool signalled =
        condition_.wait_for(lock, std::min<std::chrono::nanoseconds>(
                                      limit, std::chrono::hours(1))) == std::cv_status::no_timeout;
    lock.release();
    return signalled;
  }

  void Signal() { condition_.notify_one(); }
  void SignalAll() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_MUTEX_H_
