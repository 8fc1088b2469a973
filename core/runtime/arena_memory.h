// A file's pages in the daemon's address space, and what may be asked of them.
//
// Threads: Touch() and IsHeldByOthers() may be called by any; the object goes with its last
// reference, on whichever thread drops it. Ownership: the file and the mapping are its own.
// Errors: none; what the kernel refuses is said at each function.
#ifndef CHORUS_CORE_RUNTIME_ARENA_MEMORY_H_
#define CHORUS_CORE_RUNTIME_ARENA_MEMORY_H_

#include <cstdint>
#include <utility>

#include "core/base/unique_fd.h"

namespace chorus {

// A file and its mappings; they go with the object.
class ArenaMemory {
 public:
  // `fd` was opened by the file's name: what memfd_create gives does not count as an opener.
  // `writable`: the same pages where `data` is for reading only; null: `data` itself.
  ArenaMemory(UniqueFd fd, char* data, int64_t bytes, char* writable = nullptr)
      : fd_(std::move(fd)), data_(data), bytes_(bytes), writable_(writable) {}
  ~ArenaMemory();
  ArenaMemory(const ArenaMemory&) = delete;
  ArenaMemory& operator=(const ArenaMemory&) = delete;
  int fd() const { return fd_.get(); }
  char* data() const { return data_; }
  char* writable() const { return writable_ != nullptr ? writable_ : data_; }
  int64_t bytes() const { return bytes_; }
  // Gives every page memory, without changing what is there: safe beside readers and writers.
  // A page that the kernel refuses is left for its first use.
  void Touch(int64_t offset, int64_t bytes) const;
  // Whether another descriptor of the file is open, or the file mapped by one. The kernel knows: it
  // gives a write lease to an only opener. Where it gives none at all: false.
  bool IsHeldByOthers() const;

 private:
  const UniqueFd fd_;
  char* const data_;
  const int64_t bytes_;
  char* const writable_;
};

int64_t PageBytes();
inline int64_t RoundUp(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_ARENA_MEMORY_H_
