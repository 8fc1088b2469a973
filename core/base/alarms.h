// Closures whose time comes, by the steady clock (core/base/clock.h).
//
// gRPC's alarms are not for that: the thread that fires them sleeps until a time of the wall clock,
// and where that is set back an hour they come an hour late.
//
// Threads: one of its own runs the closures, one after the other and none under its lock; the rest
// from any thread, Stop and the destructor from one. Ownership: it has its thread, and what has not
// run or been cancelled. Errors: none.
#ifndef CHORUS_CORE_BASE_ALARMS_H_
#define CHORUS_CORE_BASE_ALARMS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "core/base/mutex.h"

namespace chorus {

class Alarms {
 public:
  // Names a closure until it runs or is cancelled; never reused.
  struct Id {
    absl::Time due = absl::InfiniteFuture();
    uint64_t serial = 0;  // 0: none
  };

  Alarms() : thread_([this] { Loop(); }) {}
  ~Alarms() { Stop(); }
  Alarms(const Alarms&) = delete;
  Alarms& operator=(const Alarms&) = delete;
  // Ends the thread. What has not run never will.
  void Stop();

  // `fire` runs at `due`, or soon after: those before it may take their time.
  Id Set(absl::Time due, std::function<void()> fire);
  // It does not run any more, unless it has begun; that is not waited for.
  void Cancel(const Id& id);

 private:
  void Loop();

  Mutex mutex_;
  CondVar changed_;
  std::map<std::pair<absl::Time, uint64_t>, std::function<void()>> waiting_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_ ABSL_GUARDED_BY(mutex_) = 0;
  // Till when the thread sleeps, or earlier: most closures are cancelled before they are due, and a
  // later one wakes nobody.
  absl::Time wakes_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;

  std::thread thread_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_ALARMS_H_
