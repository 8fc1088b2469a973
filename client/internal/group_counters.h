// What a member has called of a group in its step. Positions are names: every call counts once,
// whatever becomes of it.
//
// Threads: the session's lock guards it. Ownership: the group's. Errors: none.
#ifndef CHORUS_CLIENT_INTERNAL_GROUP_COUNTERS_H_
#define CHORUS_CLIENT_INTERNAL_GROUP_COUNTERS_H_

#include <cstdint>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "core/graph/graph.h"

namespace chorus {
namespace internal {

// One end of a pair of members as the member at that end sees it: what it sends to a peer with a
// tag, or receives from it.
struct PairEnd {
  int32_t peer = -1;  // its rank in the group
  bool send = false;
  int64_t tag = 0;

  friend bool operator==(const PairEnd& a, const PairEnd& b) {
    return a.peer == b.peer && a.send == b.send && a.tag == b.tag;
  }
  friend bool operator<(const PairEnd& a, const PairEnd& b) {
    return std::tie(a.peer, a.send, a.tag) < std::tie(b.peer, b.send, b.tag);
  }
  template <typename H>
  friend H AbslHashValue(H h, const PairEnd& e) {
    return H::combine(std::move(h), e.peer, e.send, e.tag);
  }
};

// The end whose calls these are, of a kind that has a peer.
inline PairEnd EndOf(const Collective& collective) {
  return {collective.peer.value(), IsSender(collective.kind), collective.tag};
}

// The group's own calls have one count, each end of a pair has one.
class GroupCounters {
 public:
  int64_t next() const { return next_; }
  // Counts so many calls; where they begin.
  int64_t Count(int64_t calls) { return std::exchange(next_, next_ + calls); }
  int64_t Count(const PairEnd& end, int64_t calls) {
    int64_t& next = ends_[end];
    return std::exchange(next, next + calls);
  }
  // A new step. Ends that had no call in the last one are forgotten: tags that come and go must not
  // fill the table.
  void Reset();

 private:
  int64_t next_ = 0;
  absl::flat_hash_map<PairEnd, int64_t> ends_;  // the next call of each
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_GROUP_COUNTERS_H_
