#include "core/node/communicators.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <memory>
#include <set>
#include <vector>

#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

// Knows which communicators are open on its device, and which of them were aborted.
class FakeExecutor : public Executor {
 public:
  void LoadPlan(PlanId, absl::string_view) override {}
  std::shared_ptr<void> UnloadPlan(PlanId) override { return nullptr; }
  void OpenCommunicator(CommunicatorId id, absl::Span<const int>, int) override { open.insert(id); }
  void AbortCommunicator(CommunicatorId id, absl::Status) override { aborted.insert(id); }
  void CloseCommunicator(CommunicatorId id) override { open.erase(id); }
  bool Launch(absl::string_view) override { return false; }
  bool Continue() override { return false; }
  void Abandon(LaunchId) override {}
  void Settled(LaunchId) override {}
  void Settled(TransferId) override {}
  void Upload(TransferId, int32_t, DeviceAddress, const void*, int64_t) override {}
  void Download(TransferId, int32_t, void*, DeviceAddress, int64_t, LaunchId) override {}

  std::set<CommunicatorId> open;
  std::set<CommunicatorId> aborted;
};

class CommunicatorsTest : public ::testing::Test {
 protected:
  static constexpr int kDevices = 5;

  CommunicatorsTest() {
    for (int i = 0; i < kDevices; ++i) {
      fakes_.push_back(new FakeExecutor);
      executors_.emplace_back(fakes_.back());
    }
    pool_ = std::make_shared<CommunicatorPool>(&executors_);
  }
  std::unique_ptr<CommunicatorLease> Lease() {
    return std::make_unique<CommunicatorLease>(pool_, budget_);
  }
  static std::vector<DeviceIndex> Devices(const std::vector<int>& indices) {
    return {indices.begin(), indices.end()};
  }

  std::vector<FakeExecutor*> fakes_;
  std::vector<std::unique_ptr<Executor>> executors_;
  std::shared_ptr<CommunicatorPool> pool_;
  BudgetRef budget_ = Budget::OfNode(int64_t{1} << 20);
};

TEST_F(CommunicatorsTest, TwoLeasesShareNone) {
  const auto one = Lease();
  const auto other = Lease();
  const CommunicatorId a = *one->Of(Devices({0, 1}));
  EXPECT_EQ(*one->Of(Devices({0, 1})), a);
  const CommunicatorId b = *other->Of(Devices({0, 1}));
  EXPECT_NE(a, b);
  EXPECT_NE(*one->Of(Devices({1, 0})), a);
  one->Drop(b, absl::OkStatus());  // none of its own
  EXPECT_THAT(fakes_[0]->aborted, testing::IsEmpty());
  one->Drop(a, absl::OkStatus());
  EXPECT_THAT(fakes_[0]->aborted, testing::ElementsAre(a));
  EXPECT_THAT(fakes_[1]->aborted, testing::ElementsAre(a));
  EXPECT_EQ(*other->Of(Devices({0, 1})), b);
  EXPECT_NE(*one->Of(Devices({0, 1})), a);
}

TEST_F(CommunicatorsTest, WhatIsGivenBackIsWholeAndOpenForTheNext) {
  auto lease = Lease();
  const CommunicatorId kept = *lease->Of(Devices({0, 1, 2}));
  const CommunicatorId dropped = *lease->Of(Devices({2, 1}));
  lease->Drop(dropped, absl::OkStatus());
  EXPECT_THAT(fakes_[1]->open, testing::ElementsAre(kept));
  lease.reset();
  EXPECT_EQ(pool_->idle(), 1u);
  EXPECT_EQ(budget_->used(), 0);
  lease = Lease();
  EXPECT_EQ(*lease->Of(Devices({0, 1, 2})), kept);
  EXPECT_NE(*lease->Of(Devices({2, 1})), dropped);
  EXPECT_EQ(pool_->idle(), 0u);
  EXPECT_THAT(fakes_[0]->aborted, testing::IsEmpty());
}

TEST_F(CommunicatorsTest, AGroupsIsForgottenWhenOneIsDropped) {
  const auto lease = Lease();
  EXPECT_EQ(lease->OfGroup(GroupId(3)), CommunicatorId());
  const CommunicatorId id = *lease->Of(Devices({0, 1}));
  lease->OfGroup(GroupId(3)) = id;
  EXPECT_EQ(lease->OfGroup(GroupId(3)), id);
  EXPECT_EQ(lease->OfGroup(GroupId(7)), CommunicatorId());
  lease->Drop(id, absl::OkStatus());
  EXPECT_EQ(lease->OfGroup(GroupId(3)), CommunicatorId());
}

// Every order of some of the devices.
TEST_F(CommunicatorsTest, IdleOnesAreBounded) {
  std::vector<int> all(kDevices);
  for (int i = 0; i < kDevices; ++i) all[static_cast<size_t>(i)] = i;
  auto lease = Lease();
  CommunicatorId last;
  size_t count = 0;
  do {
    last = *lease->Of(Devices(all));
    ++count;
  } while (std::next_permutation(all.begin(), all.end()));
  ASSERT_GT(count, CommunicatorPool::kMaxIdle);
  EXPECT_EQ(pool_->open(), count);
  lease.reset();
  EXPECT_EQ(pool_->idle(), CommunicatorPool::kMaxIdle);
  EXPECT_EQ(pool_->open(), CommunicatorPool::kMaxIdle);
  for (const FakeExecutor* fake : fakes_) {
    EXPECT_EQ(fake->open.size(), CommunicatorPool::kMaxIdle);
    EXPECT_TRUE(fake->aborted.empty());
  }
}

TEST_F(CommunicatorsTest, LeasedOnesAreCharged) {
  budget_ = Budget::OfNode(64 << 10);
  const auto lease = Lease();
  std::vector<int> devices = {0, 1, 2, 3};
  size_t count = 0;
  absl::Status status;
  do {
    status = lease->Of(Devices(devices)).status();
    count += status.ok();
  } while (status.ok() && std::next_permutation(devices.begin(), devices.end()));
  EXPECT_EQ(ErrorOf(status).reason, Reason::kOutOfMemory) << status;
  EXPECT_EQ(pool_->open(), count);
  EXPECT_LT(count, 24u);
  EXPECT_GE(budget_->used() + CommunicatorLease::kNotCharged, static_cast<int64_t>(count) << 12);
}

TEST_F(CommunicatorsTest, OneThatDoesNotOpenOnADeviceIsDroppedOnAll) {
  const absl::Status refused = MakeError(Reason::kInternal, "no communicator today");
  auto lease = Lease();
  const CommunicatorId id = *lease->Of(Devices({0, 1, 2}));
  for (int member = 0; member < 3; ++member) pool_->OnOpened(id, absl::OkStatus());
  EXPECT_EQ(*lease->Of(Devices({0, 1, 2})), id);
  pool_->OnOpened(id, refused);
  for (int device = 0; device < 3; ++device) {
    EXPECT_THAT(fakes_[static_cast<size_t>(device)]->aborted, testing::ElementsAre(id));
    EXPECT_THAT(fakes_[static_cast<size_t>(device)]->open, testing::IsEmpty());
  }
  EXPECT_EQ(pool_->open(), 0u);
  const CommunicatorId next = *lease->Of(Devices({0, 1, 2}));
  EXPECT_NE(next, id);
  pool_->OnOpened(id, refused);  // of another device, when it is gone
  EXPECT_EQ(pool_->open(), 1u);
  lease.reset();
  EXPECT_EQ(pool_->idle(), 1u);
  pool_->OnOpened(next, refused);
  EXPECT_EQ(pool_->open(), 0u);
  for (const FakeExecutor* fake : fakes_) EXPECT_TRUE(fake->open.empty());
}

// Sessions and worlds may end after the node's devices.
TEST_F(CommunicatorsTest, ALeaseMayOutliveThePool) {
  const auto lease = Lease();
  const CommunicatorId id = *lease->Of(Devices({0, 1}));
  pool_.reset();
  executors_.clear();
  lease->Drop(id, absl::OkStatus());
  EXPECT_FALSE(lease->Of(Devices({0, 1})).ok());
}

}  // namespace
}  // namespace chorus::node
