// Arenas and buffers: where bytes stand, who may write them and when they go.
//
//   Arena          one memfd and its mapping, staging (client-writable) or result (daemon-written)
//   ArenaSet       the result arenas of one world (or of a session without one): allocates buffers
//   DeviceSet      the same for memory that the host cannot address
//   Buffer         a counted range of an arena or of device memory, held by BufferRef
//   MemoryThread   touches new arenas and unmaps old ones, which take milliseconds
//   HeldArenas     those that are gone here, while clients still hold their pages
//
// Threads: everything here belongs to the node thread; a Buffer's reference count is plain. Only
// MemoryThread has a thread of its own, and it touches nothing but mappings.
#ifndef CHORUS_CORE_RUNTIME_MEMORY_H_
#define CHORUS_CORE_RUNTIME_MEMORY_H_

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "core/backend/backend.h"
#include "core/base/ids.h"
#include "core/base/mutex.h"
#include "core/base/unique_fd.h"
#include "core/runtime/budget.h"
#include "core/runtime/size_class.h"

namespace chorus {

class ArenaSet;
class HeldArenas;
class MemoryThread;

// What takes milliseconds or ends later, done elsewhere. Null: the calling thread does it; what
// clients still hold is not looked after. Both outlive all arenas.
struct ArenaHelpers {
  MemoryThread* thread = nullptr;  // touches new arenas and unmaps old ones
  HeldArenas* held = nullptr;      // takes those that clients still hold
};

// A file and its mapping; both go with the object.
class ArenaMemory {
 public:
  // `fd` was opened by the file's name: what memfd_create gives does not count as an opener.
  ArenaMemory(UniqueFd fd, char* data, int64_t bytes)
      : fd_(std::move(fd)), data_(data), bytes_(bytes) {}
  ~ArenaMemory();
  ArenaMemory(const ArenaMemory&) = delete;
  ArenaMemory& operator=(const ArenaMemory&) = delete;
  int fd() const { return fd_.get(); }
  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // Gives every page memory, without changing what is there: safe beside readers and writers.
  // A page that the kernel refuses is left for its first use.
  void Touch(int64_t offset, int64_t bytes) const;
  // Whether somebody has another descriptor of the file, or maps it by one. The kernel knows: it
  // gives a write lease to an only opener. Where it gives none to anybody: false.
  bool IsHeldByOthers() const;

 private:
  const UniqueFd fd_;
  char* const data_;
  const int64_t bytes_;
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

// A memfd and its mapping in the daemon. Sealed so that nobody's truncation can make the daemon's
// reads fault, and nobody but those who should can write:
//   staging: SHRINK|GROW from its creation; the daemon maps it for reading only. The client maps it
//            for writing, says so, and ConfirmMapped() adds FUTURE_WRITE|SEAL.
//   result:  the daemon maps it for writing, then FUTURE_WRITE|SHRINK|GROW|SEAL, all before fd()
//   can
//            be had.
// Clients get a descriptor of their own, of a result arena for reading only. It exposes the whole
// file: arenas never hold bytes of two tenants. Pages that a client has cannot be taken from it, so
// they stay charged as long as anybody has them, wherever the descriptor went.
class Arena {
 public:
  enum class Kind : uint8_t { kStaging = 0, kResult = 1 };

  // Charged to `budget` while it lives, or clients hold it, with its descriptor; `bytes` are
  // rounded up to whole pages. INVALID_ARGUMENT: `bytes` is not positive. RESOURCE_EXHAUSTED: the
  // budget, or the kernel's limits (descriptors, mappings, memory).
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
  char* data() const { return memory_->data(); }
  const std::shared_ptr<const ArenaMemory>& memory() const { return memory_; }

  // Staging: the client has mapped it. INVALID_ARGUMENT: the client put a seal of its own on the
  // file, so that ours do not hold; give the arena up. A second call does nothing.
  absl::Status ConfirmMapped();

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

// Arenas that are gone here while clients hold their pages: these stay with the kernel, and charged
// to whoever had the arena, until nobody has them any more.
class HeldArenas {
 public:
  // `added`, unless null, is told of each.
  explicit HeldArenas(std::function<void()> added = nullptr) : added_(std::move(added)) {}
  HeldArenas(const HeldArenas&) = delete;
  HeldArenas& operator=(const HeldArenas&) = delete;

  void Add(std::shared_ptr<const ArenaMemory> memory, Charge bytes, Charge descriptor,
           MemoryThread* thread);
  // Looks whether at most so many of them are held, in turns, and lets go of those that are not.
  void Look(size_t count);
  size_t size() const { return held_.size(); }
  int64_t bytes() const { return bytes_; }

 private:
  struct Held {
    std::shared_ptr<const ArenaMemory> memory;
    Charge bytes;
    Charge descriptor;
    MemoryThread* thread = nullptr;
  };
  const std::function<void()> added_;
  int64_t bytes_ = 0;
  std::deque<Held> held_;  // the one that was looked at last is the last
};

class Buffer;

// A counted handle on a buffer; null when default-made or moved from.
class BufferRef {
 public:
  BufferRef() = default;
  BufferRef(const BufferRef& other) : buffer_(other.buffer_) { Acquire(); }
  BufferRef(BufferRef&& other) noexcept : buffer_(other.buffer_) { other.buffer_ = nullptr; }
  BufferRef& operator=(BufferRef other) noexcept {
    std::swap(buffer_, other.buffer_);
    return *this;
  }
  ~BufferRef() { reset(); }

  inline void reset();
  Buffer* get() const { return buffer_; }
  Buffer* operator->() const { return buffer_; }
  Buffer& operator*() const { return *buffer_; }
  explicit operator bool() const { return buffer_ != nullptr; }
  friend bool operator==(const BufferRef& a, const BufferRef& b) { return a.buffer_ == b.buffer_; }
  friend bool operator!=(const BufferRef& a, const BufferRef& b) { return !(a == b); }

 private:
  friend class ArenaSet;
  friend class DeviceSet;
  friend class Buffer;
  struct Adopt {};
  BufferRef(Buffer* buffer, Adopt) : buffer_(buffer) {}
  inline void Acquire();

  Buffer* buffer_ = nullptr;
};

// Takes buffers back when their last reference has gone.
class BufferHome {
 public:
  virtual void Return(Buffer* buffer) = 0;

 protected:
  ~BufferHome() = default;
};

// A counted range of an arena, or of device memory.
class Buffer {
 public:
  enum class State : uint8_t {
    kStaging = 0,  // the client may still write it
    kFrozen = 1,   // holds a client's bytes, copied: nobody writes it any more
    kResult = 2,   // written by the run that made it, by nobody afterwards
  };

  // A range of a staging arena, which it keeps alive. INVALID_ARGUMENT kMalformed: out of bounds.
  static absl::StatusOr<BufferRef> OfStaging(std::shared_ptr<Arena> arena, int64_t offset,
                                             int64_t bytes);

  ArenaId arena() const { return arena_; }    // 0: not in an arena
  int64_t offset() const { return offset_; }  // in its arena
  int64_t bytes() const { return bytes_; }    // as asked for
  State state() const { return state_; }
  void set_state(State state) { state_ = state; }
  DeviceAddress address() const { return address_; }
  // Null when the host cannot address it.
  char* host() const { return arena_.value() == 0 ? nullptr : reinterpret_cast<char*>(address_); }
  // For device memory: a copy that clients can read. Null until set.
  const BufferRef& mirror() const { return mirror_; }
  void set_mirror(BufferRef mirror) { mirror_ = std::move(mirror); }
  int64_t references() const { return references_; }

 private:
  friend class BufferRef;
  friend class ArenaSet;
  friend class DeviceSet;
  friend class StagingHome;

  BufferHome* home_ = nullptr;
  DeviceAddress address_ = 0;
  int64_t offset_ = 0;
  int64_t bytes_ = 0;
  int64_t references_ = 0;
  ArenaId arena_;
  State state_ = State::kResult;
  uint16_t size_class_ = 0;
  BufferRef mirror_;
  void* owner_ = nullptr;        // ArenaSet: its block
  Charge charge_;                // DeviceSet; an ArenaSet's arenas are charged
  Buffer* next_free_ = nullptr;  // ArenaSet: in its class's list
  std::shared_ptr<Arena> keep_;  // staging
};

void BufferRef::Acquire() {
  if (buffer_ != nullptr) ++buffer_->references_;
}
void BufferRef::reset() {
  Buffer* const buffer = buffer_;
  buffer_ = nullptr;
  if (buffer != nullptr && --buffer->references_ == 0) buffer->home_->Return(buffer);
}

struct ArenaSetOptions {
  int64_t first_arena_bytes = int64_t{1} << 20;
  // Arenas double with what the set has, up to this. A buffer of more than a quarter of the next
  // arena gets an arena of its own, which does not count for the next one's size when it is large.
  int64_t largest_arena_bytes = int64_t{32} << 20;
  ArenaHelpers helpers;
};

// The result arenas of one tenant. Its memory is never another
// set's: it goes back to the kernel with the set.
//
// Sizes come in classes (size_class.h); those of 32 KiB and more are whole pages on page
// boundaries. A returned buffer waits in its class's list for the next of that class.
class ArenaSet final : private BufferHome {
 public:
  // The owner's handle. Buffers may outlive it: then each arena goes with its last buffer.
  struct Orphan {
    void operator()(ArenaSet* set) const { set->Leave(); }
  };
  using Ptr = std::unique_ptr<ArenaSet, Orphan>;

  // Its arenas are charged to `budget`.
  static Ptr Create(BudgetRef budget, const ArenaSetOptions& options = {});

  // A buffer of `bytes` (0 is allowed), aligned to 64 B or to a page, in state kResult. What stands
  // in it is unspecified. RESOURCE_EXHAUSTED as for arenas.
  absl::StatusOr<BufferRef> Allocate(int64_t bytes);

  // The arena of that id, if it is this set's; the right to read it is the right to read the set.
  Arena* Find(ArenaId id) const;
  // Gives back every arena without a buffer in use; returns how many bytes.
  int64_t Trim();

  int64_t live_buffers() const { return live_; }
  int64_t arena_bytes() const { return arena_bytes_; }

 private:
  // An arena and what has been cut from it.
  struct Block {
    std::shared_ptr<Arena> arena;
    int64_t used = 0;    // bytes cut off so far
    bool grows = false;  // counts for the size of the next arena
    int64_t live = 0;    // buffers in use
    std::deque<Buffer> buffers;
  };

  ArenaSet(BudgetRef budget, const ArenaSetOptions& options);
  ~ArenaSet();
  void Return(Buffer* buffer) override;
  void Leave();
  int64_t NextArenaBytes() const;
  absl::StatusOr<Block*> AddBlock(int64_t bytes, bool shared);
  Buffer* Cut(Block* block, int size_class, int64_t class_bytes);
  absl::StatusOr<Buffer*> Grow(int size_class, int64_t class_bytes);

  const BudgetRef budget_;
  const ArenaSetOptions options_;
  std::array<Buffer*, SizeClass::kCount> free_{};
  std::vector<std::unique_ptr<Block>> blocks_;
  Block* current_ = nullptr;  // small buffers are cut from it
  Block* spare_ = nullptr;    // takes over when it is full: touched by then
  int64_t live_ = 0;
  int64_t arena_bytes_ = 0;
  int64_t growing_bytes_ = 0;  // of arenas that count for the size of the next
  bool orphaned_ = false;
};

// Memory of one device that the host cannot address. `device` must outlive it and its buffers.
class DeviceSet final : private BufferHome {
 public:
  explicit DeviceSet(Device* device) : device_(device) {}
  // Every buffer must be back.
  ~DeviceSet() = default;
  DeviceSet(const DeviceSet&) = delete;
  DeviceSet& operator=(const DeviceSet&) = delete;

  // As ArenaSet::Allocate, charged to `budget`; arena() is 0 and host() null. RESOURCE_EXHAUSTED:
  // the budget or the device.
  absl::StatusOr<BufferRef> Allocate(const BudgetRef& budget, int64_t bytes);
  int64_t live_buffers() const { return live_; }

 private:
  void Return(Buffer* buffer) override;

  Device* const device_;
  int64_t live_ = 0;
};

// Does for the node thread what would stall it: the first touch of 64 MiB takes 40 ms, unmapping
// them several. Threads: any; the destructor finishes what was asked for.
class MemoryThread {
 public:
  MemoryThread();
  ~MemoryThread();
  MemoryThread(const MemoryThread&) = delete;
  MemoryThread& operator=(const MemoryThread&) = delete;

  // Touches all of it, unless it is disposed of first.
  void Touch(std::shared_ptr<const ArenaMemory> memory);
  // Drops this reference on the thread.
  void Dispose(std::shared_ptr<const ArenaMemory> memory);
  // Waits until everything asked for so far is done.
  void Drain();

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_MEMORY_H_
