#include "core/node/prepare.h"

#include <memory>
#include <vector>

#include "core/node/session.h"
#include "core/node/world.h"
#include "core/runtime/budget.h"
#include "core/runtime/memory.h"
#include "core/transport/command.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

constexpr int kRanks = 4;

class WorldsNamedTest : public ::testing::Test {
 protected:
  WorldsNamedTest() {
    auto tenant = std::make_shared<Tenant>();
    tenant->budget = Budget::OfNode(int64_t{64} << 20);
    tenant->arenas = ArenaSet::Create(tenant->budget);
    session_ = std::make_shared<Session>(SessionId(1), OpenSessionRequest(), std::move(tenant),
                                         CommandLog::Shared{&timers_, &errors_, absl::Seconds(1)},
                                         Names::Limits{/*tensors=*/1, /*graphs=*/1},
                                         Budget::Limits(), &news_);
  }
  // With the device of the rank's number.
  void Join(int64_t world, int32_t rank) {
    std::shared_ptr<World> joined;
    for (const Session::Membership& membership : session_->memberships) {
      if (membership.world->id == WorldId(world)) joined = membership.world;
    }
    if (joined == nullptr) {
      joined = std::make_shared<World>(session_->budget);
      joined->id = WorldId(world);
      EXPECT_TRUE(joined->MakeMembers(kRanks).ok());
    }
    joined->members[static_cast<size_t>(rank)].device = DeviceIndex(rank);
    session_->memberships.push_back({std::move(joined), Rank(rank)});
  }
  static void Name(int64_t world, int64_t epoch, chorus::Run* command) {
    command->groups.emplace_back();
    command->groups.back().world = WorldId(world);
    command->groups.back().epoch = Epoch(epoch);
  }

  News news_;
  TimerQueue timers_;
  ErrorStore errors_{8};
  std::shared_ptr<Session> session_;
};

TEST_F(WorldsNamedTest, EachIsToldOnceInWhateverOrderGroupsNameThem) {
  Join(7, 2);
  Join(8, 0);
  Join(8, 1);
  chorus::Run command;
  for (int i = 0; i < 8000; ++i) {
    Name(8, 3, &command);
    Name(5, 1, &command);  // of which it is no member
    Name(7, 4 + i, &command);
  }
  const std::vector<NamedWorld> named = WorldsNamed(command, *session_);
  ASSERT_EQ(named.size(), 2u);
  EXPECT_EQ(named[0].world->id, WorldId(8));
  EXPECT_EQ(named[0].rank, Rank(0));
  EXPECT_EQ(named[0].epoch, Epoch(3));
  EXPECT_EQ(named[1].world->id, WorldId(7));
  EXPECT_EQ(named[1].rank, Rank(2));
  EXPECT_EQ(named[1].epoch, Epoch(4));
  EXPECT_TRUE(WorldsNamed(chorus::Run(), *session_).empty());
}

// Of several ranks of a world the one that the run is of: its devices tell.
TEST_F(WorldsNamedTest, TheRankIsTheOneOnTheFirstOfTheRunsDevicesThatIsARanks) {
  session_->devices = {DeviceIndex(2), DeviceIndex(1), DeviceIndex(0)};
  Join(7, 1);
  Join(7, 2);
  const auto rank_on = [this](const std::vector<int32_t>& devices) {
    chorus::Run command;
    Name(7, 1, &command);
    for (const int32_t device : devices) command.devices.push_back(DeviceIndex(device));
    return WorldsNamed(command, *session_)[0].rank.value();
  };
  EXPECT_EQ(rank_on({1}), 1);
  EXPECT_EQ(rank_on({2}), 2);
  EXPECT_EQ(rank_on({2, 1}), 2);
  EXPECT_EQ(rank_on({0, 2}), 2) << "device 0 is no rank's";
  EXPECT_EQ(rank_on({}), 2) << "a graph's first slot is the session's first device";
  EXPECT_EQ(rank_on({0}), 1) << "its first";
  EXPECT_EQ(rank_on({0, 3, 3, 2}), 1) << "more than it has";
}

TEST_F(WorldsNamedTest, OfManyTheFirstAreTold) {
  chorus::Run command;
  for (int64_t world = 1; world <= 100; ++world) {
    Join(world, 0);
    Name(world, 1, &command);
  }
  const std::vector<NamedWorld> named = WorldsNamed(command, *session_);
  ASSERT_EQ(named.size(), kMaxNamedWorlds);
  for (size_t i = 0; i < named.size(); ++i) {
    EXPECT_EQ(named[i].world->id, WorldId(static_cast<int64_t>(i) + 1));
  }
}

}  // namespace
}  // namespace chorus::node
