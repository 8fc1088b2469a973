// Room for bytes that calls hold for a moment.
//
// Threads: thread-safe.
#ifndef CHORUS_SERVER_SERVICE_ROOM_H_
#define CHORUS_SERVER_SERVICE_ROOM_H_

#include <cstdint>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "core/base/mutex.h"

namespace chorus {

// So many bytes of memory, for whoever finds room there.
class Room {
 public:
  explicit Room(int64_t bytes) : free_(bytes) {}

  // Some of it, given back with this object.
  class Part {
   public:
    Part() = default;
    Part(Room* room, int64_t bytes) : room_(room), bytes_(bytes) {}
    Part(Part&& other) noexcept
        : room_(std::exchange(other.room_, nullptr)), bytes_(other.bytes_) {}
    ~Part() {
      if (room_ != nullptr) room_->Leave(bytes_);
    }

   private:
    Room* room_ = nullptr;
    int64_t bytes_ = 0;
  };
  // Waits until `bytes`, at most all that there are, are free.
  Part Enter(int64_t bytes) {
    MutexLock lock(&mutex_);
    while (free_ < bytes) changed_.Wait(&mutex_);
    free_ -= bytes;
    return Part(this, bytes);
  }

 private:
  void Leave(int64_t bytes) {
    MutexLock lock(&mutex_);
    free_ += bytes;
    changed_.SignalAll();
  }

  Mutex mutex_;
  CondVar changed_;
  int64_t free_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace chorus

#endif  // CHORUS_SERVER_SERVICE_ROOM_H_
