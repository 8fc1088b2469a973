#include "core/transport/doorbell.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <new>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/transport/session_memory.h"

namespace chorus {
namespace {

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010  // Linux 5.1; glibc's <fcntl.h> has it only with _GNU_SOURCE
#endif

constexpr int kSeals = F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

static_assert(sizeof(DoorbellPage) <= DoorbellPage::kBytes, "one page");

absl::Status SystemError(absl::string_view what) {
  return MakeError(Reason::kOutOfMemory,
                   absl::StrCat("doorbell: ", what, ": ", std::strerror(errno)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Doorbell>> Doorbell::Create() {
  UniqueFd fd(memfd_create("chorus-doorbell", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return SystemError("memfd_create");
  if (ftruncate(fd.get(), DoorbellPage::kBytes) != 0) return SystemError("ftruncate");
  void* base = mmap(nullptr, DoorbellPage::kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) return SystemError("mmap");
  DoorbellPage* page = new (base) DoorbellPage;
  page->magic = kDoorbellMagic;
  page->version = kSessionMemoryVersion;
  page->asleep.store(0, std::memory_order_relaxed);
  page->let_go.store(0, std::memory_order_relaxed);
  std::unique_ptr<Doorbell> doorbell(new Doorbell(page, std::move(fd)));
  // Only now: the seal lets existing mappings write and refuses new ones.
  if (fcntl(doorbell->fd(), F_ADD_SEALS, kSeals) != 0) return SystemError("sealing");
  return doorbell;
}

Doorbell::~Doorbell() { munmap(page_, DoorbellPage::kBytes); }

absl::StatusOr<std::unique_ptr<DoorbellView>> DoorbellView::Map(int fd) {
  struct stat file;
  if (fstat(fd, &file) != 0 || file.st_size != static_cast<off_t>(DoorbellPage::kBytes)) {
    return Malformed(absl::StrCat("doorbell: expected a memfd of ", DoorbellPage::kBytes,
                                  " bytes, got something else"));
  }
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return Malformed("doorbell: expected a memfd whose size is sealed, got one that may shrink");
  }
  void* base = mmap(nullptr, DoorbellPage::kBytes, PROT_READ, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return SystemError("mmap");
  const DoorbellPage* page = static_cast<const DoorbellPage*>(base);
  std::unique_ptr<DoorbellView> view(new DoorbellView(page));
  if (page->magic != kDoorbellMagic) {
    return Malformed(absl::StrCat("doorbell: expected magic ", absl::Hex(kDoorbellMagic), ", got ",
                                  absl::Hex(page->magic)));
  }
  if (page->version != kSessionMemoryVersion) {
    return MakeError(Reason::kVersion,
                     absl::StrCat("doorbell: this client speaks layout version ",
                                  kSessionMemoryVersion, ", the daemon version ", page->version,
                                  "; use a client and a daemon of the same release"));
  }
  if (madvise(base, DoorbellPage::kBytes, MADV_DONTFORK) != 0) {
    return SystemError("madvise(DONTFORK)");
  }
  return view;
}

DoorbellView::~DoorbellView() { munmap(const_cast<DoorbellPage*>(page_), DoorbellPage::kBytes); }

absl::StatusOr<UniqueFd> CreateWakeEvent() {
  UniqueFd event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event.valid()) return SystemError("eventfd");
  return event;
}

void RingWakeEvent(int event_fd) {
  const uint64_t one = 1;
  // It fails only when 2^64 wakes were never read by anyone: this client filled it on purpose.
  const ssize_t written = write(event_fd, &one, sizeof(one));
  static_cast<void>(written);
}

}  // namespace chorus
