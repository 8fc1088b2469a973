// Turns of calls: to have their request read, or their answer sent.
//
// What gRPC reads of a message stands in its memory before anybody can look at it, up to the
// largest message that it takes, and then with the node until that comes to it. So there are only
// so many requests on that way at a time, ShareOf them of one tenant and some of one connection;
// others wait in line, and gRPC does not take their bytes.
//
// gRPC has done with a call some time after its client has got the answer, and has sent the next
// request: a client that has never more than a few calls under way would soon have hundreds here.
// So only some of a connection's answers are under way at a time.
//
// Threads: thread-safe. Ownership: it outlives its turns. Errors: none; where there is no turn one
// waits.
#ifndef CHORUS_SERVER_SERVICE_CALL_TURNS_H_
#define CHORUS_SERVER_SERVICE_CALL_TURNS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "core/base/mutex.h"

namespace chorus::server {

class CallTurns {
 public:
  explicit CallTurns(int64_t of_one_connection, int64_t turns = kAny)
      : of_one_connection_(of_one_connection), turns_(turns) {}

  struct Holder {
    std::string tenant;
    int connection = 0;
    friend bool operator<(const Holder& a, const Holder& b) {
      return std::tie(a.tenant, a.connection) < std::tie(b.tenant, b.connection);
    }
  };
  // Ends with this object.
  class Turn {
   public:
    Turn() = default;
    Turn(CallTurns* turns, Holder holder) : turns_(turns), holder_(std::move(holder)) {}
    Turn(Turn&& other) noexcept
        : turns_(std::exchange(other.turns_, nullptr)), holder_(std::move(other.holder_)) {}
    Turn& operator=(Turn&& other) noexcept {
      std::swap(turns_, other.turns_);
      std::swap(holder_, other.holder_);
      return *this;
    }
    ~Turn() {
      if (turns_ != nullptr) turns_->End(holder_);
    }

   private:
    CallTurns* turns_ = nullptr;
    Holder holder_;
  };
  // Called with a turn, once: at once, or when another one ends, on that thread or on one that is
  // handing turns on already.
  using OnTurn = std::function<void(Turn turn)>;
  // A name for Forget().
  int64_t Enter(const Holder& holder, OnTurn on_turn);
  // It is called no more, unless it has been.
  void Forget(const Holder& holder, int64_t name);

 private:
  struct Line {
    int64_t held = 0;
    std::map<int64_t, OnTurn> waiting;  // in the order in which they came
  };
  bool Has(const Holder& holder, const Line& line) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Take(const Holder& holder, Line* line) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Unless there is somebody in it.
  void Drop(const Holder& holder) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End(const Holder& holder);
  // One turn. False: there is none, or nobody that may have it.
  bool HandOn();

  static constexpr int64_t kAny = int64_t{1} << 40;
  const int64_t of_one_connection_;
  const int64_t turns_;
  Mutex mutex_;
  int64_t held_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t last_ ABSL_GUARDED_BY(mutex_) = 0;
  bool handing_on_ ABSL_GUARDED_BY(mutex_) = false;                 // a thread is
  std::map<std::string, int64_t> held_by_ ABSL_GUARDED_BY(mutex_);  // of tenants that hold some
  std::map<Holder, Line> lines_ ABSL_GUARDED_BY(mutex_);  // of those that hold some or wait
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_SERVICE_CALL_TURNS_H_
