// Strong types for every number that names something.
//
// An id of one kind never converts to another, so a world rank cannot be passed where a group rank
// is meant.
//
// Threads: plain values. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_BASE_IDS_H_
#define CHORUS_CORE_BASE_IDS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <ostream>
#include <utility>

namespace chorus {

// A number of one kind. `Tag` is never defined; it only keeps the kinds apart.
template <typename Tag, typename Rep>
class StrongId {
 public:
  using rep = Rep;

  constexpr StrongId() = default;
  constexpr explicit StrongId(Rep value) : value_(value) {}

  constexpr Rep value() const { return value_; }
  // The next of its kind, where they are counted up.
  constexpr StrongId& operator++() {
    ++value_;
    return *this;
  }

  friend constexpr bool operator==(StrongId a, StrongId b) { return a.value_ == b.value_; }
  friend constexpr bool operator!=(StrongId a, StrongId b) { return a.value_ != b.value_; }
  friend constexpr bool operator<(StrongId a, StrongId b) { return a.value_ < b.value_; }
  friend constexpr bool operator<=(StrongId a, StrongId b) { return a.value_ <= b.value_; }
  friend constexpr bool operator>(StrongId a, StrongId b) { return a.value_ > b.value_; }
  friend constexpr bool operator>=(StrongId a, StrongId b) { return a.value_ >= b.value_; }

  template <typename H>
  friend H AbslHashValue(H h, StrongId id) {
    return H::combine(std::move(h), id.value_);
  }
  friend std::ostream& operator<<(std::ostream& os, StrongId id) { return os << +id.value_; }

 private:
  Rep value_{};
};

// A member's index in its world, 0..size-1.
using Rank = StrongId<struct RankTag, int32_t>;
// A member's rank in a group, 0..size-1. Sources, destinations and peers are always group ranks.
using GroupRank = StrongId<struct GroupRankTag, int32_t>;
// Names a group inside its world. Group 0 is the whole world.
using GroupId = StrongId<struct GroupIdTag, int32_t>;
// Counts a world's lives: every failure ends one epoch and opens the next. Starts at 1.
using Epoch = StrongId<struct EpochTag, int64_t>;
// Position of a gang in its world's launch order; ascending. Starts at 1.
using Ticket = StrongId<struct TicketTag, int64_t>;

using SessionId = StrongId<struct SessionIdTag, int64_t>;
using WorldId = StrongId<struct WorldIdTag, int64_t>;
using ArenaId = StrongId<struct ArenaIdTag, int32_t>;
// Names a recorded error; Diagnostics.GetError(id) has all of it. 0: no error.
using ErrorId = StrongId<struct ErrorIdTag, int64_t>;
// A device's index in the daemon's device list.
using DeviceIndex = StrongId<struct DeviceIndexTag, int32_t>;
// Names one run inside the daemon; never reused, never seen by clients.
using RunHandle = StrongId<struct RunHandleTag, int64_t>;
// A command's position in its session's command log, 1, 2, 3 ... It is also the run's id: the
// outcome of a run is asked for by it, and a repeated sequence is answered from the record, not
// executed.
using Sequence = StrongId<struct SequenceTag, int64_t>;

// A name that the client chooses, so that it can use it before any reply. The generation makes a
// reused slot a different name: a late message about the old one cannot touch the new one. After
// the last generation a slot is not used again.
template <typename Tag>
struct SlotId {
  int32_t slot = 0;
  uint32_t generation = 0;

  friend constexpr bool operator==(SlotId a, SlotId b) {
    return a.slot == b.slot && a.generation == b.generation;
  }
  friend constexpr bool operator!=(SlotId a, SlotId b) { return !(a == b); }
  template <typename H>
  friend H AbslHashValue(H h, SlotId id) {
    return H::combine(std::move(h), id.slot, id.generation);
  }
  friend std::ostream& operator<<(std::ostream& os, SlotId id) {
    return os << id.slot << "." << id.generation;
  }
};

using TensorId = SlotId<struct TensorIdTag>;
using GraphId = SlotId<struct GraphIdTag>;

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_IDS_H_
