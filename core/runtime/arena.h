// Arenas: shared memory that a client maps, staging (client-writable) or result (daemon-written).
//
// Threads: the node thread, but for ArenaIds. Ownership: arenas are shared by the buffers that
// stand in them (buffer.h). Errors: said at each function; a failed call leaves nothing behind.
#ifndef CHORUS_CORE_RUNTIME_ARENA_H_
#define CHORUS_CORE_RUNTIME_ARENA_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/ids.h"
#include "core/base/mutex.h"
#include "core/base/unique_fd.h"
#include "core/runtime/arena_memory.h"
#include "core/runtime/budget.h"
#include "core/runtime/held_files.h"

namespace chorus {

class MemoryGuard;
class MemoryThread;

// What takes milliseconds or ends later, done elsewhere. Null: the calling thread does it; what
// clients still hold is not looked after; what is charged may be taken. All outlive all arenas.
struct ArenaHelpers {
  MemoryThread* thread = nullptr;  // touches new arenas and unmaps old ones
  HeldFiles* held = nullptr;       // takes those that clients still hold
  MemoryGuard* guard = nullptr;    // looks whether the kernel may be asked for one more
};

// Names for arenas: counted up, and when all have been used, again from the first that is free. An
// attacker gets there within hours. Threads: any.
class ArenaIds {
 public:
  // Names are 1 to `most`; no more than that may be taken at a time.
  explicit ArenaIds(int32_t most = std::numeric_limits<int32_t>::max()) : most_(most) {}
  ArenaId Take();
  void Free(ArenaId id);

 private:
  const int32_t most_;
  Mutex mutex_;
  int32_t last_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_set<int32_t> taken_ ABSL_GUARDED_BY(mutex_);
};

// A memfd and its mapping in the daemon. Sealed so that no truncation can make the daemon's
// reads fault, and nothing can write that should not:
//   staging: SHRINK|GROW from its creation; the daemon maps it for reading only, and once more for
//            the outputs that are to go there: a kernel that writes to its input faults. The client
//            maps it for writing, seals it (SealMapped) and says so: ConfirmMapped(). The daemon
//            would wait for a client that does something long with the file, as sealing it does,
//            and for one that takes pages out, which it can until then.
//   result:  the daemon maps it for writing, then FUTURE_WRITE|SHRINK|GROW|SEAL, all before fd()
//            can be had.
// Clients get a descriptor of their own, of a result arena for reading only. It exposes the whole
// file: arenas never hold bytes of two tenants. Pages that a client has cannot be taken from it, so
// they stay charged as long as a process has them, wherever the descriptor went.
class Arena {
 public:
  // What it takes to make one (core/base/work.h): 20 us for its calls of the system, three times
  // that while another thread touches memory.
  static constexpr int64_t kWorkToMake = 350;

  enum class Kind : uint8_t { kStaging = 0, kResult = 1 };

  // Charged to `budget` while it lives, or clients hold it, with its descriptor; `bytes` are
  // rounded up to whole pages. INVALID_ARGUMENT: `bytes` is not positive. RESOURCE_EXHAUSTED: the
  // budget, the guard, or the kernel's limits (descriptors, mappings, memory).
  static absl::StatusOr<std::shared_ptr<Arena>> CreateStaging(const BudgetRef& budget,
                                                              int64_t bytes,
                                                              const ArenaHelpers& helpers = {});
  static absl::StatusOr<std::shared_ptr<Arena>> CreateResult(const BudgetRef& budget, int64_t bytes,
                                                             const ArenaHelpers& helpers = {});
  // Memory that clients still map stays with the kernel until they unmap it.
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  ArenaId id() const { return id_; }
  Kind kind() const { return kind_; }
  int64_t bytes() const { return memory_->bytes(); }
  int fd() const { return memory_->fd(); }  // the arena's own
  // What clients get; made at the first call, and the arena's. RESOURCE_EXHAUSTED: the kernel's
  // limit of descriptors.
  absl::StatusOr<int> ClientFd();
  char* data() const { return memory_->data(); }          // of staging, for reading only
  char* writable() const { return memory_->writable(); }  // the same pages
  const std::shared_ptr<const ArenaMemory>& memory() const { return memory_; }

  // Staging: the client has mapped and sealed it. INVALID_ARGUMENT: it has not sealed it. A second
  // call does nothing.
  absl::Status ConfirmMapped();
  // A client has it (ClientFd).
  bool is_shared() const { return client_fd_.valid(); }
  // Whether touching or unmapping it may wait for a client.
  bool may_change() const { return kind_ == Kind::kStaging && is_shared() && !confirmed_; }

 private:
  Arena(Charge bytes, Charge descriptor, const ArenaHelpers& helpers, Kind kind,
        std::shared_ptr<const ArenaMemory> memory);
  static absl::StatusOr<std::shared_ptr<Arena>> Create(const BudgetRef& budget, int64_t bytes,
                                                       const ArenaHelpers& helpers, Kind kind);

  Charge charged_bytes_;
  Charge charged_descriptor_;
  const ArenaHelpers helpers_;
  const Kind kind_;
  const ArenaId id_;
  std::shared_ptr<const ArenaMemory> memory_;
  UniqueFd client_fd_;
  bool confirmed_ = false;
};

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_ARENA_H_
