#include "server/lock_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "core/base/error.h"

namespace chorus::server {
namespace {

absl::Status Failed(absl::string_view name) {
  return MakeError(Reason::kCannotServe, absl::StrCat("lock file ", name, ": ", strerror(errno)));
}

// Whether `name` is still the file that is open: its last holder may have removed it.
bool StandsAt(const std::string& name, int file) {
  struct stat open_file = {};
  struct stat named_file = {};
  return fstat(file, &open_file) == 0 && lstat(name.c_str(), &named_file) == 0 &&
         open_file.st_dev == named_file.st_dev && open_file.st_ino == named_file.st_ino;
}

}  // namespace

// Removed before the lock is given up: a process that opened this file and gets the lock sees that
// it is gone.
LockFile::~LockFile() {
  if (file_.valid()) unlink(name_.c_str());
}

absl::StatusOr<LockFile> TakeLockFile(absl::string_view path) {
  const std::string name = absl::StrCat(path, ".lock");
  UniqueFd file(open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file.valid()) return Failed(name);
  if (flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    char pid[32] = {};
    const ssize_t size = pread(file.get(), pid, sizeof(pid) - 1, 0);
    absl::string_view holder(pid, size > 0 ? static_cast<size_t>(size) : 0);
    holder = absl::StripSuffix(holder, "\n");
    return MakeError(Reason::kCannotServe,
                     absl::StrCat("another chorusd (pid ", holder.empty() ? "unknown" : holder,
                                  ") serves ", path, ": it holds ", name));
  }
  if (!StandsAt(name, file.get())) return TakeLockFile(path);
  const std::string pid = absl::StrCat(getpid(), "\n");
  if (ftruncate(file.get(), 0) != 0 ||
      pwrite(file.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    return Failed(name);
  }
  return LockFile(name, std::move(file));
}

}  // namespace chorus::server
