// Where the memory of results comes from, and goes back to.
//
//   ArenaSet       the result arenas of one tenant: allocates buffers
//   DeviceSet      the same for memory that the host cannot address
//
// Threads: everything here belongs to the node thread. Ownership: a set owns its arenas; buffers
// may outlive an ArenaSet's handle, not a DeviceSet. Errors: RESOURCE_EXHAUSTED kOutOfMemory.
#ifndef CHORUS_CORE_RUNTIME_MEMORY_H_
#define CHORUS_CORE_RUNTIME_MEMORY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "core/backend/backend.h"
#include "core/base/ids.h"
#include "core/base/release_queue.h"
#include "core/runtime/arena.h"
#include "core/runtime/budget.h"
#include "core/runtime/buffer.h"
#include "core/runtime/devices.h"
#include "core/runtime/size_class.h"

namespace chorus {

class ArenaSet;

// An arena set that its owner has left, and that has arenas to give back.
class LeftSet {
 public:
  LeftSet() = default;
  // As long as the slice has time. Whether all of it is back; then the set may be gone.
  bool Release();

 private:
  friend class ArenaSet;
  explicit LeftSet(ArenaSet* set) : set_(set) {}

  ArenaSet* set_ = nullptr;
};
// A tenant may have left ten thousand arenas, each some calls of the system.
using LeftSets = ReleaseQueue<LeftSet>;

struct ArenaSetOptions {
  int64_t first_arena_bytes = int64_t{1} << 20;
  // Arenas double with what the set has, up to this. A buffer of more than a quarter of the next
  // arena gets an arena of its own, which does not count for the next one's size when it is large.
  int64_t largest_arena_bytes = int64_t{32} << 20;
  ArenaHelpers helpers;
  // Takes the set when its owner has left it and no slice has had the time to give back its arenas;
  // outlives it. Null: they are given back at once.
  LeftSets* left = nullptr;
};

// The result arenas of one tenant. Its memory is never another set's: it goes back to the kernel
// with the set.
//
// Sizes come in classes (size_class.h); those of 32 KiB and more are whole pages on page
// boundaries. A returned buffer waits for the next of its class, on a shelf: that has the free
// buffers of one class and one arena, so that an arena goes without a look at each of them.
class ArenaSet final : private BufferHome {
 public:
  // The owner's handle. Buffers may outlive it: then each arena goes with its last buffer, as soon
  // as a slice has the time (ArenaSetOptions::left), and stays charged until then.
  struct Orphan {
    void operator()(ArenaSet* set) const { set->Leave(); }
  };
  using Ptr = std::unique_ptr<ArenaSet, Orphan>;

  // Its arenas are charged to `budget`, and the rows of their buffers, which stay as long as these
  // do, but for the first kFreeRows.
  static constexpr int64_t kFreeRows = 256;
  static Ptr Create(BudgetRef budget, const ArenaSetOptions& options = {});

  // A buffer of `bytes` (0 is allowed), aligned to 64 B or to a page, in state kResult. What stands
  // in it is unspecified. RESOURCE_EXHAUSTED as for arenas.
  absl::StatusOr<BufferRef> Allocate(int64_t bytes);

  // The arena of that id, if it is this set's; the right to read it is the right to read the set.
  Arena* Find(ArenaId id) const;
  // Gives back arenas without a buffer in use, so many at most; returns how many bytes.
  int64_t Trim(size_t most = std::numeric_limits<size_t>::max());

  int64_t live_buffers() const { return live_; }
  int64_t arena_bytes() const { return arena_bytes_; }
  // What is charged for the next buffers: all that is not in use of the arenas, and rows.
  int64_t idle_bytes() const;

 private:
  friend class LeftSet;
  // The free buffers of one class in one block. Those that have any are in the class's list.
  struct Block;
  struct Shelf {
    Block* block = nullptr;
    int size_class = 0;
    int64_t class_bytes = 0;
    Buffer* free = nullptr;
    Shelf* before = nullptr;
    Shelf* next = nullptr;
  };
  // An arena and what has been cut from it.
  struct Block {
    std::shared_ptr<Arena> arena;
    int64_t used = 0;    // bytes cut off so far
    bool grows = false;  // counts for the size of the next arena
    int64_t live = 0;    // buffers in use
    std::list<Block>::iterator at;
    absl::flat_hash_map<int, std::unique_ptr<Shelf>> shelves;  // by class
    std::shared_ptr<std::deque<Buffer>> buffers = std::make_shared<std::deque<Buffer>>();
  };

  ArenaSet(BudgetRef budget, const ArenaSetOptions& options);
  ~ArenaSet();
  void Return(Buffer* buffer) override;
  void Leave();
  // Of one that was left: gives back what is not in use, now or in its turn.
  void GiveBack();
  bool GiveBackSome();  // LeftSet::Release
  int64_t NextArenaBytes() const;
  absl::StatusOr<Block*> AddBlock(int64_t bytes, bool shared);
  Buffer* Cut(Block* block, int size_class, int64_t class_bytes);
  void Link(Shelf* shelf);
  void Unlink(Shelf* shelf);
  void Drop(Block* block);
  absl::Status ChargeRow();
  absl::StatusOr<Buffer*> Grow(int size_class, int64_t class_bytes);
  // The next arena is made while the current one is in use, so that it has been touched when its
  // turn comes. Without a thread that would only be early, and a full budget is not for guesses.
  void PrepareSpare();

  const BudgetRef budget_;
  const ArenaSetOptions options_;
  std::array<Shelf*, SizeClass::kCount> shelves_{};  // the first of each class
  std::list<Block> blocks_;                          // with buffers in use
  std::list<Block> empty_;                           // without
  Block* current_ = nullptr;                         // small buffers are cut from it
  Block* spare_ = nullptr;                           // takes over when it is full: touched by then
  int64_t live_ = 0;
  int64_t live_bytes_ = 0;  // by their classes
  int64_t arena_bytes_ = 0;
  int64_t growing_bytes_ = 0;  // of arenas that count for the size of the next
  int64_t rows_ = 0;
  std::vector<Charge> charged_rows_;  // each for kFreeRows
  bool orphaned_ = false;
  bool has_turn_ = false;  // it is among options_.left
};

// Memory of one device that the host cannot address. `devices` must outlive it and its buffers.
class DeviceSet final : private BufferHome {
 public:
  DeviceSet(Devices* devices, int device) : devices_(devices), device_(device) {}
  // Every buffer must be back.
  ~DeviceSet() = default;
  DeviceSet(const DeviceSet&) = delete;
  DeviceSet& operator=(const DeviceSet&) = delete;

  // What a buffer is charged beside its bytes, by a count that has 16 bytes for each block of the
  // heap: 150 for itself; where another process has the devices, 260 for its address, with a hole
  // beside it, and, as long as that process takes nothing, 120 for what tells it of the memory, and
  // 470 for an upload and what is called when that ends. (Where the devices are lost, what says so
  // of the upload takes up to 250 more than what waited.) When the buffer goes, this stays charged
  // and leaves until that process has been told: 120, and 40 here. One number for all: a charge of
  // its own would cost each upload another 100 bytes.
  static constexpr int64_t kBytesPerBuffer = 1280;

  // As ArenaSet::Allocate, charged to `budget`; arena() is 0 and host() null. RESOURCE_EXHAUSTED:
  // the budget or the device.
  absl::StatusOr<BufferRef> Allocate(const BudgetRef& budget, int64_t bytes);
  // Gives back what is charged for buffers of which the devices have been told that they have gone.
  // Whether there were any.
  bool Settle();
  int64_t live_buffers() const { return live_; }

 private:
  void Return(Buffer* buffer) override;

  Devices* const devices_;
  const int device_;
  int64_t live_ = 0;
  std::deque<std::pair<int64_t, Charge>> leaving_;  // each with its number (Devices::Free)
};

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_MEMORY_H_
