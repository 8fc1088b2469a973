#include "server/lock_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "core/base/error.h"

namespace chorus {

absl::StatusOr<UniqueFd> TakeLockFile(absl::string_view path) {
  const std::string name = absl::StrCat(path, ".lock");
  UniqueFd file(open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file.valid()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, Reason::kUnsupported,
                     absl::StrCat("lock file ", name, ": ", strerror(errno)));
  }
  if (flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    char pid[32] = {};
    const ssize_t size = pread(file.get(), pid, sizeof(pid) - 1, 0);
    absl::string_view holder(pid, size > 0 ? static_cast<size_t>(size) : 0);
    holder = absl::StripSuffix(holder, "\n");
    return MakeError(absl::StatusCode::kFailedPrecondition, Reason::kUnsupported,
                     absl::StrCat("another chorusd (pid ", holder.empty() ? "unknown" : holder,
                                  ") serves ", path, ": it holds ", name));
  }
  const std::string pid = absl::StrCat(getpid(), "\n");
  if (ftruncate(file.get(), 0) != 0 ||
      pwrite(file.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    return MakeError(absl::StatusCode::kFailedPrecondition, Reason::kUnsupported,
                     absl::StrCat("lock file ", name, ": ", strerror(errno)));
  }
  return file;
}

}  // namespace chorus
