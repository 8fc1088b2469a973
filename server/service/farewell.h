// Tells clients that stay connected that the daemon is ending, or that their session has ended.
//
// Threads: any. Ownership: it has its listeners until they are removed or have been called.
// Errors: none.
#ifndef CHORUS_SERVER_SERVICE_FAREWELL_H_
#define CHORUS_SERVER_SERVICE_FAREWELL_H_

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "core/base/ids.h"
#include "core/base/mutex.h"

namespace chorus::server {

class Farewell {
 public:
  using Listener = std::function<void(const absl::Status& why)>;

  // Calls `listener`, without the lock, when it is said; at once when it was. Returns its name for
  // Remove.
  uint64_t Add(Listener listener) {
    absl::Status why;
    {
      MutexLock lock(&mutex_);
      if (said_.ok()) {
        listeners_[++last_].listener = std::move(listener);
        return last_;
      }
      why = said_;
    }
    listener(why);
    return 0;
  }
  void Remove(uint64_t id) {
    MutexLock lock(&mutex_);
    listeners_.erase(id);
  }

  // What `id` names is of `session`, unless it has been called or removed.
  void SetSession(uint64_t id, SessionId session) {
    MutexLock lock(&mutex_);
    const auto it = listeners_.find(id);
    if (it != listeners_.end()) it->second.session = session;
  }
  // That session has ended: calls its listeners, without the lock.
  void SayTo(SessionId session, const absl::Status& why) {
    std::vector<Listener> listeners;
    {
      MutexLock lock(&mutex_);
      for (auto it = listeners_.begin(); it != listeners_.end();) {
        const auto at = it++;
        if (at->second.session != session) continue;
        listeners.push_back(std::move(at->second.listener));
        listeners_.erase(at);
      }
    }
    for (const Listener& listener : listeners) listener(why);
  }

  // Once.
  void Say(const absl::Status& why) {
    absl::flat_hash_map<uint64_t, Entry> listeners;
    {
      MutexLock lock(&mutex_);
      said_ = why;
      listeners.swap(listeners_);
    }
    for (const auto& entry : listeners) entry.second.listener(why);
  }

 private:
  struct Entry {
    Listener listener;
    SessionId session;  // 0: none
  };

  Mutex mutex_;
  absl::Status said_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<uint64_t, Entry> listeners_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_SERVICE_FAREWELL_H_
