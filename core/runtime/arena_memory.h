// A file's pages in the daemon's address space.
//
// Threads: Touch() may be called by any; the object goes with its last reference, on whichever
// thread drops it. Ownership: the mapping is its own, the file shared. Errors: none; what the
// kernel refuses is said at each function.
#ifndef CHORUS_CORE_RUNTIME_ARENA_MEMORY_H_
#define CHORUS_CORE_RUNTIME_ARENA_MEMORY_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "core/base/unique_fd.h"

namespace chorus {

// A file and its mappings, which go with the object.
class ArenaMemory {
 public:
  // `writable`: the same pages where `data` is for reading only; null: `data` itself.
  ArenaMemory(std::shared_ptr<const UniqueFd> file, char* data, int64_t bytes,
              char* writable = nullptr)
      : file_(std::move(file)), data_(data), bytes_(bytes), writable_(writable) {}
  ~ArenaMemory();
  ArenaMemory(const ArenaMemory&) = delete;
  ArenaMemory& operator=(const ArenaMemory&) = delete;
  const std::shared_ptr<const UniqueFd>& file() const { return file_; }
  int fd() const { return file_->get(); }
  char* data() const { return data_; }
  char* writable() const { return writable_ != nullptr ? writable_ : data_; }
  int64_t bytes() const { return bytes_; }
  // Gives every page memory, without changing what is there: safe beside readers and writers.
  // A page that the kernel refuses is left for its first use.
  void Touch(int64_t offset, int64_t bytes) const;

 private:
  const std::shared_ptr<const UniqueFd> file_;
  char* const data_;
  const int64_t bytes_;
  char* const writable_;
};

int64_t PageBytes();
inline int64_t RoundUp(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_ARENA_MEMORY_H_
