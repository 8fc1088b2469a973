// Keeps a second daemon off a path.
//
// Threads: any one at a time. Ownership: the file goes with the object. Errors: said at
// TakeLockFile().
#ifndef CHORUS_SERVER_LOCK_FILE_H_
#define CHORUS_SERVER_LOCK_FILE_H_

#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/base/unique_fd.h"

namespace chorus::server {

// Holds a lock file for as long as it lives, then removes it. A daemon that is killed gives the
// lock up and leaves the file.
class LockFile {
 public:
  LockFile(LockFile&&) = default;
  LockFile& operator=(LockFile&&) = delete;
  ~LockFile();

 private:
  friend absl::StatusOr<LockFile> TakeLockFile(absl::string_view path);
  LockFile(std::string name, UniqueFd file) : name_(std::move(name)), file_(std::move(file)) {}

  std::string name_;
  UniqueFd file_;
};

// Takes PATH.lock, made when it is not there.
// FAILED_PRECONDITION (CANNOT_SERVE): another daemon holds it, which the text names; or it cannot
// be made or written.
absl::StatusOr<LockFile> TakeLockFile(absl::string_view path);

}  // namespace chorus::server

#endif  // CHORUS_SERVER_LOCK_FILE_H_
