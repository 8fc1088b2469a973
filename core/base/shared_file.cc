#include "core/base/shared_file.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>

#include "absl/strings/str_cat.h"

namespace chorus {

UniqueFd OpenAgain(int fd, int flags) {
  return UniqueFd(open(absl::StrCat("/proc/self/fd/", fd).c_str(), flags | O_CLOEXEC));
}

bool IsHeldByOthers(int fd) {
  // An opener that comes while we have the lease would break it, with a signal whose default is to
  // end the process. SIGURG's is to be ignored.
  fcntl(fd, F_SETSIG, SIGURG);
  if (fcntl(fd, F_SETLEASE, F_WRLCK) != 0) return errno == EAGAIN;
  fcntl(fd, F_SETLEASE, F_UNLCK);
  return false;
}

}  // namespace chorus
