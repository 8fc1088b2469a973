#include "server/service/room.h"

#include <atomic>
#include <memory>
#include <thread>

#include "absl/status/statusor.h"
#include "core/base/error.h"
#include "gtest/gtest.h"

namespace chorus::server {
namespace {

TEST(RoomTest, WhoWantsLittlePassesNobody) {
  Room room(10);
  auto all = std::make_unique<Room::Part>(room.Enter(10));
  std::atomic<bool> large_is_in{false};
  std::thread large([&] {
    const Room::Part part = room.Enter(10);
    large_is_in = true;
  });
  while (room.waiting() < 1) std::this_thread::yield();
  std::thread small([&] {
    const Room::Part part = room.Enter(1);
    EXPECT_TRUE(large_is_in);
  });
  while (room.waiting() < 2) std::this_thread::yield();
  all.reset();
  large.join();
  small.join();
}

TEST(SharedRoomTest, OneTenantHasSevenEighths) {
  SharedRoom room(16, "things");
  absl::StatusOr<SharedRoom::Part> most = room.Take("a", 14);
  ASSERT_TRUE(most.ok()) << most.status();
  const absl::Status more = room.Take("a", 1).status();
  EXPECT_EQ(ErrorOf(more).reason, Reason::kQuota);
  EXPECT_EQ(ErrorOf(more).message,
            "no room for 1 things: a has 14; expected at most 14 of one user, 16 in all");
  EXPECT_TRUE(room.Take("b", 2).ok());
  EXPECT_FALSE(room.Take("b", 3).ok());
  most->Shrink(4);
  EXPECT_TRUE(room.Take("a", 10).ok());
}

}  // namespace
}  // namespace chorus::server
