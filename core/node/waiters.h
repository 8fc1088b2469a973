// Closures that wait for one event.
//
// Threads: the node thread. Ownership: the list owns its closures. Errors: none; the event says.
#ifndef CHORUS_CORE_NODE_WAITERS_H_
#define CHORUS_CORE_NODE_WAITERS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <utility>

namespace chorus::node {

// Of the node thread, in pieces (core/base/work.h): what one of them may do.
inline constexpr int64_t kWorkPerWaiter = 8;

template <typename... Args>
class Waiters {
 public:
  using Fn = std::function<void(Args...)>;
  using Id = int64_t;  // 0: none

  Id Add(Fn fn) {
    waiting_.emplace(++last_, std::move(fn));
    return last_;
  }
  // Removes a closure; one that was called, or none, is ignored. So a caller that asks again and
  // again with short deadlines leaves nothing behind.
  void Remove(Id id) { waiting_.erase(id); }
  bool empty() const { return waiting_.empty(); }

  // Calls and forgets the closures that are there, in their order; what they add waits for the next
  // time.
  void Call(const Args&... args) {
    std::map<Id, Fn> closures;
    closures.swap(waiting_);
    for (const auto& entry : closures) entry.second(args...);
  }
  // Calls and forgets the first of them, if there is one.
  void CallNext(const Args&... args) {
    if (waiting_.empty()) return;
    const Fn first = std::move(waiting_.begin()->second);
    waiting_.erase(waiting_.begin());
    first(args...);
  }

 private:
  std::map<Id, Fn> waiting_;
  Id last_ = 0;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_WAITERS_H_
