// A thread that touches new memory and gives old memory back, which take milliseconds.
//
// What is given back comes first, and new memory is touched a part at a time: who needs the room
// waits for the pages that the kernel is still to take.
//
// Threads: the node thread makes all calls. Ownership: it shares the memory that it is to dispose
// of until it has, and that it touches while it does; it owns the charges that leave with it.
// Errors: none.
#ifndef CHORUS_CORE_RUNTIME_MEMORY_THREAD_H_
#define CHORUS_CORE_RUNTIME_MEMORY_THREAD_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>

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
  // Drops this reference on the thread: to arenas' memory, or to files that have pages.
  void Dispose(std::shared_ptr<const void> memory);
  // What the charge is for goes with what Dispose() was given last; it leaves until a Settle() that
  // finds that gone.
  void Leave(Charge charge);
  // Whether there was something.
  bool Settle();
  // How many disposals were asked for, and how many of these, the first ones, are done.
  int64_t disposals() const { return disposals_; }
  int64_t disposals_done() const;
  // Waits until everything asked for so far is done.
  void Drain();

 private:
  struct State;
  const std::unique_ptr<State> state_;
  int64_t disposals_ = 0;
  std::deque<std::pair<int64_t, Charge>> leaving_;  // with the disposals that they leave with
};

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_MEMORY_THREAD_H_
