// The kinds of collective, and what is true of each: one row a kind, from which ops, plans,
// agreement, backends, decoders and announcements derive what they ask.
//
// A new kind is a row here, its op's folder, its number in proto/chorus/v1/types.proto and, if it
// moves pieces, its work in core/backend/collective_work.cc (docs/architecture.md has the whole
// recipe).
//
// Threads: constants and pure functions. Ownership: none. Errors: none; a number of no kind has the
// facts of kUnspecified.
#ifndef CHORUS_CORE_GRAPH_COLLECTIVE_KIND_H_
#define CHORUS_CORE_GRAPH_COLLECTIVE_KIND_H_

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "core/graph/reduction_kind.h"

namespace chorus {

// Numbers are part of the wire formats: append only.
enum class CollectiveKind : uint8_t {
  kUnspecified = 0,
  kAllReduce = 1,
  kBroadcast = 2,
  kReduce = 3,
  kAllGather = 4,
  kReduceScatter = 5,
  kGather = 6,
  kScatter = 7,
  kAllToAll = 8,
  kSend = 9,
  kRecv = 10,
  kBarrier = 11,
};

// A piece is what goes from one member to another. How many pieces a member puts in, or gets.
enum class Pieces : uint8_t {
  kNone,
  kOne,
  kOneAtRoot,   // the other members none
  kEach,        // one for each member, or from each
  kEachAtRoot,  // the other members none
};

struct CollectiveFacts {
  enum class Does : uint8_t {
    kMoves,    // what comes out are pieces that went in
    kReduces,  // pieces that went in become one, by a Reduction
    kPairs,    // moves one piece between two members, by peer and tag
    kOrders,   // nothing moves
  };
  CollectiveKind kind;
  absl::string_view name;
  Pieces in;
  Pieces out;
  Does does;
  // What its gradient is made of, and that of a PRODUCT, of which every member's factor gets
  // another one; kUnspecified: it has none.
  CollectiveKind gradient;
  CollectiveKind product_gradient;
};

// By number. Source: each is a linear map of all members' inputs to all members' outputs (PRODUCT,
// MIN and MAX apart: core/ops/collective_operands.h), and its gradient that map's transpose
// (docs/collectives.md).
inline constexpr CollectiveFacts kCollectives[] = {
#define CHORUS_ROW(kind, name, in, out, does, gradient, product_gradient)             \
  {                                                                                   \
    CollectiveKind::kind, name, Pieces::in, Pieces::out, CollectiveFacts::Does::does, \
        CollectiveKind::gradient, CollectiveKind::product_gradient                    \
  }
    // clang-format off
    CHORUS_ROW(kUnspecified,   "unspecified",    kNone,       kNone,       kOrders,  kUnspecified,   kUnspecified),
    CHORUS_ROW(kAllReduce,     "all_reduce",     kOne,        kOne,        kReduces, kAllReduce,     kReduceScatter),
    CHORUS_ROW(kBroadcast,     "broadcast",      kOneAtRoot,  kOne,        kMoves,   kReduce,        kUnspecified),
    CHORUS_ROW(kReduce,        "reduce",         kOne,        kOneAtRoot,  kReduces, kBroadcast,     kScatter),
    CHORUS_ROW(kAllGather,     "all_gather",     kOne,        kEach,       kMoves,   kReduceScatter, kUnspecified),
    CHORUS_ROW(kReduceScatter, "reduce_scatter", kEach,       kOne,        kReduces, kAllGather,     kAllToAll),
    CHORUS_ROW(kGather,        "gather",         kOne,        kEachAtRoot, kMoves,   kScatter,       kUnspecified),
    CHORUS_ROW(kScatter,       "scatter",        kEachAtRoot, kOne,        kMoves,   kGather,        kUnspecified),
    CHORUS_ROW(kAllToAll,      "all_to_all",     kEach,       kEach,       kMoves,   kAllToAll,      kUnspecified),
    CHORUS_ROW(kSend,          "send",           kOne,        kNone,       kPairs,   kRecv,          kUnspecified),
    CHORUS_ROW(kRecv,          "recv",           kNone,       kOne,        kPairs,   kSend,          kUnspecified),
    CHORUS_ROW(kBarrier,       "barrier",        kNone,       kNone,       kOrders,  kUnspecified,   kUnspecified),
// clang-format on
#undef CHORUS_ROW
};
inline constexpr size_t kNumCollectiveKinds = sizeof(kCollectives) / sizeof(kCollectives[0]);
inline constexpr CollectiveKind kLastCollectiveKind = kCollectives[kNumCollectiveKinds - 1].kind;

// Whether a number that came from outside is a kind.
constexpr bool IsCollectiveKind(CollectiveKind kind) {
  return kind != CollectiveKind::kUnspecified && kind <= kLastCollectiveKind;
}
// Of any number; those of no kind have the facts of kUnspecified.
constexpr const CollectiveFacts& FactsOf(CollectiveKind kind) {
  return kCollectives[kind <= kLastCollectiveKind ? static_cast<size_t>(kind) : 0];
}
constexpr absl::string_view CollectiveKindName(CollectiveKind kind) {
  return kind <= kLastCollectiveKind ? FactsOf(kind).name : absl::string_view("unknown");
}

constexpr bool AtRoot(Pieces pieces) {
  return pieces == Pieces::kOneAtRoot || pieces == Pieces::kEachAtRoot;
}
constexpr bool OfEach(Pieces pieces) {
  return pieces == Pieces::kEach || pieces == Pieces::kEachAtRoot;
}
// Whether a member has any.
constexpr bool AnyOn(Pieces pieces, bool is_root) {
  return pieces != Pieces::kNone && (is_root || !AtRoot(pieces));
}
// How many they are on one of `group_size` members.
constexpr int32_t PiecesOn(Pieces pieces, int32_t group_size, bool is_root) {
  if (!AnyOn(pieces, is_root)) return 0;
  return OfEach(pieces) ? group_size : 1;
}

constexpr bool HasRoot(CollectiveKind kind) {
  return AtRoot(FactsOf(kind).in) || AtRoot(FactsOf(kind).out);
}
constexpr bool HasPeer(CollectiveKind kind) {
  return FactsOf(kind).does == CollectiveFacts::Does::kPairs;
}
// The ends of a pair.
constexpr bool IsSender(CollectiveKind kind) {
  return HasPeer(kind) && FactsOf(kind).in != Pieces::kNone;
}
constexpr bool IsReceiver(CollectiveKind kind) {
  return HasPeer(kind) && FactsOf(kind).out != Pieces::kNone;
}
constexpr bool IsReducing(CollectiveKind kind) {
  return FactsOf(kind).does == CollectiveFacts::Does::kReduces;
}
// Whether nothing moves. Not of kUnspecified: that number from outside does not pass for a barrier.
constexpr bool OnlyOrders(CollectiveKind kind) {
  return IsCollectiveKind(kind) && FactsOf(kind).does == CollectiveFacts::Does::kOrders;
}
// Whether pieces of one member may have different sizes: there is a list of them, on one side.
constexpr bool MayBeUneven(CollectiveKind kind) {
  return OfEach(FactsOf(kind).in) || OfEach(FactsOf(kind).out);
}
// Whether all members get the same: each is given what went in for everybody.
constexpr bool GivesEqualResults(CollectiveKind kind) {
  const CollectiveFacts& facts = FactsOf(kind);
  return !HasPeer(kind) && facts.in != Pieces::kNone && !OfEach(facts.in) && !AtRoot(facts.out);
}
// The two ends of a pair meet as one kind.
constexpr CollectiveKind MeetsAs(CollectiveKind kind) {
  return HasPeer(kind) ? CollectiveKind::kSend : kind;
}

constexpr CollectiveKind GradientKind(CollectiveKind kind, Reduction reduction) {
  const CollectiveFacts& facts = FactsOf(kind);
  return IsReducing(kind) && reduction == Reduction::kProduct ? facts.product_gradient
                                                              : facts.gradient;
}
// Whether it may be of another kind. An all_reduce PRODUCT has two gradients: of its result, which
// members sum before they multiply (an infinite factor would make a sum of products NaN), and of
// its factors.
constexpr bool MayBeGradientOf(CollectiveKind forward, Reduction reduction, CollectiveKind kind) {
  return kind == GradientKind(forward, reduction) ||
         (forward == CollectiveKind::kAllReduce && kind == CollectiveKind::kAllReduce);
}

}  // namespace chorus

#endif  // CHORUS_CORE_GRAPH_COLLECTIVE_KIND_H_
