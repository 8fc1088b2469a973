// What malloc keeps of memory that nobody holds any more: kept small, for it is charged to nobody.
//
// glibc gives threads heaps of their own. What is freed stays in them: all of it below a block that
// is still used, and at the end up to a threshold that it raises by itself, to twice the largest
// block that was freed. So one large request lets each heap keep 64 MiB for ever, and one small
// block that is kept holds all the free memory below it. Measured with many clients that ask for
// too much (tests/hostile), after a minute: 24 MB held, 274 MB kept.
//
// Threads: as each says. Ownership: the process's malloc. Errors: none; with another malloc than
// glibc's nothing happens.
#ifndef CHORUS_SERVER_HEAP_H_
#define CHORUS_SERVER_HEAP_H_

#include <cstdint>

#include "absl/time/time.h"

namespace chorus::server {

// Heaps, and what the end of each may keep. A block of that size or more is the system's at once.
inline constexpr int kMaxHeaps = 8;
inline constexpr int64_t kMaxHeapEndBytes = int64_t{8} << 20;

// Before the first thread.
void BoundHeaps();

// Of this process, in memory: heaps and stacks, nothing that a file or another process has too. 0
// where the system does not tell. Any thread.
int64_t AnonymousBytes();

// Gives back what is free inside the heaps, from time to time.
//
// Threads: one at a time, beside all others, whose malloc it may hold up for milliseconds: so only
// when there is much to be had.
class HeapTrimmer {
 public:
  // By how much memory must have grown since it last looked as it should.
  static constexpr int64_t kGrowthBytes = int64_t{16} << 20;

  HeapTrimmer();
  // After how long to be called again: sooner while memory comes and goes.
  absl::Duration Turn();

 private:
  int64_t least_;  // bytes, since the last trim
  int64_t last_;   // bytes
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_HEAP_H_
