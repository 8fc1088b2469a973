// A thread that touches new memory and gives old memory back, which take milliseconds.
//
// What is given back comes first, and new memory is touched a part at a time: pages that wait for
// the kernel to take them are charged to nobody any more, so others may be given the room.
//
// Threads: any. Ownership: it shares the memory that it is to dispose of until it has, and that it
// touches while it does. Errors: none.
#ifndef CHORUS_CORE_RUNTIME_MEMORY_THREAD_H_
#define CHORUS_CORE_RUNTIME_MEMORY_THREAD_H_

#include <memory>

#include "core/runtime/arena_memory.h"

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
  // Waits until everything asked for so far is done.
  void Drain();

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_MEMORY_THREAD_H_
