// What is given back in slices, because one slice has not the time for all of it: a session's
// names, a tenant's arenas.
//
// Threads: one at a time. Ownership: owns what waits, and releases all of it at its end. Errors:
// none.
#ifndef CHORUS_CORE_BASE_RELEASE_QUEUE_H_
#define CHORUS_CORE_BASE_RELEASE_QUEUE_H_

#include <deque>
#include <functional>
#include <utility>

#include "core/base/work.h"

namespace chorus {

// `bool Item::Release()` gives back more, as long as the slice has time, and says whether that was
// all. One that is default-made has nothing.
template <typename Item>
class ReleaseQueue {
 public:
  ReleaseQueue() = default;
  ~ReleaseQueue() {
    for (bool has_more = true; has_more;) {
      const WorkSlice slice;
      has_more = Continue();
    }
  }
  ReleaseQueue(const ReleaseQueue&) = delete;
  ReleaseQueue& operator=(const ReleaseQueue&) = delete;

  // Releases it as long as this slice has time, the rest in the turns that come.
  void Add(Item item) {
    if (!item.Release()) entries_.push_back({std::move(item), nullptr});
  }
  // A turn's share, the oldest first. False: there is nothing.
  bool Continue() {
    if (entries_.empty()) return false;
    while (!entries_.empty() && entries_.front().item.Release()) {
      const std::function<void()> done = std::move(entries_.front().done);
      entries_.pop_front();
      if (done != nullptr) done();
    }
    return true;
  }
  // Runs `done` when all that has been added is released.
  void After(std::function<void()> done) {
    if (entries_.empty()) return done();
    entries_.push_back({Item(), std::move(done)});
  }

 private:
  struct Entry {
    Item item;
    std::function<void()> done;  // null: nobody waits
  };
  std::deque<Entry> entries_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_RELEASE_QUEUE_H_
