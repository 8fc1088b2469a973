#include "core/runtime/arena.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/base/error.h"
#include "core/base/shared_file.h"
#include "core/base/work.h"
#include "core/runtime/memory_guard.h"
#include "core/runtime/memory_thread.h"
#include "core/runtime/size_class.h"

namespace chorus {
namespace {

absl::Status OutOfMemory(absl::string_view what, int64_t bytes, int error) {
  return MakeError(Reason::kOutOfMemory, absl::StrCat("the kernel gives no arena of ", bytes,
                                                      " bytes: ", what, ": ", strerror(error)));
}

// By the guard, of what is charged by now. What is kept for reuse is not given back for it: whoever
// keeps pages where nobody sees them would soon have that as well, and its owner nothing to go on
// with.
absl::Status Admit(const Budget& budget, int64_t bytes, const ArenaHelpers& helpers) {
  if (helpers.guard == nullptr) return absl::OkStatus();
  const int64_t untouched = helpers.thread == nullptr ? 0 : helpers.thread->untouched_bytes();
  absl::Status admitted = helpers.guard->Admit(bytes, untouched, budget.charged_in_all() - bytes);
  const bool has_more_soon = !admitted.ok() && budget.share().leaving() > 0;
  return has_more_soon ? ForNow(std::move(admitted)) : admitted;
}

// Arenas are named once for the process, so that an id alone tells a client what to map.
ArenaIds& IdsOfArenas() {
  static auto* const ids = new ArenaIds();
  return *ids;
}

}  // namespace

// --- ArenaIds ---

ArenaId ArenaIds::Take() {
  MutexLock lock(&mutex_);
  do {
    last_ = last_ == most_ ? 1 : last_ + 1;
  } while (!taken_.insert(last_).second);
  return ArenaId(last_);
}

void ArenaIds::Free(ArenaId id) {
  MutexLock lock(&mutex_);
  taken_.erase(id.value());
}

// --- Arena ---

Arena::Arena(Charge bytes, Charge descriptor, const ArenaHelpers& helpers, Kind kind,
             std::shared_ptr<const ArenaMemory> memory)
    : charged_bytes_(std::move(bytes)),
      charged_descriptor_(std::move(descriptor)),
      helpers_(helpers),
      kind_(kind),
      id_(IdsOfArenas().Take()),
      memory_(std::move(memory)) {}

Arena::~Arena() {
  constexpr int64_t kWork = 32;  // calls of the system
  CountWork(kWork);
  IdsOfArenas().Free(id_);
  const Budget& budget = charged_bytes_.budget();  // as long as anybody has that charge
  if (client_fd_.valid() && helpers_.held != nullptr) {
    const bool may_still_change = may_change();
    client_fd_.Reset();
    helpers_.held->Add(memory_->file(), may_still_change ? memory_ : nullptr, &charged_bytes_,
                       &charged_descriptor_);
  }
  if (helpers_.thread == nullptr) return;
  helpers_.thread->Dispose(budget, std::move(memory_));
  // Unless they are charged as long as clients hold the pages.
  helpers_.thread->Leave(std::move(charged_bytes_));
  helpers_.thread->Leave(std::move(charged_descriptor_));
}

absl::StatusOr<int> Arena::ClientFd() {
  if (!client_fd_.valid()) {
    client_fd_ = OpenAgain(fd(), kind_ == Kind::kStaging ? O_RDWR : O_RDONLY);
    if (!client_fd_.valid()) {
      return MakeError(Reason::kQuota, absl::StrCat("no descriptor for arena ", id_.value(), ": ",
                                                    strerror(errno)));
    }
  }
  return client_fd_.get();
}

absl::StatusOr<std::shared_ptr<Arena>> Arena::Create(const BudgetRef& budget, int64_t bytes,
                                                     const ArenaHelpers& helpers, Kind kind) {
  if (bytes <= 0 || bytes > SizeClass::kLargestBytes) {
    return Malformed(
        absl::StrCat("an arena has 1 to ", SizeClass::kLargestBytes, " bytes, not ", bytes));
  }
  bytes = RoundUp(bytes, PageBytes());
  const Resource resource =
      kind == Kind::kStaging ? Resource::kStagingBytes : Resource::kResultBytes;
  CHORUS_ASSIGN_OR_RETURN(Charge charged, budget->Charge(Domain::kHost, resource, bytes));
  // The arena's own, and its clients'.
  CHORUS_ASSIGN_OR_RETURN(Charge descriptors,
                          budget->Charge(Domain::kHost, Resource::kDescriptors, 2));
  CHORUS_RETURN_IF_ERROR(Admit(*budget, bytes, helpers));
  CountWork(kWorkToMake);
  const char* const name = kind == Kind::kStaging ? "chorus-staging" : "chorus-result";
  const UniqueFd memory_file(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory_file.valid()) return OutOfMemory("memfd_create", bytes, errno);
  if (ftruncate(memory_file.get(), bytes) != 0) return OutOfMemory("ftruncate", bytes, errno);
  const auto file = std::make_shared<const UniqueFd>(OpenAgain(memory_file.get(), O_RDWR));
  if (!file->valid()) return OutOfMemory("open(/proc/self/fd)", bytes, errno);
  // Mapped before it is sealed: FUTURE_WRITE forbids writable mappings from then on.
  const auto map = [&file, bytes](int protection) {
    void* const at =
        mmap(nullptr, static_cast<size_t>(bytes), protection, MAP_SHARED, file->get(), 0);
    return at == MAP_FAILED ? nullptr : static_cast<char*>(at);
  };
  char* const writable = map(PROT_READ | PROT_WRITE);
  if (writable == nullptr) return OutOfMemory("mmap", bytes, errno);
  char* data = writable;
  if (kind == Kind::kStaging && (data = map(PROT_READ)) == nullptr) {
    const absl::Status status = OutOfMemory("mmap", bytes, errno);
    munmap(writable, static_cast<size_t>(bytes));
    return status;
  }
  auto memory =
      std::make_shared<const ArenaMemory>(file, data, bytes, data == writable ? nullptr : writable);
  const int seals = kind == Kind::kStaging
                        ? F_SEAL_SHRINK | F_SEAL_GROW
                        : F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (fcntl(file->get(), F_ADD_SEALS, seals) != 0) {
    return OutOfMemory("fcntl(F_ADD_SEALS)", bytes, errno);
  }
  return std::shared_ptr<Arena>(
      new Arena(std::move(charged), std::move(descriptors), helpers, kind, std::move(memory)));
}

absl::StatusOr<std::shared_ptr<Arena>> Arena::CreateStaging(const BudgetRef& budget, int64_t bytes,
                                                            const ArenaHelpers& helpers) {
  return Create(budget, bytes, helpers, Kind::kStaging);
}

absl::StatusOr<std::shared_ptr<Arena>> Arena::CreateResult(const BudgetRef& budget, int64_t bytes,
                                                           const ArenaHelpers& helpers) {
  return Create(budget, bytes, helpers, Kind::kResult);
}

absl::Status Arena::ConfirmMapped() {
  if (kind_ != Kind::kStaging || confirmed_) return absl::OkStatus();
  if (!IsSealedMapped(fd())) {
    return Malformed(absl::StrCat("staging arena ", id_.value(),
                                  ": expected the seals FUTURE_WRITE and SEAL, which its client "
                                  "adds when it has mapped it; not all are there"));
  }
  confirmed_ = true;
  return absl::OkStatus();
}

}  // namespace chorus
