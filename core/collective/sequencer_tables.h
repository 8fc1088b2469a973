// The sequencer's tables: what it knows of members, groups, instances, runs, tapes and gangs.
//
// Its own, in a header only because it is a value: its holders must be able to copy it. Rows name
// each other by number, so that a copy of the tables is a copy of the state.
//
// Threads: thread-compatible, with the sequencer that holds them. Ownership: a Pool has its rows;
// templates of votes, labels and errors are shared, and never change. Errors: none; rows must
// exist.
#ifndef CHORUS_CORE_COLLECTIVE_SEQUENCER_TABLES_H_
#define CHORUS_CORE_COLLECTIVE_SEQUENCER_TABLES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/base/block_vector.h"
#include "core/base/ids.h"
#include "core/base/split_hash_map.h"
#include "core/collective/instance.h"
#include "core/collective/vote.h"

namespace chorus {

struct MemberInfo {
  int32_t pid = -1;  // for culprits; of the trainer
  std::string node;
};

namespace sequencer_tables {

inline constexpr int32_t kNone = -1;

// Numbers the searches through components. There is one for each call that fails alone: in 32 bits
// they would come again within a day, and a row that has kept an old one would not be searched.
using SearchNumber = int64_t;

// A table whose rows are named by number and used again: a copy of it is a copy of the state, and
// nothing is allocated once it has been as large as it gets. Row references end at New().
template <typename T>
class Pool {
 public:
  int32_t New() {
    if (free_.empty()) {
      rows_.emplace_back();
      return end() - 1;
    }
    const int32_t row = free_.back();
    free_.pop_back();
    return row;
  }
  void Free(int32_t row) { free_.push_back(row); }
  T& operator[](int32_t row) { return rows_[static_cast<size_t>(row)]; }
  const T& operator[](int32_t row) const { return rows_[static_cast<size_t>(row)]; }
  size_t size() const { return rows_.size() - free_.size(); }
  // All rows are below, free ones too.
  int32_t end() const { return static_cast<int32_t>(rows_.size()); }

  // Rows in a list by their own links.
  struct Chain {
    int32_t head = kNone;
    int32_t tail = kNone;
  };
  void Append(Chain* chain, int32_t row) {
    T& added = (*this)[row];
    added.previous = chain->tail;
    added.next = kNone;
    (chain->tail == kNone ? chain->head : (*this)[chain->tail].next) = row;
    chain->tail = row;
  }
  // Between two that stand next to each other; kNone: at an end.
  void Insert(Chain* chain, int32_t previous, int32_t next, int32_t row) {
    (*this)[row].previous = previous;
    (*this)[row].next = next;
    (previous == kNone ? chain->head : (*this)[previous].next) = row;
    (next == kNone ? chain->tail : (*this)[next].previous) = row;
  }
  void Remove(Chain* chain, int32_t row) {
    const int32_t previous = (*this)[row].previous;
    const int32_t next = (*this)[row].next;
    (previous == kNone ? chain->head : (*this)[previous].next) = next;
    (next == kNone ? chain->tail : (*this)[next].previous) = previous;
  }
  // All of `from` behind `to`.
  void Splice(Chain* to, Chain* from) {
    if (from->head == kNone) return;
    if (to->head == kNone) return std::swap(*to, *from);
    (*this)[to->tail].next = from->head;
    (*this)[from->head].previous = to->tail;
    to->tail = from->tail;
    *from = {};
  }

 private:
  BlockVector<T> rows_;
  std::vector<int32_t> free_;
};

// One end of a pair.
struct PairEnd {
  GroupId group;
  GroupRank source;
  GroupRank destination;
  int64_t tag = 0;
  bool is_recv = false;
  friend bool operator==(const PairEnd& a, const PairEnd& b) {
    return a.group == b.group && a.source == b.source && a.destination == b.destination &&
           a.tag == b.tag && a.is_recv == b.is_recv;
  }
  template <typename H>
  friend H AbslHashValue(H h, const PairEnd& e) {
    return H::combine(std::move(h), e.group, e.source, e.destination, e.tag, e.is_recv);
  }
};

// How far a member has counted in a group, or at an end of a pair.
struct Counter {
  CallPosition next;  // of an earlier step than the member's: it has made no call in its step
  std::string last;   // the end of the last call's line, for texts
};

// An entry of a tape, by its row and seat.
struct EntryRef {
  int32_t tape = kNone;
  int32_t seat = kNone;
  friend bool operator==(const EntryRef& a, const EntryRef& b) {
    return a.tape == b.tape && a.seat == b.seat;
  }
  template <typename H>
  friend H AbslHashValue(H h, const EntryRef& e) {
    return H::combine(std::move(h), e.tape, e.seat);
  }
};

struct Member {
  enum class State : uint8_t { kHere, kLeft, kDead };
  State state = State::kHere;
  std::string how_dead;
  MemberInfo info;
  int64_t step = 0;                      // the last that it has been heard of in
  bool left_rest = false;                // it takes part in nothing more of that step
  std::string left_rest_text;            // why, for others
  int64_t lacking = 0;                   // pending instances that need its vote
  int64_t lacking_gradients = 0;         // of these
  SplitHashMap<PairEnd, Counter> pairs;  // in `step`
  EntryRef newest_entry;                 // of those that it holds
  // What it held when it was refused a gradient has none any more: this entry and all older ones.
  // They go a few an event; until then they are known by a number of refusals that is not this one.
  EntryRef newest_refused;
  uint32_t refusals = 0;
};

struct Group {
  Group() = default;  // gone with a former membership
  explicit Group(std::vector<Rank> ranks) : members(std::move(ranks)), counters(members.size()) {
    seats.reserve(members.size());
    for (size_t seat = 0; seat < members.size(); ++seat) {
      seats.emplace_back(members[seat], static_cast<int32_t>(seat));
    }
    std::sort(seats.begin(), seats.end());
  }
  // kNone: it is no member.
  int32_t SeatOf(Rank rank) const {
    const auto at = std::lower_bound(seats.begin(), seats.end(), std::make_pair(rank, int32_t{0}));
    return at == seats.end() || at->first != rank ? kNone : at->second;
  }

  std::vector<Rank> members;
  std::vector<Counter> counters;                // by member
  std::vector<std::pair<Rank, int32_t>> seats;  // by rank
  Rank dead{-1};                                // the first member that died
  size_t not_members = 0;  // of all ranks that have died, the first so many are none of its members
};

// What has come for a seat (SeatOf in vote.h).
struct Seat {
  int32_t run = kNone;
  int32_t participation = kNone;
  bool absent = false;  // it abandoned this gradient
};
// Pending: a collective, or a list of them, which follow each other in the programs of all its
// members and in which nobody has asked for more of one than of the others.
struct Instance {
  InstanceKey key;  // of a list's first call
  int32_t count = 1;
  bool by_parts = false;  // the others are parts of the same call
  int32_t component = kNone;
  int32_t missing = 0;
  int32_t tape = kNone;       // its own
  int32_t parent = kNone;     // a gradient's: tape of the instance that it is asked of
  int32_t child = kNone;      // a gradient's: its index in the children of `parent`
  int32_t first = kNone;      // seat of the first vote
  int32_t mark = kNone;       // scratch of the gang's order
  bool rows_differ = false;   // somebody has voted with pieces of different rows
  int32_t differing = kNone;  // row, if the ranks ask for different things
  int32_t against = kNone;    // then: seat of the first vote that contradicts another
  absl::Time first_vote;
  bool timed = false;        // in timed_
  bool indexed = false;      // in instance_by_sort_key_
  int32_t previous = kNone;  // in timed_, by first vote
  int32_t next = kNone;
  absl::InlinedVector<Seat, 4> seats;  // empty: the row is free; of a list's first call

  // Of each of its calls.
  CallPosition PositionAt(int32_t call) const {
    return call == 0 ? key.at : key.at.Behind(call, by_parts);
  }
  InstanceKey KeyAt(int32_t call) const {
    InstanceKey result = key;
    result.at = PositionAt(call);
    return result;
  }
  bool HasFurtherParts() const { return key.at.part > 0 || (by_parts && count > 1); }
};

// A pending instance of which the ranks ask for different things. In rows of their own: they may be
// gone through for as long as nobody is told, and are small.
struct Differing {
  int32_t instance = kNone;
  absl::Time until;          // then the ranks are told
  int32_t previous = kNone;  // by when that was seen
  int32_t next = kNone;
};

// By which pending instances are sorted: what a member passes in one event stands together, or in
// few such stretches.
struct SortKey {
  bool is_gradient = false;
  int64_t step = 0;      // InstanceKey::step()
  int32_t tape = kNone;  // that it is a gradient of; of a call all of these instead:
  GroupId group;
  GroupRank source{-1};
  GroupRank destination{-1};
  int64_t tag = 0;
  int64_t number = 0;  // of the call, or the request
  int32_t part = 0;

  friend bool operator<(const SortKey& a, const SortKey& b) {
    if (a.is_gradient != b.is_gradient) return b.is_gradient;
    if (a.step != b.step) return a.step < b.step;
    if (a.tape != b.tape) return a.tape < b.tape;
    if (a.group != b.group) return a.group < b.group;
    if (a.source != b.source) return a.source < b.source;
    if (a.destination != b.destination) return a.destination < b.destination;
    if (a.tag != b.tag) return a.tag < b.tag;
    return a.number != b.number ? a.number < b.number : a.part < b.part;
  }
};

// By which pending lists are sorted, each by its first call.
struct ListKey {
  bool by_parts = false;
  GroupId group;
  CallPosition at;

  friend bool operator<(const ListKey& a, const ListKey& b) {
    if (a.by_parts != b.by_parts) return b.by_parts;
    return a.group != b.group ? a.group < b.group : a.at < b.at;
  }
};

struct PendingRun {
  RunHandle handle;
  std::shared_ptr<const VoteTemplate> what;
  int64_t order = 0;  // of submission
  // Of one that waits for another world, or gets ready for its gang's order; else InfiniteFuture.
  absl::Time due = absl::InfiniteFuture();
  bool externally_blocked = false;
  bool donates = false;
  int64_t size = 0;  // its collectives and results
  int64_t launch_work = 1;
  bool has_dependents = false;  // a pending run, or a gradient, waits for its launch
  // Whether it can follow its gang's order where that is not its program's.
  enum class Reserve : uint8_t { kNotAsked, kAsked, kDone };
  Reserve reserve = Reserve::kNotAsked;
  int32_t component = kNone;
  // The first of its participations that has not been compared with the votes before it, if rows
  // differ there; kNone: all have been.
  int32_t uncompared = kNone;
  int32_t mark = kNone;                       // scratch of the gang's order
  SearchNumber search = 0;                    // the last for which consumers of it have failed
  absl::InlinedVector<int32_t, 2> instances;  // by participation; of a list one for each call
  absl::InlinedVector<RunHandle, 2> producers;
  absl::InlinedVector<int32_t, 2> consumers;  // pending runs of whose producers it is one
  absl::InlinedVector<Rank, 2> ranks;         // that it speaks for
  int32_t previous = kNone;                   // pending runs, by submission
  int32_t next = kNone;
};

// How far one has gone through what a component waits for.
struct Way {
  size_t run = 0;    // of the component
  size_t index = 0;  // of that run's producers; behind the last run, of the component's instances
};

// A gang in the making: runs that share instances, directly or through others.
struct Component {
  absl::InlinedVector<int32_t, 4> runs;  // empty: the row is free
  absl::InlinedVector<int32_t, 4> instances;
  // Votes, over all instances; and its runs that are not compared yet, and instances that differ.
  int64_t missing = 0;
  int64_t size = 0;  // of its runs together
  // What it still waits for: results and forward instances that are pending, worlds of others, and
  // runs that get ready for its order. It may be launched when that is all its own (`inner`), which
  // is known once it is closed and `counted`: that nothing but a Merge changes.
  int64_t awaited = 0;
  int64_t inner = 0;
  Way counted_to;
  bool counted = false;
  SearchNumber mark = 0;    // of the last search that has come to it (search_)
  Way searched_to;          // by that one, where it is for what is late
  SearchNumber circle = 0;  // as `mark`, of the searches for circles
};

struct TapeEntry {
  // kRefused: a gradient that the rank could not take may have used it: there is none any more.
  enum class State : uint8_t { kNotVoted, kLive, kAbandoned, kConsumed, kRefused };
  State state = State::kNotVoted;
  // Of its vote. Whether its part leads further, and then what it was.
  bool recorded = false;
  bool leads_to_collective = false;
  bool leads_to_leaf = false;
  uint32_t refusals = 0;      // of its rank, when it began to be live
  InstanceKey::Request next;  // that the rank has not made
  Epoch consumed_in;
  // Of the newest request, which comes to nothing if that fails; 0: it has come to nothing alone.
  Epoch asked_in{std::numeric_limits<int64_t>::max()};
  // It was used up for what came to nothing, so that what it was to give cannot be had any more.
  bool UsedInVain(Epoch open) const {
    return state == State::kConsumed && std::min(consumed_in, asked_in) < open;
  }
  std::shared_ptr<const PartLabel> label;
  // While live: a list of all that its rank holds.
  EntryRef newer;
  EntryRef older;
};
// What the ranks may still ask of an instance. It exists while a rank holds an entry or a
// gradient is pending.
struct Tape {
  InstanceKey key;
  // Of which `instance` and `children` are rows; they mean nothing where that has ended.
  Epoch pending_in;
  uint32_t incarnation = 0;                   // how many tapes have had this row
  int32_t instance = kNone;                   // while pending
  int32_t live = 0;                           // how many of `entries` are
  absl::InlinedVector<TapeEntry, 4> entries;  // by seat
  absl::InlinedVector<int32_t, 2> children;   // pending gradients
  bool listed = false;                        // in one of the sequencer's two chains of tapes
  int32_t previous = kNone;                   // there
  int32_t next = kNone;
};

// A gang that has been launched and has not finished.
struct OpenGang {
  Ticket ticket;
  Epoch epoch;
  absl::Time launched;
  std::vector<RunHandle> runs;
  absl::optional<InstanceKey> last_of_world;
  // Its first instance as the first voter asks for it, for texts. Null: it has no instance.
  std::shared_ptr<const VoteTemplate> what;
  int32_t participation = kNone;
  int32_t previous = kNone;
  int32_t next = kNone;
};

}  // namespace sequencer_tables
}  // namespace chorus

#endif  // CHORUS_CORE_COLLECTIVE_SEQUENCER_TABLES_H_
