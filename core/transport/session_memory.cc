#include "core/transport/session_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstring>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/shared_file.h"

namespace chorus {
namespace {

// The size must not change under a mapping: a file that shrinks kills its reader.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

bool IsPowerOfTwo(uint32_t n) { return n != 0 && (n & (n - 1)) == 0; }

absl::Status CheckOptions(const SessionMemoryOptions& options) {
  if (!IsPowerOfTwo(options.ring_bytes) || options.ring_bytes < options.kMinRingBytes ||
      options.ring_bytes > options.kMaxRingBytes) {
    return Malformed(
        absl::StrCat("session memory: expected a ring of a power of two bytes between ",
                     SessionMemoryOptions::kMinRingBytes, " and ",
                     SessionMemoryOptions::kMaxRingBytes, ", got ", options.ring_bytes));
  }
  if (options.tensor_slots == 0 || options.tensor_slots > options.kMaxTensorSlots) {
    return Malformed(absl::StrCat("session memory: expected 1 to ",
                                  SessionMemoryOptions::kMaxTensorSlots, " tensor slots, got ",
                                  options.tensor_slots));
  }
  return absl::OkStatus();
}

absl::Status SystemError(absl::string_view what) {
  return MakeError(Reason::kOutOfMemory,
                   absl::StrCat("session memory: ", what, ": ", std::strerror(errno)));
}

}  // namespace

SessionMemory::SessionMemory(char* base, size_t total_bytes, const SessionMemoryOptions& options,
                             UniqueFd fd)
    : base_(base), total_bytes_(total_bytes), options_(options), fd_(std::move(fd)) {}

SessionMemory::~SessionMemory() { munmap(base_, total_bytes_); }

size_t SessionMemory::TotalBytes(const SessionMemoryOptions& options) {
  const size_t bytes = kRingOffset + options.ring_bytes +
                       static_cast<size_t>(options.tensor_slots) * sizeof(TensorSlot);
  return (bytes + 4095) / 4096 * 4096;
}

absl::StatusOr<std::unique_ptr<SessionMemory>> CreateSessionMemory(
    const SessionMemoryOptions& options) {
  CHORUS_RETURN_IF_ERROR(CheckOptions(options));
  const size_t total_bytes = SessionMemory::TotalBytes(options);
  const UniqueFd memory_fd(memfd_create("chorus-session", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory_fd.valid()) return SystemError("memfd_create");
  if (ftruncate(memory_fd.get(), static_cast<off_t>(total_bytes)) != 0)
    return SystemError("ftruncate");
  if (fcntl(memory_fd.get(), F_ADD_SEALS, kSeals) != 0) return SystemError("sealing");
  UniqueFd fd = OpenAgain(memory_fd.get(), O_RDWR);
  if (!fd.valid()) return SystemError("open(/proc/self/fd)");
  void* base = mmap(nullptr, total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) return SystemError("mmap");
  // For lifetimes that C++ can see; the pages are zero already, and only the first is touched.
  SessionControl* control = new (base) SessionControl;
  control->client.tail.store(0, std::memory_order_relaxed);
  control->client.completion_waiters.store(0, std::memory_order_relaxed);
  control->client.space_waiter.store(0, std::memory_order_relaxed);
  control->daemon.head.store(0, std::memory_order_relaxed);
  control->completion.completed.store(0, std::memory_order_relaxed);
  control->completion.unfinished.store(0, std::memory_order_relaxed);
  control->bell.must_ring.store(0, std::memory_order_relaxed);
  control->header = {kSessionMemoryMagic, kSessionMemoryVersion,
                     options.ring_bytes,  options.tensor_slots,
                     kRunSlots,           total_bytes};
  std::unique_ptr<SessionMemory> memory(
      new SessionMemory(static_cast<char*>(base), total_bytes, options, std::move(fd)));
  if (madvise(base, total_bytes, MADV_DONTFORK) != 0) return SystemError("madvise(DONTFORK)");
  return memory;
}

absl::StatusOr<std::unique_ptr<SessionMemory>> MapSessionMemory(int fd) {
  struct stat file;
  if (fstat(fd, &file) != 0) {
    return Malformed(absl::StrCat("session memory: fstat: ", std::strerror(errno)));
  }
  if (file.st_size < static_cast<off_t>(sizeof(SessionControl))) {
    return Malformed(absl::StrCat("session memory: expected at least ", sizeof(SessionControl),
                                  " bytes, got ", file.st_size));
  }
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    return Malformed(
        "session memory: expected a memfd whose size is sealed, got one that may change");
  }
  const size_t total_bytes = static_cast<size_t>(file.st_size);
  void* base = mmap(nullptr, total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return SystemError("mmap");
  // Nobody takes pages out of it from now on: its other side would have to wait for that.
  if (!SealMapped(fd)) {
    const absl::Status status = SystemError("sealing");
    munmap(base, total_bytes);
    return status;
  }
  const SessionHeader header = reinterpret_cast<const SessionControl*>(base)->header;
  const SessionMemoryOptions options{header.ring_bytes, header.tensor_slots};
  // Unmaps on every way out from here.
  std::unique_ptr<SessionMemory> memory(
      new SessionMemory(static_cast<char*>(base), total_bytes, options, UniqueFd()));
  if (header.magic != kSessionMemoryMagic) {
    return Malformed(absl::StrCat("session memory: expected magic ", absl::Hex(kSessionMemoryMagic),
                                  ", got ", absl::Hex(header.magic)));
  }
  if (header.version != kSessionMemoryVersion) {
    return MakeError(Reason::kVersion,
                     absl::StrCat("session memory: this client speaks layout version ",
                                  kSessionMemoryVersion, ", the daemon version ", header.version,
                                  "; use a client and a daemon of the same release"));
  }
  CHORUS_RETURN_IF_ERROR(CheckOptions(options));
  if (header.run_slots != kRunSlots || header.total_bytes != total_bytes ||
      SessionMemory::TotalBytes(options) != total_bytes) {
    return Malformed(absl::StrCat("session memory: expected ", SessionMemory::TotalBytes(options),
                                  " bytes and ", kRunSlots, " run records, got ", total_bytes,
                                  " bytes (header: ", header.total_bytes, ") and ",
                                  header.run_slots, " run records"));
  }
  if (madvise(base, total_bytes, MADV_DONTFORK) != 0) return SystemError("madvise(DONTFORK)");
  return memory;
}

}  // namespace chorus
