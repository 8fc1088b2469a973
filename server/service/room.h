// Room for bytes that calls hold for a while.
//
// Threads: thread-safe. Ownership: a room outlives its parts. Errors: said at SharedRoom::Take();
// in a Room one waits.
#ifndef CHORUS_SERVER_SERVICE_ROOM_H_
#define CHORUS_SERVER_SERVICE_ROOM_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "core/runtime/budget.h"

namespace chorus::server {

// So many bytes of memory, for as many as find room there, in the order in which they come: one
// that wants much is not passed by those that want little.
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
    const int64_t turn = came_++;
    while (turn != entered_ || free_ < bytes) changed_.Wait(&mutex_);
    ++entered_;
    free_ -= bytes;
    changed_.SignalAll();  // the next one may find room, too
    return Part(this, bytes);
  }
  // How many do.
  int64_t waiting() const {
    MutexLock lock(&mutex_);
    return came_ - entered_;
  }

 private:
  void Leave(int64_t bytes) {
    MutexLock lock(&mutex_);
    free_ += bytes;
    changed_.SignalAll();
  }

  mutable Mutex mutex_;
  CondVar changed_;
  int64_t free_ ABSL_GUARDED_BY(mutex_);
  int64_t came_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t entered_ ABSL_GUARDED_BY(mutex_) = 0;
};

// The same, of which one tenant has at most ShareOf, for as long as its client likes: nobody waits
// for it.
class SharedRoom {
 public:
  // `what` stands there, in words: "bytes of answers that have not been read".
  SharedRoom(int64_t bytes, std::string what) : bytes_(bytes), what_(std::move(what)) {}

  class Part {
   public:
    Part() = default;
    Part(Part&& other) noexcept
        : room_(std::exchange(other.room_, nullptr)),
          tenant_(std::move(other.tenant_)),
          bytes_(std::exchange(other.bytes_, 0)) {}
    Part& operator=(Part&& other) noexcept {
      std::swap(room_, other.room_);
      std::swap(tenant_, other.tenant_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Part() { Shrink(0); }
    int64_t bytes() const { return bytes_; }
    // To `bytes`, unless it has fewer.
    void Shrink(int64_t bytes) {
      if (bytes >= bytes_) return;
      room_->Leave(tenant_, bytes_ - bytes);
      bytes_ = bytes;
    }

   private:
    friend class SharedRoom;
    Part(SharedRoom* room, std::string tenant, int64_t bytes)
        : room_(room), tenant_(std::move(tenant)), bytes_(bytes) {}

    SharedRoom* room_ = nullptr;
    std::string tenant_;
    int64_t bytes_ = 0;
  };
  // RESOURCE_EXHAUSTED kQuota: there is none.
  absl::StatusOr<Part> Take(const std::string& tenant, int64_t bytes) {
    MutexLock lock(&mutex_);
    int64_t& held = held_by_[tenant];
    if (held + bytes > ShareOf(bytes_) || held_ + bytes > bytes_) {
      const int64_t held_bytes = held;
      if (held_bytes == 0) held_by_.erase(tenant);
      return MakeError(Reason::kQuota,
                       absl::StrCat("no room for ", bytes, " ", what_, ": ", tenant, " has ",
                                    held_bytes, "; expected at most ", ShareOf(bytes_),
                                    " of one user, ", bytes_, " in all"));
    }
    held += bytes;
    held_ += bytes;
    return Part(this, tenant, bytes);
  }

 private:
  void Leave(const std::string& tenant, int64_t bytes) {
    MutexLock lock(&mutex_);
    held_ -= bytes;
    const auto it = held_by_.find(tenant);
    it->second -= bytes;
    if (it->second == 0) held_by_.erase(it);
  }

  const int64_t bytes_;
  const std::string what_;
  Mutex mutex_;
  int64_t held_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<std::string, int64_t> held_by_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_SERVICE_ROOM_H_
