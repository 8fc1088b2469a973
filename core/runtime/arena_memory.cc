#include "core/runtime/arena_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

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
  munmap(data_, static_cast<size_t>(bytes_));
  if (writable_ != nullptr) munmap(writable_, static_cast<size_t>(bytes_));
}

void ArenaMemory::Touch(int64_t offset, int64_t bytes) const {
  if (madvise(data_ + offset, static_cast<size_t>(bytes), kPopulateWrite) == 0) return;
  // An older kernel: this gives the file its pages, and leaves only the cheap faults.
  while (fallocate(fd(), 0, offset, bytes) != 0 && errno == EINTR) {
  }
}

}  // namespace chorus
