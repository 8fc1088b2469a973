// For tests of what is allocated: a binary that links this counts what it has on the heap.
//
// It replaces operator new and delete, and counts bytes as they were asked for: for each thread by
// itself, so what one allocates and another frees counts for either. It does not see what is
// aligned beyond them, nor malloc (counting_malloc.h).
//
// Threads: a HeapUse tells of the thread that it is made and asked on. Ownership: none.
// Errors: none; without memory operator new throws, as ever.
#ifndef CHORUS_CORE_BASE_COUNTING_HEAP_H_
#define CHORUS_CORE_BASE_COUNTING_HEAP_H_

#include <cstdint>

namespace chorus {

// What this thread has allocated and not freed since this was made.
class HeapUse {
 public:
  HeapUse();
  int64_t bytes() const;
  int64_t blocks() const;
  int64_t most_bytes() const;  // at any time since; of the last HeapUse that was made

 private:
  int64_t bytes_before_;
  int64_t blocks_before_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_COUNTING_HEAP_H_
