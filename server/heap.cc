#include "server/heap.h"

#include <fcntl.h>
#include <malloc.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "core/base/unique_fd.h"

namespace chorus::server {

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

HeapTrimmer::HeapTrimmer() : least_(AnonymousBytes()), last_(least_) {}

absl::Duration HeapTrimmer::Turn() {
  int64_t now = AnonymousBytes();
  // A turn wakes a processor, which an idle daemon should not do often.
  const bool moves = std::abs(now - last_) >= kGrowthBytes / 16;
  if (now > least_ + kGrowthBytes) {
    malloc_trim(0);
    least_ = now = AnonymousBytes();
  }
  least_ = std::min(least_, now);
  last_ = now;
  return moves ? absl::Milliseconds(100) : absl::Seconds(1);
}

}  // namespace chorus::server
