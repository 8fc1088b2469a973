#include "core/base/shared_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>

#include "absl/strings/str_cat.h"

namespace chorus {

UniqueFd OpenAgain(int fd, int flags) {
  return UniqueFd(open(absl::StrCat("/proc/self/fd/", fd).c_str(), flags | O_CLOEXEC));
}

bool IsHeldByOthers(int fd) {
  // An opener that comes while we have the lease would break it, with a signal whose default is to
  // end the process. SIGURG's is to be ignored, and a handler of it ends a wait at most.
  fcntl(fd, F_SETSIG, SIGURG);
  if (fcntl(fd, F_SETLEASE, F_WRLCK) != 0) return true;
  fcntl(fd, F_SETLEASE, F_UNLCK);
  return false;
}

namespace {
constexpr int kMappedSeals = F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;
}  // namespace

bool IsSealedMapped(int fd) {
  const int seals = fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & kMappedSeals) == kMappedSeals;
}

bool SealMapped(int fd) { return IsSealedMapped(fd) || fcntl(fd, F_ADD_SEALS, kMappedSeals) == 0; }

bool KernelGivesLeases() {
  const UniqueFd memory_fd(memfd_create("chorus-lease", MFD_CLOEXEC));
  const UniqueFd fd = OpenAgain(memory_fd.get(), O_RDWR);
  return fd.valid() && !IsHeldByOthers(fd.get());
}

}  // namespace chorus
