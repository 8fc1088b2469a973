#include "core/runtime/arena_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
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
  while (fallocate(fd_.get(), 0, offset, bytes) != 0 && errno == EINTR) {
  }
}

bool ArenaMemory::IsHeldByOthers() const {
  // An opener that comes while we have the lease would break it, with a signal whose default is to
  // end the process. SIGURG's is to be ignored.
  fcntl(fd_.get(), F_SETSIG, SIGURG);
  if (fcntl(fd_.get(), F_SETLEASE, F_WRLCK) != 0) return errno == EAGAIN;
  fcntl(fd_.get(), F_SETLEASE, F_UNLCK);
  return false;
}

}  // namespace chorus
