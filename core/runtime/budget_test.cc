#include "core/runtime/budget.h"

#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/work.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using ::testing::HasSubstr;

absl::StatusOr<Charge> Bytes(const BudgetRef& budget, int64_t bytes,
                             Resource resource = Resource::kResultBytes) {
  return budget->Charge(Domain::kHost, resource, bytes);
}
absl::StatusOr<Charge> Sessions(const BudgetRef& budget, int64_t count) {
  return budget->Charge(Domain::kHost, Resource::kSessions, count);
}
Error Refused(const absl::StatusOr<Charge>& charge) { return ErrorOf(charge.status()); }

TEST(BudgetTest, RefusesWhatDoesNotFitWithNeedAndFree) {
  const BudgetRef node = Budget::OfNode(1000);
  absl::StatusOr<Charge> first = Bytes(node, 600);
  ASSERT_TRUE(first.ok());
  const absl::StatusOr<Charge> charge = Bytes(node, 401);
  EXPECT_EQ(Refused(charge).reason, Reason::kOutOfMemory);
  EXPECT_THAT(Refused(charge).message,
              HasSubstr("401 bytes are needed, 400 of the daemon's 1000 are free"));
  EXPECT_EQ(node->used(), 600);
  EXPECT_TRUE(Bytes(node, 400, Resource::kStagingBytes).ok()) << "kinds share one limit";
  *first = Charge();
  EXPECT_EQ(node->used(), 0);
}

TEST(BudgetTest, WhatIsChargedToOneIsChargedToThoseAroundItOrToNone) {
  Budget::Limits share;
  share.bytes[0] = 800;
  const BudgetRef node = Budget::OfNode(1000);
  const BudgetRef tenant = Budget::Within(node, "tenant a", share);
  const BudgetRef session = Budget::Within(tenant, "session 1", {});
  const absl::StatusOr<Charge> held = Bytes(session, 700);
  ASSERT_TRUE(held.ok());
  for (const BudgetRef& budget : {node, tenant, session}) EXPECT_EQ(budget->used(), 700);
  EXPECT_THAT(Refused(Bytes(session, 101)).message,
              HasSubstr("101 bytes are needed, 100 of the 800 that tenant a may hold are free"));
  for (const BudgetRef& budget : {node, tenant, session}) EXPECT_EQ(budget->used(), 700);
  const BudgetRef other = Budget::Within(node, "tenant b", share);
  EXPECT_THAT(Refused(Bytes(other, 301)).message, HasSubstr("300 of the daemon's 1000 are free"));
  EXPECT_TRUE(Bytes(other, 300).ok());
}

TEST(BudgetTest, OneTenantLeavesRoomForAnother) {
  Budget::Limits limits;
  limits.bytes[0] = 1600;
  limits.sessions = 16;
  limits.worlds = 1;
  const BudgetRef node = Budget::OfNode(limits);
  const BudgetRef greedy = Budget::Within(node, "tenant a", limits.Share());
  const BudgetRef modest = Budget::Within(node, "tenant b", limits.Share());
  const absl::StatusOr<Charge> all = Sessions(greedy, 14);
  ASSERT_TRUE(all.ok()) << all.status();
  const absl::StatusOr<Charge> charge = Sessions(greedy, 1);
  EXPECT_EQ(Refused(charge).reason, Reason::kQuota);
  EXPECT_THAT(Refused(charge).message, HasSubstr("tenant a holds 14 sessions of 14"));
  EXPECT_TRUE(Sessions(modest, 2).ok());
  const absl::StatusOr<Charge> bytes = Bytes(greedy, 1400);
  ASSERT_TRUE(bytes.ok());
  EXPECT_TRUE(Bytes(modest, 200).ok());
  // Of one there is no share.
  EXPECT_TRUE(greedy->Charge(Domain::kHost, Resource::kWorlds, 1).ok());
}

TEST(BudgetTest, AShareOfAnyBoundLetsSomebodyIn) {
  EXPECT_EQ(ShareOf(1), 1);
  EXPECT_EQ(ShareOf(2), 1);
  EXPECT_EQ(ShareOf(7), 6);
  EXPECT_EQ(ShareOf(8), 7);
  EXPECT_EQ(ShareOf(9), 7);
  EXPECT_EQ(ShareOf(8192), 7168);
  EXPECT_EQ(ShareOf(INT64_MAX), INT64_MAX);
}

TEST(BudgetTest, AChargeGrowsAndShrinks) {
  const BudgetRef node = Budget::OfNode(100);
  absl::StatusOr<Charge> charge = Bytes(node, 10);
  ASSERT_TRUE(charge.ok());
  EXPECT_TRUE(charge->Resize(100).ok());
  EXPECT_EQ(ErrorOf(charge->Resize(101)).reason, Reason::kOutOfMemory);
  EXPECT_EQ(charge->amount(), 100);
  EXPECT_TRUE(charge->Resize(1).ok());
  EXPECT_EQ(node->used(), 1);
  EXPECT_EQ(node->held(Resource::kResultBytes), 1);
}

TEST(BudgetTest, APartOfAChargeIsOneOfItsOwn) {
  const BudgetRef budget = Budget::OfNode(100);
  Charge whole = *budget->Charge(Domain::kHost, Resource::kGraphBytes, 100);
  {
    const Charge part = whole.Split(30);
    EXPECT_EQ(part.amount(), 30);
    EXPECT_EQ(whole.amount(), 70);
    EXPECT_EQ(budget->used(), 100);
  }
  EXPECT_EQ(budget->used(), 70);
}

TEST(BudgetTest, AMovedChargeIsGivenBackOnce) {
  const BudgetRef node = Budget::OfNode(100);
  {
    Charge first = *Bytes(node, 10);
    Charge second = std::move(first);
    Charge third = *Bytes(node, 20);
    third = std::move(second);
    EXPECT_EQ(node->used(), 10);
  }
  EXPECT_EQ(node->used(), 0);
}

TEST(BudgetTest, WhatIsKeptForReuseIsGivenBackFirst) {
  const BudgetRef node = Budget::OfNode(100);
  const BudgetRef tenant = Budget::Within(node, "tenant a", {});
  Charge kept = *Bytes(tenant, 90);
  int reclaims = 0;
  tenant->Reclaim(&kept, [&](const Budget&) {
    ++reclaims;
    kept = Charge();
    return true;
  });
  EXPECT_TRUE(Bytes(node, 10).ok());
  EXPECT_EQ(reclaims, 0);
  const absl::StatusOr<Charge> large = Bytes(node, 50);
  EXPECT_TRUE(large.ok());
  EXPECT_EQ(reclaims, 1);
  node->Forget(&kept);
  EXPECT_FALSE(Bytes(node, 60).ok());
  EXPECT_EQ(reclaims, 1);
}

// What others keep for reuse is theirs, however often somebody is refused.
TEST(BudgetTest, OnlyOwnersWithinTheFullBudgetGiveBack) {
  const BudgetRef node = Budget::OfNode(1000);
  Budget::Limits share;
  share.bytes[0] = 300;
  const BudgetRef tenants[] = {Budget::Within(node, "tenant a", share),
                               Budget::Within(node, "tenant b", share)};
  const BudgetRef session = Budget::Within(tenants[0], "session 1", {});
  Charge kept[] = {*Bytes(tenants[0], 100), *Bytes(tenants[1], 100)};
  EXPECT_TRUE(tenants[0]->LiesWithin(*node));
  EXPECT_TRUE(kept[0].LiesWithin(*tenants[0]));
  EXPECT_FALSE(kept[0].LiesWithin(*session));
  EXPECT_FALSE(Charge().LiesWithin(*node));
  for (int i = 0; i < 2; ++i) {
    tenants[i]->Reclaim(&kept[i], [&, i](const Budget& full) {
      const bool gives_back = kept[i].LiesWithin(full);
      if (gives_back) kept[i] = Charge();
      return gives_back;
    });
  }
  EXPECT_FALSE(Bytes(session, 301).ok());
  EXPECT_EQ(kept[0].amount(), 0);
  EXPECT_EQ(kept[1].amount(), 100);
  Charge all = *Bytes(node, 800);
  EXPECT_FALSE(Bytes(session, 300).ok());
  EXPECT_EQ(kept[1].amount(), 0) << "the node is full";
}

TEST(BudgetTest, OwnersGiveBackInPortionsUntilItIsEnoughOrTheSliceHasDoneEnough) {
  const BudgetRef node = Budget::OfNode(1000);
  std::vector<Charge> kept;
  for (int i = 0; i < 90; ++i) kept.push_back(*Bytes(node, 10));
  int reclaims = 0;
  node->Reclaim(&kept, [&](const Budget&) {
    ++reclaims;
    CountWork(kTurnWork / 10);
    if (!kept.empty()) kept.pop_back();
    return !kept.empty();
  });
  {
    const WorkSlice slice;
    EXPECT_TRUE(Bytes(node, 130).ok());
    EXPECT_EQ(reclaims, 3);
    EXPECT_FALSE(Bytes(node, 900).ok());
    EXPECT_EQ(reclaims, 6);
    EXPECT_TRUE(Bytes(node, 170).ok()) << "there is one portion for each";
    EXPECT_EQ(reclaims, 7);
    EXPECT_FALSE(Bytes(node, 900).ok());
    EXPECT_EQ(reclaims, 8) << "the slice has done enough";
  }
  EXPECT_TRUE(Bytes(node, 1000).ok());
  EXPECT_EQ(node->used(), 0);
  EXPECT_FALSE(Bytes(node, 1001).ok());
}

// Pages that are not unmapped yet.
TEST(BudgetTest, WhatLeavesIsNotHeldAndKeepsArenasOutForNow) {
  Budget::Limits share;
  share.bytes[0] = 800;
  const BudgetRef node = Budget::OfNode(1000);
  const BudgetRef tenant = Budget::Within(node, "tenant a", share);
  const BudgetRef other = Budget::Within(node, "tenant b", share);
  Charge held = *Bytes(tenant, 100);
  Charge leaving = *Bytes(tenant, 600);
  leaving.Leave();
  for (const BudgetRef& budget : {node, tenant}) {
    EXPECT_EQ(budget->used(), 100);
    EXPECT_EQ(budget->held(Resource::kResultBytes), 100);
    EXPECT_EQ(budget->leaving(), 600);
  }
  for (const Resource resource : {Resource::kResultBytes, Resource::kStagingBytes}) {
    EXPECT_TRUE(Bytes(tenant, 100, resource).ok());
    const absl::Status refused = Bytes(tenant, 101, resource).status();
    EXPECT_TRUE(IsForNow(refused));
    EXPECT_EQ(ErrorOf(refused).reason, Reason::kOutOfMemory);
    EXPECT_THAT(
        ErrorOf(refused).message,
        HasSubstr("101 bytes are needed, 700 of the 800 that tenant a may hold are free, of "
                  "which 600 are still on their way back to the kernel"));
    // Whose memory leaves is the one that waits: others have what it leaves of the daemon's.
    EXPECT_TRUE(Bytes(other, 300, resource).ok());
    EXPECT_TRUE(IsForNow(Bytes(other, 301, resource).status()));
    EXPECT_FALSE(IsForNow(Bytes(tenant, 701, resource).status())) << "it never fits";
  }
  EXPECT_TRUE(Bytes(tenant, 700, Resource::kGraphBytes).ok()) << "not made in a moment";
  Charge moved = std::move(leaving);
  EXPECT_EQ(node->leaving(), 600);
  moved = Charge();
  EXPECT_EQ(node->leaving(), 0);
  EXPECT_TRUE(Bytes(tenant, 700).ok());
}

TEST(BudgetTest, DescriptorsLeaveTheSameWay) {
  Budget::Limits limits;
  limits.descriptors = 10;
  const BudgetRef node = Budget::OfNode(limits);
  const auto descriptors = [&](int64_t count) {
    return node->Charge(Domain::kHost, Resource::kDescriptors, count);
  };
  Charge leaving = *descriptors(8);
  leaving.Leave();
  EXPECT_EQ(node->held(Resource::kDescriptors), 0);
  EXPECT_TRUE(descriptors(2).ok());
  const absl::Status refused = descriptors(3).status();
  EXPECT_EQ(ErrorOf(refused).reason, Reason::kQuota);
  EXPECT_TRUE(IsForNow(refused));
  leaving = Charge();
  EXPECT_TRUE(descriptors(10).ok());
}

// Nothing more of what is kept is given back than will be enough when what leaves has gone.
TEST(BudgetTest, WhatLeavesCountsAsGivenBack) {
  const BudgetRef node = Budget::OfNode(1000);
  std::vector<Charge> kept;
  std::vector<Charge> leaving;
  for (int i = 0; i < 10; ++i) kept.push_back(*Bytes(node, 100));
  bool gone = false;
  node->Reclaim(&leaving, [&](const Budget&) {
    if (gone) leaving.clear();
    return gone;
  });
  node->Reclaim(&kept, [&](const Budget&) {
    if (kept.empty()) return false;
    leaving.push_back(std::move(kept.back()));
    leaving.back().Leave();
    kept.pop_back();
    return true;
  });
  EXPECT_TRUE(IsForNow(Bytes(node, 250).status()));
  EXPECT_EQ(kept.size(), 7u);
  EXPECT_TRUE(IsForNow(Bytes(node, 250).status()));
  EXPECT_EQ(kept.size(), 7u);
  gone = true;
  EXPECT_TRUE(Bytes(node, 250).ok());
  EXPECT_EQ(kept.size(), 7u);
}

TEST(BudgetTest, WhatNobodyCanGiveBackIsRefusedForGoodHoweverMuchTheSliceHasDone) {
  const BudgetRef node = Budget::OfNode(1000);
  const Charge held = *Bytes(node, 900);
  node->Reclaim(&node, [](const Budget&) { return false; });
  const WorkSlice slice;
  CountWork(2 * kReclaimWork);
  EXPECT_FALSE(IsForNow(Bytes(node, 101).status()));
}

TEST(BudgetTest, AShareIsWhatLiesDirectlyWithinTheNodes) {
  const BudgetRef node = Budget::OfNode(1000);
  const BudgetRef tenant = Budget::Within(node, "tenant a", {});
  const BudgetRef session = Budget::Within(tenant, "session 1", {});
  EXPECT_EQ(&session->share(), tenant.get());
  EXPECT_EQ(&tenant->share(), tenant.get());
  EXPECT_EQ(&node->share(), node.get());
}

TEST(BudgetTest, WhatASliceHasNoTimeToGiveBackIsRefusedForNow) {
  const BudgetRef node = Budget::OfNode(1000);
  std::vector<Charge> kept;
  for (int i = 0; i < 100; ++i) kept.push_back(*Bytes(node, 10));
  node->Reclaim(&kept, [&](const Budget&) {
    CountWork(kReclaimWork / 10);
    if (!kept.empty()) kept.pop_back();
    return !kept.empty();
  });
  int slices = 1;
  for (; slices < 100; ++slices) {
    const WorkSlice slice;
    const absl::Status charged = Bytes(node, 900).status();
    if (charged.ok()) break;
    ASSERT_TRUE(IsForNow(charged)) << charged;
  }
  EXPECT_EQ(slices, 9);
  EXPECT_EQ(kept.size(), 10u);
}

TEST(BudgetTest, ASteppedChargeCoversWhatThereIsAndNotMuchMore) {
  const BudgetRef node = Budget::OfNode(1000);
  SteppedCharge charge(node, Resource::kRunBytes, 100);
  EXPECT_TRUE(charge.Cover(0).ok());
  EXPECT_EQ(node->used(), 0);
  EXPECT_TRUE(charge.Cover(1).ok());
  EXPECT_EQ(node->used(), 100);
  EXPECT_TRUE(charge.Cover(100).ok());
  EXPECT_EQ(node->used(), 100);
  EXPECT_TRUE(charge.Cover(901).ok());
  EXPECT_EQ(node->used(), 1000);
  EXPECT_EQ(ErrorOf(charge.Cover(1001)).reason, Reason::kOutOfMemory);
  EXPECT_EQ(node->used(), 1000);
  EXPECT_TRUE(charge.Cover(300).ok());
  EXPECT_EQ(node->used(), 1000) << "soon it may be more again";
  EXPECT_TRUE(charge.Cover(50).ok());
  EXPECT_EQ(node->used(), 100);
  EXPECT_TRUE(charge.Cover(0).ok());
  EXPECT_EQ(node->used(), 100) << "one step stays";
  (void)charge.Take();
  EXPECT_EQ(node->used(), 0);
}

TEST(BudgetTest, WhatASteppedChargeHasBeyondWhatThereIsIsChargedUntilItIsGone) {
  const BudgetRef node = Budget::OfNode(1000);
  SteppedCharge charge(node, Resource::kRunBytes, 100);
  EXPECT_EQ(charge.TakeBeyond(0).amount(), 0);
  EXPECT_TRUE(charge.Cover(1000).ok());
  EXPECT_EQ(charge.TakeBeyond(901).amount(), 0) << "the step has begun";
  {
    const Charge beyond = charge.TakeBeyond(101);
    EXPECT_EQ(beyond.amount(), 800);
    EXPECT_TRUE(charge.Cover(101).ok());
    EXPECT_EQ(node->used(), 1000);
    EXPECT_FALSE(charge.Cover(201).ok()) << "it is not gone";
  }
  EXPECT_EQ(node->used(), 200);
  EXPECT_TRUE(charge.Cover(1000).ok());
}

TEST(BudgetTest, AChargeOutlivesItsBudgetsOwner) {
  const BudgetRef node = Budget::OfNode(100);
  Charge left = *Bytes(Budget::Within(node, "session 1", {}), 10);
  EXPECT_EQ(node->used(), 10);
  left = Charge();
  EXPECT_EQ(node->used(), 0);
}

}  // namespace
}  // namespace chorus
