#include "core/worker/window.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus::worker {
namespace {

absl::Status Refused(const char* what) {
  return MakeError(Reason::kOutOfMemory, absl::StrCat("window: ", what, ": ", strerror(errno)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Window>> Window::MapWhole(UniqueFd fd) {
  void* const base = mmap(nullptr, static_cast<size_t>(kWindowBytes), PROT_READ | PROT_WRITE,
                          MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) return Refused("mmap");
  madvise(base, static_cast<size_t>(kWindowBytes), MADV_DONTFORK);
  return std::unique_ptr<Window>(new Window(std::move(fd), static_cast<char*>(base)));
}

absl::StatusOr<std::unique_ptr<Window>> Window::Create() {
  UniqueFd fd(memfd_create("chorus-window", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return Refused("memfd_create");
  if (ftruncate(fd.get(), kWindowBytes) != 0) return Refused("ftruncate");
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return Refused("F_ADD_SEALS");
  }
  return MapWhole(std::move(fd));
}

absl::StatusOr<std::unique_ptr<Window>> Window::Map(UniqueFd fd) {
  struct stat info = {};
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (fstat(fd.get(), &info) != 0 || info.st_size != kWindowBytes || seals < 0 ||
      (seals & F_SEAL_SHRINK) == 0) {
    return Malformed(absl::StrCat("window: expected a sealed file of ", kWindowBytes,
                                  " bytes, got one of ", info.st_size));
  }
  return MapWhole(std::move(fd));
}

Window::~Window() { munmap(base_, static_cast<size_t>(kWindowBytes)); }

}  // namespace chorus::worker
