// A thread that touches new memory and gives old memory back, which take milliseconds.
//
// What is given back comes first, and new memory is touched a part at a time: a caller that needs
// the room waits for the pages that the kernel is still to take. Tenants take turns.
//
// Threads: the node thread makes all calls. Ownership: it shares the memory that it is to dispose
// of until it has, and that it touches while it does; it owns the charges that leave with it.
// Errors: none.
#ifndef CHORUS_CORE_RUNTIME_MEMORY_THREAD_H_
#define CHORUS_CORE_RUNTIME_MEMORY_THREAD_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "core/runtime/arena_memory.h"
#include "core/runtime/budget.h"

namespace chorus {

// Does for the node thread what would stall it: the first touch of 64 MiB takes 40 ms, unmapping
// them a third of that. The destructor finishes what was asked for.
class MemoryThread {
 public:
  MemoryThread();
  ~MemoryThread();
  MemoryThread(const MemoryThread&) = delete;
  MemoryThread& operator=(const MemoryThread&) = delete;

  // Touches all of it, unless it is disposed of first.
  void Touch(const std::shared_ptr<const ArenaMemory>& memory);
  // What is still to be touched, of which others may have touched some.
  int64_t untouched_bytes() const;
  // Drops this reference on the thread: to arenas' memory, or to files that have pages. What is of
  // one tenant (Budget::share) goes in the order of the calls.
  void Dispose(const Budget& of, std::shared_ptr<const void> memory);
  // What the charge is for goes with what Dispose() was given of its tenant by now; it leaves until
  // a Settle() that finds that gone.
  void Leave(Charge charge);
  // Whether there was something.
  bool Settle();
  // Asked when what Dispose() was given of the tenant by now, or, if it has nothing there, as much
  // as it was given of all, is gone.
  std::function<bool()> WhetherGone(const Budget& of);
  // Waits until everything asked for so far is done.
  void Drain();

 private:
  struct State;
  // How many disposals were asked for, and how many of these, the first ones, are done.
  struct Disposals {
    int64_t num_asked = 0;
    std::shared_ptr<std::atomic<int64_t>> num_done = std::make_shared<std::atomic<int64_t>>(0);

    bool all_done() const { return *num_done >= num_asked; }
    std::function<bool()> WhetherGone() const {
      return [num_done = num_done, num_asked = num_asked] { return *num_done >= num_asked; };
    }
  };
  struct Tenant {
    Disposals disposals;
    std::deque<std::pair<int64_t, Charge>> leaving;  // each with that disposal
  };

  const std::unique_ptr<State> state_;
  Disposals all_;
  absl::flat_hash_map<const Budget*, Tenant> tenants_;  // that have something there
};

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_MEMORY_THREAD_H_
