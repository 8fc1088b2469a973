// An instance: one collective as all its ranks see it, the unit of matching.
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

// The name of an instance. Every rank computes it alone: no reply is needed to use it.
//   group collective  (group, epoch, index): the index-th of this group in this epoch
//   send/recv         (group, epoch, source, destination, tag, index): the index-th of that pair
//   gradient          the forward instance's name and the path of requests that leads from it:
//                     path {2} is the third gradient asked of it, {2, 0} the first gradient of that
//                     gradient. The order of differentiation is the path's length.
// `epoch` is the forward instance's own, also when its gradient is asked for in a later epoch:
// requests count from 0 in every epoch, so each has the epoch in which it was asked beside it.
struct InstanceKey {
  struct Request {
    Epoch epoch;  // in which it was asked
    int32_t number = 0;

    friend bool operator==(const Request& a, const Request& b) {
      return a.epoch == b.epoch && a.number == b.number;
    }
    friend bool operator<(const Request& a, const Request& b) {
      return a.epoch < b.epoch || (a.epoch == b.epoch && a.number < b.number);
    }
    template <typename H>
    friend H AbslHashValue(H h, const Request& r) {
      return H::combine(std::move(h), r.epoch, r.number);
    }
  };

  GroupId group;
  Epoch epoch;
  int64_t index = 0;
  GroupRank source{-1};
  GroupRank destination{-1};
  int64_t tag = 0;
  absl::InlinedVector<Request, 2> path;

  bool is_pair() const { return source.value() >= 0; }
  bool is_gradient() const { return !path.empty(); }
  // The instance that this one is a gradient of. Requires is_gradient().
  InstanceKey Parent() const {
    InstanceKey parent = *this;
    parent.path.pop_back();
    return parent;
  }
  InstanceKey Gradient(Epoch asked_in, int32_t request) const {
    InstanceKey child = *this;
    child.path.push_back({asked_in, request});
    return child;
  }
  // "group 0 epoch 3 index 17", "group 0 epoch 3 from 1 to 2 tag 7 index 0"; then ", gradient 0.1",
  // or ", gradient 0@4.1@4" where it was asked for in epoch 4.
  std::string ToString() const;

  friend bool operator==(const InstanceKey& a, const InstanceKey& b) {
    return a.index == b.index && a.group == b.group && a.epoch == b.epoch && a.source == b.source &&
           a.destination == b.destination && a.tag == b.tag && a.path == b.path;
  }
  friend bool operator!=(const InstanceKey& a, const InstanceKey& b) { return !(a == b); }
  // Any total order will do: it settles ties in the order of a gang.
  friend bool operator<(const InstanceKey& a, const InstanceKey& b);
  template <typename H>
  friend H AbslHashValue(H h, const InstanceKey& k) {
    return H::combine(std::move(h), k.group, k.epoch, k.index, k.source, k.destination, k.tag,
                      k.path);
  }
};

// Equal keys give equal bytes.
void EncodeInstanceKey(const InstanceKey& key, ByteWriter* out);
// Bytes that are no key (truncated, a negative index or request, one end of a pair without the
// other, a path longer than kMaxGradientOrder) make `in` fail: in->ok() tells.
InstanceKey DecodeInstanceKey(ByteReader* in);

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
// as the other does. Rows are compared piece by piece.
struct Difference {
  std::string what;  // "shape"
  std::string expected;
  std::string got;
};
absl::optional<Difference> FirstDifference(GroupRank member, const Descriptor& expected,
                                           GroupRank other, const Descriptor& got);

}  // namespace chorus

#endif  // CHORUS_CORE_COLLECTIVE_INSTANCE_H_
