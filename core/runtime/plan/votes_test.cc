#include "core/runtime/plan/votes.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "core/ops/testing/rank_builder.h"
#include "core/runtime/plan/plan_testing.h"
#include "gtest/gtest.h"

namespace chorus {
namespace testing {
namespace {

Collective Rooted(const RankBuilder& b, CollectiveKind kind, int32_t root) {
  Collective c = b.MakeCollective(kind);
  c.root = GroupRank(root);
  return c;
}

TEST(VotesTest, VotesSayWhatEachRankKnowsOfTheRows) {
  const auto text = [](RankBuilder* b, const Collective& c, std::vector<ValueIndex> inputs,
                       Attributes attributes = {}, absl::string_view op = "") {
    b->Emit(c, std::move(inputs), std::move(attributes), op);
    return Compile(*b).votes->participations[0].descriptor.ToString();
  };
  {
    RankBuilder b(0, 2);
    EXPECT_EQ(text(&b, b.MakeCollective(CollectiveKind::kAllGather), {b.Input(F32({3, 2}))}, {},
                   "all_gather_into_tensor"),
              "all_gather f32[3,2]");
  }
  {
    RankBuilder b(0, 2);
    Collective c = b.MakeCollective(CollectiveKind::kAllGather);
    c.counts = {3, 1};
    EXPECT_EQ(text(&b, c, {b.Input(F32({3, 2}))}),
              "all_gather f32[*,2] sends 3 rows receives [3,1] rows");
  }
  {
    RankBuilder b(0, 2);
    EXPECT_EQ(text(&b, Rooted(b, CollectiveKind::kGather, 1), {b.Input(F32({3, 2}))}),
              "gather root=1 f32[*,2] sends 3 rows");
  }
  {
    RankBuilder b(1, 2);
    EXPECT_EQ(text(&b, Rooted(b, CollectiveKind::kGather, 1), {b.Input(F32({3}))}),
              "gather root=1 f32[*] sends 3 rows receives 3 rows");
  }
  {
    RankBuilder b(1, 2);
    EXPECT_EQ(text(&b, Rooted(b, CollectiveKind::kScatter, 0), {}, TypeAttributes(F32({0, 7}))),
              "scatter root=0 f32[*,7] receives 0 rows");
  }
  {
    RankBuilder b(0, 2);
    Collective c = b.MakeCollective(CollectiveKind::kReduceScatter);
    c.counts = {1, 2};
    EXPECT_EQ(text(&b, c, {b.Input(F32({3}))}, {}, "reduce_scatter_tensor"),
              "reduce_scatter SUM f32[*] sends [1,2] rows receives 1 row");
  }
}

TEST(VotesTest, VotesSayWhatEachCollectiveIsAndWhatItFollows) {
  RankBuilder b(1, 3);
  const ValueIndex x = b.Input(F32({2, 2}));
  const ValueIndex r0 = b.AllReduce(x);
  const ValueIndex r1 = b.AllReduce(b.Op("neg", {r0}));
  const std::vector<ValueIndex> g2 = b.AllGather(x);
  const ValueIndex r3 = b.AllReduce(b.Op("add", {b.Op("add", {r0, r1}), g2[0]}));
  b.Broadcast(-1, F32({7}), 2);
  b.Recv(F32({5}), 0, 9);
  b.Barrier();
  AddOutput(&b, r3);
  const Plan plan = Compile(b);
  const auto& p = plan.votes->participations;
  ASSERT_EQ(p.size(), 7u);
  EXPECT_EQ(p[0].descriptor.ToString(), "all_reduce SUM f32[2,2]");
  EXPECT_TRUE(p[0].after.empty());
  EXPECT_EQ(p[1].after, (std::vector<int32_t>{0}));
  EXPECT_TRUE(p[2].after.empty());
  EXPECT_EQ(p[3].after, (std::vector<int32_t>{1, 2})) << "0 is before 1 anyway";
  EXPECT_EQ(p[4].descriptor.root, GroupRank(2));
  EXPECT_EQ(p[4].descriptor.dims, (std::vector<int64_t>{7}));
  EXPECT_EQ(p[5].descriptor.kind, CollectiveKind::kSend);
  EXPECT_TRUE(p[5].is_recv);
  EXPECT_EQ(p[5].peer, GroupRank(0));
  EXPECT_EQ(p[5].tag, 9);
  EXPECT_EQ(p[6].descriptor.kind, CollectiveKind::kBarrier);
  for (const Participation& part : p) {
    EXPECT_EQ(part.member, GroupRank(1));
    EXPECT_TRUE(part.wants_grad);
  }
  EXPECT_EQ(p[1].node, 2);
}

TEST(VotesTest, FingerprintsTellVotesApartButNotSources) {
  const auto build = [](int64_t size, bool barrier, const std::string& source) {
    RankBuilder b(0, 2);
    const ValueIndex x = b.Input(F32({size}));
    AddOutput(&b, b.AllReduce(x));
    if (barrier) b.Barrier();
    Graph graph = b.graph().Build();
    graph.nodes[0].source = source;
    return Compile(graph).votes->fingerprint;
  };
  EXPECT_EQ(build(4, false, "a.cc:1"), build(4, false, "b.cc:2"));
  EXPECT_NE(build(4, false, ""), build(5, false, ""));
  EXPECT_NE(build(4, false, ""), build(4, true, ""));
}

// Ranks that make one call of two collectives and ranks that make two calls must not be taken for
// ranks that do the same.
TEST(VotesTest, PartsOfACallAreInTheVotesAndTheirFingerprint) {
  const auto build = [](int32_t part) {
    RankBuilder b(0, 2);
    const ValueIndex x = b.Input(F32({4}));
    AddOutput(&b, b.AllReduce(x));
    AddOutput(&b, b.AllReduce(x));
    Graph graph = b.graph().Build();
    graph.nodes[1].collective->part = part;
    return Compile(graph).votes;
  };
  EXPECT_EQ(build(1)->participations[0].part, 0);
  EXPECT_EQ(build(1)->participations[1].part, 1);
  EXPECT_NE(build(1)->fingerprint, build(0)->fingerprint);
}

}  // namespace
}  // namespace testing
}  // namespace chorus
