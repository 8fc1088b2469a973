// An instance: one collective as all its ranks see it, the unit of matching.
//
// Threads: plain values and pure functions. Ownership: values; nothing refers to anything else.
// Errors: only decoding fails, see DecodeInstanceKey.
#ifndef CHORUS_CORE_COLLECTIVE_INSTANCE_H_
#define CHORUS_CORE_COLLECTIVE_INSTANCE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/optional.h"
#include "core/base/bytes.h"
#include "core/base/ids.h"
#include "core/graph/graph.h"

namespace chorus {

// Where a call stands in its rank's program: the name of the call, which no failure changes. Only
// World::Step sets `step`, and it only rises; `call` counts the calls that the member has made of
// one group, or at one end of a pair, in the step, the refused and failed ones too. A call that is
// several collectives (coalesced, or a trainer's own memory in pieces) counts once, and `part`
// tells them apart.
struct CallPosition {
  int64_t step = 0;
  int64_t call = 0;
  int32_t part = 0;

  // Of the call so many behind it, or of the part.
  CallPosition Behind(int32_t count, bool by_parts) const {
    return by_parts ? CallPosition{step, call, part + count} : CallPosition{step, call + count, 0};
  }
  // "step 3 call 17", "call 17 part 2": what is 0 is left out, but for the call.
  std::string ToString() const;

  friend bool operator==(const CallPosition& a, const CallPosition& b) {
    return a.call == b.call && a.step == b.step && a.part == b.part;
  }
  friend bool operator!=(const CallPosition& a, const CallPosition& b) { return !(a == b); }
  friend bool operator<(const CallPosition& a, const CallPosition& b) {
    if (a.step != b.step) return a.step < b.step;
    return a.call != b.call ? a.call < b.call : a.part < b.part;
  }
  template <typename H>
  friend H AbslHashValue(H h, const CallPosition& p) {
    return H::combine(std::move(h), p.step, p.call, p.part);
  }
};

// Steps, calls and requests are below this.
inline constexpr int64_t kMaxCallNumber = int64_t{1} << 48;
// A run's calls begin at parts below this.
inline constexpr int32_t kMaxCallPart = int32_t{1} << 30;

// The name of an instance. Every rank computes it alone: no reply is needed to use it, and ranks
// that are not at the same point of their programs never compute the same one.
//   group collective  (group, position of the member's call in the group)
//   send/recv         (group, source, destination, tag, position of the call at either end)
//   gradient          the forward instance's name and the path of requests that leads from it: each
//                     is (step of the request, how many of this entry the member has made before in
//                     that step). Path {2} is the third gradient asked of it, {2, 0} the first
//                     gradient of that gradient. The order of differentiation is the path's length.
// A reformed world counts anew; `since` keeps its names apart from those before.
struct InstanceKey {
  struct Request {
    int64_t step = 0;  // of the rank, when it asks
    int64_t number = 0;

    friend bool operator==(const Request& a, const Request& b) {
      return a.step == b.step && a.number == b.number;
    }
    friend bool operator!=(const Request& a, const Request& b) { return !(a == b); }
    friend bool operator<(const Request& a, const Request& b) {
      return a.step < b.step || (a.step == b.step && a.number < b.number);
    }
    template <typename H>
    friend H AbslHashValue(H h, const Request& r) {
      return H::combine(std::move(h), r.step, r.number);
    }
  };

  GroupId group;
  Epoch since;  // with which this membership of the world began: 1, or a Reform's
  CallPosition at;
  GroupRank source{-1};
  GroupRank destination{-1};
  int64_t tag = 0;
  absl::InlinedVector<Request, 2> path;

  bool is_pair() const { return source.value() >= 0; }
  bool is_gradient() const { return !path.empty(); }
  // The step in which a member asks for it: its own, a gradient's the last request's.
  int64_t step() const { return is_gradient() ? path.back().step : at.step; }
  // The instance that this one is a gradient of. Requires is_gradient().
  InstanceKey Parent() const {
    InstanceKey parent = *this;
    parent.path.pop_back();
    return parent;
  }
  InstanceKey Gradient(Request request) const {
    InstanceKey child = *this;
    child.path.push_back(request);
    return child;
  }
  // "group 0 step 3 call 17", "group 0 from 1 to 2 tag 7 call 0"; then ", gradient 0.1", or
  // ", gradient 0@4.1@4" where it was asked for in step 4. In a world that was reformed at epoch 5
  // "group 0 (since epoch 5) call 0".
  std::string ToString() const;

  friend bool operator==(const InstanceKey& a, const InstanceKey& b) {
    return a.at == b.at && a.group == b.group && a.since == b.since && a.source == b.source &&
           a.destination == b.destination && a.tag == b.tag && a.path == b.path;
  }
  friend bool operator!=(const InstanceKey& a, const InstanceKey& b) { return !(a == b); }
  // Any total order will do: it settles ties in the order of a gang.
  friend bool operator<(const InstanceKey& a, const InstanceKey& b);
  template <typename H>
  friend H AbslHashValue(H h, const InstanceKey& k) {
    return H::combine(std::move(h), k.group, k.since, k.at, k.source, k.destination, k.tag, k.path);
  }
};

// What a key has beside its own size: a path that is longer than what stands in the key itself.
int64_t HeapBytesOf(const InstanceKey& key);

// Calls of one group, or at one end of a pair, that a member has counted without taking part.
struct RefusedCalls {
  GroupId group;
  GroupRank source{-1};  // of a pair, as in InstanceKey
  GroupRank destination{-1};
  int64_t tag = 0;
  bool is_recv = false;  // which end of the pair
  int64_t first = 0;     // in the member's step
  int64_t next = 0;      // the call after them
};

struct RefusedMember {
  Rank rank;
  int64_t step = 0;
  // It is not known what it would have called: it takes part in nothing more until its next step.
  bool rest_of_step = false;
  // What it has recorded before has no gradient any more.
  bool drops_tapes = false;
  std::vector<RefusedCalls> calls;
  std::vector<InstanceKey> gradients;  // requests that count as well
};

// Equal keys give equal bytes.
void EncodeInstanceKey(const InstanceKey& key, ByteWriter* out);
// Bytes that are no key (truncated, a number that is negative or not below kMaxCallNumber, one end
// of a pair without the other, a path longer than kMaxGradientOrder) make `in` fail: in->ok()
// tells.
InstanceKey DecodeInstanceKey(ByteReader* in);

// Unless the daemon is told otherwise (SequencerOptions::max_gang_size): the most collectives and
// results that runs may have which are launched together, those of all ranks counted. Clients cut
// long lists by it.
inline constexpr int64_t kDefaultMaxGangSize = 65536;

// Longest path of a key: gradients of gradients ... of a collective.
inline constexpr size_t kMaxGradientOrder = 64;

// What a rank asks for. The ranks of an instance must agree (a send equals the recv it meets: both
// say kSend here and differ in role only): FirstDifference.
//
// A collective moves pieces from members to members. Most often all are alike, and `dims` says it
// all. Where their rows (dimension 0) may differ, dims[0] is kRowsDiffer and the rows are in
// `sends` and `receives`: by member, or one number for all members alike, or empty where this rank
// has nothing to do with it, or cannot know.
struct Descriptor {
  static constexpr int64_t kRowsDiffer = -1;

  CollectiveKind kind = CollectiveKind::kUnspecified;
  Reduction reduction = Reduction::kNone;
  DType dtype = DType::kUnspecified;
  GroupRank root{-1};
  std::vector<int64_t> dims;  // of one piece
  std::vector<int64_t> sends;
  std::vector<int64_t> receives;
  bool runtime_counts = false;  // rows are known when it runs, and compared then

  bool RowsDiffer() const { return !dims.empty() && dims[0] == kRowsDiffer; }
  // Rows for and from a member; absent where nothing is said.
  absl::optional<int64_t> SendsTo(GroupRank member) const { return RowsOf(sends, member); }
  absl::optional<int64_t> ReceivesFrom(GroupRank member) const { return RowsOf(receives, member); }

  std::string ToString() const;  // "all_reduce SUM f32[4]", "gather root=2 f64[*,3] sends 4 rows"

 private:
  absl::optional<int64_t> RowsOf(const std::vector<int64_t>& rows, GroupRank member) const;
};

// The first thing in which two members' descriptors contradict each other: as the one says it, and
// as the other does. Rows are compared piece by piece; where a piece goes to all members, or comes
// from all, its rows are what both say, whichever member's it is. So where nobody contradicts
// another, equal results (GivesEqualResults) have equal sizes, also where members are absent.
struct Difference {
  std::string what;  // "shape"
  std::string expected;
  std::string got;
};
absl::optional<Difference> FirstDifference(GroupRank member, const Descriptor& expected,
                                           GroupRank other, const Descriptor& got);

// Whether a member contradicts any of several others on rows, as FirstDifference says it of each,
// in time that is linear in its own rows and in how many others there are. Requires that they agree
// with it on all but rows, and that no two of them contradict each other: so what all members get,
// or give, is the same with each of them that says it, and is compared with one.
class RowsCheck {
 public:
  // Refers to what the member asks for.
  RowsCheck(GroupRank member, const Descriptor& asked);

  // It has nothing to say, and contradicts nobody.
  bool is_silent() const { return is_silent_; }
  // What this one says will be looked at. Each has a list of its own, of which one number is read:
  // where they are many, all of them are on their way before the first is waited for.
  void Expect(const Descriptor& said) const;
  // Whether it contradicts this one. Each of the others is asked about once, until there is one
  // that it contradicts.
  bool Contradicts(GroupRank other, const Descriptor& said);

 private:
  const GroupRank member_;
  const Descriptor& asked_;
  // With whoever says it next, of what all give, or get.
  bool compares_sends_;
  bool compares_receives_;
  const bool is_silent_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_COLLECTIVE_INSTANCE_H_
