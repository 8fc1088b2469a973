// The node's time, and closures by due time.
//
// Threads: the node thread. Ownership: the queue owns its closures. Errors: none.
#ifndef CHORUS_CORE_NODE_TIMERS_H_
#define CHORUS_CORE_NODE_TIMERS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <utility>

#include "absl/time/time.h"
#include "core/base/work.h"

namespace chorus::node {

// The time of the node's turn, for callbacks that are given none.
struct Clock {
  absl::Time now;
};

class TimerQueue {
 public:
  using Fn = std::function<void(absl::Time now)>;
  // Names a timer until it has fired or was cancelled; never reused.
  struct Id {
    absl::Time due = absl::InfiniteFuture();
    uint64_t serial = 0;
  };

  Id Add(absl::Time due, Fn fn) {
    const Id id{due, ++serial_};
    timers_.emplace(std::make_pair(due, id.serial), std::move(fn));
    return id;
  }
  // A timer that has fired is ignored.
  void Cancel(Id id) { timers_.erase(std::make_pair(id.due, id.serial)); }

  // Runs it now. One that has fired or was cancelled is ignored.
  void Expire(Id id, absl::Time now) {
    const auto it = timers_.find(std::make_pair(id.due, id.serial));
    if (it == timers_.end()) return;
    Fn fn = std::move(it->second);
    timers_.erase(it);
    fn(now);
  }

  // Drops all closures, and what they hold.
  void Clear() {
    while (!timers_.empty()) std::exchange(timers_, {});
  }

  // Runs what is due, the earliest first, as long as the slice has time for it. Whether there was
  // anything. A closure may add and cancel timers.
  bool Fire(absl::Time now) {
    constexpr int64_t kWorkPerTimer = 4;
    bool fired = false;
    while (!timers_.empty() && Next() <= now && SliceHasTime()) {
      CountWork(kWorkPerTimer);
      Fn fn = std::move(timers_.begin()->second);
      timers_.erase(timers_.begin());
      fn(now);
      fired = true;
    }
    return fired;
  }
  absl::Time Next() const {
    return timers_.empty() ? absl::InfiniteFuture() : timers_.begin()->first.first;
  }

 private:
  std::map<std::pair<absl::Time, uint64_t>, Fn> timers_;
  uint64_t serial_ = 0;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_TIMERS_H_
