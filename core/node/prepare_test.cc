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
  void Join(int64_t world, int32_t rank) {
    for (const Session::Membership& membership : session_->memberships) {
      if (membership.world->id != WorldId(world)) continue;
      session_->memberships.push_back({membership.world, Rank(rank)});
      return;
    }
    auto joined = std::make_shared<World>(session_->budget);
    joined->id = WorldId(world);
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
