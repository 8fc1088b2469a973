// Keeps a second daemon off a path.
#ifndef CHORUS_SERVER_LOCK_FILE_H_
#define CHORUS_SERVER_LOCK_FILE_H_

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/base/unique_fd.h"

namespace chorus {

// Takes PATH.lock, made when it is not there, for as long as the descriptor is open; a daemon that
// is killed gives it up. The file stays: removing it would let two daemons lock two files.
// FAILED_PRECONDITION: another daemon holds it, which the text names.
absl::StatusOr<UniqueFd> TakeLockFile(absl::string_view path);

}  // namespace chorus

#endif  // CHORUS_SERVER_LOCK_FILE_H_
