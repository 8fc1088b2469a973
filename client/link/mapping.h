// A mapping of an arena that the daemon has sent.
//
// Threads: it does not change. Ownership: it owns the mapping; the descriptor stays the caller's.
// Errors: Make says them.
#ifndef CHORUS_CLIENT_LINK_MAPPING_H_
#define CHORUS_CLIENT_LINK_MAPPING_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "client/internal/fork_mark.h"

namespace chorus {
namespace internal {

class Mapping {
 public:
  // `bytes`: what the daemon says that the arena has; `protection` as of mmap. A forked child does
  // not have it.
  // INTERNAL: the file has less, or may come to have less: to touch what is not there would end
  // this process. RESOURCE_EXHAUSTED kOutOfMemory.
  static absl::StatusOr<std::unique_ptr<Mapping>> Make(int fd, int64_t bytes, int protection);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  Mapping(char* data, int64_t bytes) : data_(data), bytes_(bytes) {}
  char* const data_;
  const int64_t bytes_;
  const ForkMark mark_;
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_LINK_MAPPING_H_
