// For tests of what is allocated in any way: a binary that links this counts what it takes of
// malloc, also libraries of the system, which counting_heap.h does not see.
//
// It stands before the C library's malloc and its kin, and counts blocks as large as they came to
// be: for each thread by itself, so what one allocates and another frees counts for either. What
// maps pages of its own, as writers of code do, is not counted.
//
// Threads: a MallocUse tells of the thread that it is made and asked on. Ownership: none.
// Errors: none; malloc fails as ever.
#ifndef CHORUS_CORE_BASE_COUNTING_MALLOC_H_
#define CHORUS_CORE_BASE_COUNTING_MALLOC_H_

#include <cstdint>

namespace chorus {

// What this thread has allocated and not freed since this was made.
class MallocUse {
 public:
  MallocUse();
  int64_t bytes() const;
  int64_t most_bytes() const;  // at any time since; of the last MallocUse that was made

 private:
  int64_t bytes_before_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_COUNTING_MALLOC_H_
