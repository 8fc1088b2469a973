#include "core/runtime/arena_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>

namespace chorus {
namespace {

// Linux 5.14; older C libraries do not name it.
constexpr int kPopulateWrite = 23;

}  // namespace

int64_t PageBytes() {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

ArenaMemory::~ArenaMemory() {
  for (char* const mapping : {data_, writable_}) {
    if (mapping == nullptr) continue;
    // To unmap pages takes 140 ms a GiB, during which nobody in this process can map anything: so
    // they go a part at a time before.
    constexpr int64_t kPart = 1 << 20;
    for (int64_t at = 0; at < bytes_; at += kPart) {
      madvise(mapping + at, static_cast<size_t>(std::min(kPart, bytes_ - at)), MADV_DONTNEED);
    }
    munmap(mapping, static_cast<size_t>(bytes_));
  }
}

void ArenaMemory::Touch(int64_t offset, int64_t bytes) const {
  if (madvise(data_ + offset, static_cast<size_t>(bytes), kPopulateWrite) == 0) return;
  // An older kernel: this gives the file its pages, and leaves only the cheap faults.
  while (fallocate(fd(), 0, offset, bytes) != 0 && errno == EINTR) {
  }
}

}  // namespace chorus
