#include "server/heap.h"

#include <fcntl.h>
#include <malloc.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>

#include "core/base/unique_fd.h"

namespace chorus {

int64_t AnonymousBytes() {
  const UniqueFd file(open("/proc/self/statm", O_RDONLY | O_CLOEXEC));
  char text[128] = {};
  long long resident = 0;
  long long shared = 0;
  if (read(file.get(), text, sizeof(text) - 1) <= 0 ||
      sscanf(text, "%*d %lld %lld", &resident, &shared) != 2) {
    return 0;
  }
  return (resident - shared) * sysconf(_SC_PAGESIZE);
}

void BoundHeaps() {
  // Each of the thresholds, once said, is no longer moved.
  mallopt(M_MMAP_THRESHOLD, kMaxHeapEndBytes);
  mallopt(M_TRIM_THRESHOLD, kMaxHeapEndBytes);
  mallopt(M_ARENA_MAX, kMaxHeaps);
}

HeapTrimmer::HeapTrimmer() : least_(AnonymousBytes()) {}

void HeapTrimmer::Turn() {
  const int64_t now = AnonymousBytes();
  if (now <= least_ + kGrowthBytes) {
    least_ = std::min(least_, now);
    return;
  }
  malloc_trim(0);
  least_ = AnonymousBytes();
}

}  // namespace chorus
