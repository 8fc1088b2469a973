#include "client/link/mapping.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace internal {

absl::StatusOr<std::unique_ptr<Mapping>> Mapping::Make(int fd, int64_t bytes, int protection) {
  struct stat file = {};
  if (fstat(fd, &file) != 0 || bytes <= 0 || static_cast<int64_t>(file.st_size) < bytes) {
    return MakeError(Reason::kInternal,
                     absl::StrCat("an arena of ", bytes, " bytes, of which ",
                                  static_cast<int64_t>(file.st_size), " are there"));
  }
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return MakeError(Reason::kInternal, "an arena whose file may shrink");
  }
  void* const at = ::mmap(nullptr, static_cast<size_t>(bytes), protection, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) {
    return MakeError(Reason::kOutOfMemory,
                     absl::StrCat("cannot map an arena of ", bytes, " bytes: ", ::strerror(errno)));
  }
  // A forked child has no business with it.
  ::madvise(at, static_cast<size_t>(bytes), MADV_DONTFORK);
  return std::unique_ptr<Mapping>(new Mapping(static_cast<char*>(at), bytes));
}

Mapping::~Mapping() {
  // In a forked child something else may stand there.
  if (!mark_.Forked()) ::munmap(data_, static_cast<size_t>(bytes_));
}

}  // namespace internal
}  // namespace chorus
