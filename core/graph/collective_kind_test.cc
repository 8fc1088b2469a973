#include "core/graph/collective_kind.h"

#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using Names = std::vector<std::string>;
using ::testing::ElementsAre;

// Those kinds for which `fact` holds, in their numbers' order.
template <typename Fact>
Names Kinds(const Fact& fact) {
  Names names;
  for (const CollectiveFacts& facts : kCollectives) {
    if (IsCollectiveKind(facts.kind) && fact(facts.kind)) names.emplace_back(facts.name);
  }
  return names;
}

TEST(CollectiveKindTest, FactsThatAreDerived) {
  EXPECT_THAT(Kinds(HasRoot), ElementsAre("broadcast", "reduce", "gather", "scatter"));
  EXPECT_THAT(Kinds(HasPeer), ElementsAre("send", "recv"));
  EXPECT_THAT(Kinds(IsSender), ElementsAre("send"));
  EXPECT_THAT(Kinds(IsReceiver), ElementsAre("recv"));
  EXPECT_THAT(Kinds(OnlyOrders), ElementsAre("barrier"));
  EXPECT_THAT(Kinds(IsReducing), ElementsAre("all_reduce", "reduce", "reduce_scatter"));
  EXPECT_THAT(Kinds(MayBeUneven),
              ElementsAre("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"));
  EXPECT_THAT(Kinds(GivesEqualResults), ElementsAre("all_reduce", "broadcast", "all_gather"));
}

TEST(CollectiveKindTest, NumbersThatAreNoKind) {
  for (const int number : {0, static_cast<int>(kNumCollectiveKinds), 99, 255}) {
    const auto kind = static_cast<CollectiveKind>(number);
    EXPECT_FALSE(IsCollectiveKind(kind)) << number;
    EXPECT_FALSE(HasRoot(kind) || HasPeer(kind) || IsReducing(kind) || MayBeUneven(kind));
    EXPECT_FALSE(IsSender(kind) || IsReceiver(kind) || OnlyOrders(kind));
    EXPECT_EQ(CollectiveKindName(kind), number == 0 ? "unspecified" : "unknown");
  }
}

TEST(CollectiveKindTest, PiecesOfEachMember) {
  EXPECT_EQ(PiecesOn(Pieces::kNone, 3, true), 0);
  EXPECT_EQ(PiecesOn(Pieces::kOne, 3, false), 1);
  EXPECT_EQ(PiecesOn(Pieces::kEach, 3, false), 3);
  for (const bool root : {false, true}) {
    EXPECT_EQ(PiecesOn(Pieces::kOneAtRoot, 3, root), root ? 1 : 0);
    EXPECT_EQ(PiecesOn(Pieces::kEachAtRoot, 3, root), root ? 3 : 0);
    EXPECT_FALSE(AnyOn(Pieces::kNone, root));
    for (const Pieces pieces : {Pieces::kOne, Pieces::kEach}) EXPECT_TRUE(AnyOn(pieces, root));
    for (const Pieces pieces : {Pieces::kOneAtRoot, Pieces::kEachAtRoot}) {
      EXPECT_EQ(AnyOn(pieces, root), root);
    }
  }
}

// A gradient is the transposed map: what went in comes out. (Of reductions only what is linear.)
TEST(CollectiveKindTest, AGradientGoesTheOtherWay) {
  for (const CollectiveFacts& facts : kCollectives) {
    if (facts.gradient == CollectiveKind::kUnspecified) continue;
    SCOPED_TRACE(std::string(facts.name));
    const CollectiveFacts& back = FactsOf(facts.gradient);
    EXPECT_EQ(back.in, facts.out);
    EXPECT_EQ(back.out, facts.in);
    EXPECT_EQ(back.gradient, facts.kind);
    EXPECT_TRUE(MayBeGradientOf(facts.kind, Reduction::kSum, facts.gradient));
    if (!IsReducing(facts.kind)) continue;
    // Each member's operand gets as many pieces as there are factors in what it was multiplied to.
    const CollectiveFacts& of_product = FactsOf(GradientKind(facts.kind, Reduction::kProduct));
    EXPECT_TRUE(OfEach(of_product.in));
    EXPECT_EQ(AtRoot(of_product.in), AtRoot(facts.out));
    EXPECT_EQ(OfEach(of_product.out), OfEach(facts.in));
    EXPECT_TRUE(MayBeGradientOf(facts.kind, Reduction::kProduct, of_product.kind));
  }
  EXPECT_THAT(Kinds([](CollectiveKind kind) {
                return GradientKind(kind, Reduction::kSum) == CollectiveKind::kUnspecified;
              }),
              ElementsAre("barrier"));
}

TEST(CollectiveKindTest, OnlyAnAllReduceHasGradientsOfTwoKinds) {
  for (const CollectiveFacts& forward : kCollectives) {
    std::set<CollectiveKind> kinds;
    for (const CollectiveFacts& back : kCollectives) {
      if (MayBeGradientOf(forward.kind, Reduction::kProduct, back.kind)) kinds.insert(back.kind);
    }
    EXPECT_EQ(kinds.size(), forward.kind == CollectiveKind::kAllReduce ? 2u : 1u) << forward.name;
  }
}

}  // namespace
}  // namespace chorus
