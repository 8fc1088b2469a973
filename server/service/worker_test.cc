#include "server/service/worker.h"

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "core/base/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus::server {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(20);

TEST(ServiceWorkerTest, LeasesAreRenewedWhenItHasNothingElseToDo) {
  absl::Notification renewed;
  ServiceWorker worker(
      [&](const std::vector<SessionId>& sessions) {
        if (sessions == std::vector<SessionId>{SessionId(7)} && !renewed.HasBeenNotified()) {
          renewed.Notify();
        }
      },
      absl::Milliseconds(1));
  worker.Hold(SessionId(7), absl::Hours(1));
  EXPECT_TRUE(renewed.WaitForNotificationWithTimeout(kPatience));
}

TEST(ServiceWorkerTest, LeasesAreRenewedHoweverMuchItHasToDo) {
  absl::Notification renewed;
  std::function<void()> again;
  ServiceWorker worker(
      [&](const std::vector<SessionId>&) {
        if (!renewed.HasBeenNotified()) renewed.Notify();
      },
      absl::Milliseconds(1));
  // The next task is there before the last one has ended.
  const absl::Time deadline = SteadyNow() + kPatience;
  again = [&] {
    if (!renewed.HasBeenNotified() && SteadyNow() < deadline) worker.Post("a", again);
  };
  worker.Post("a", again);
  worker.Hold(SessionId(7), absl::Hours(1));
  EXPECT_TRUE(renewed.WaitForNotificationWithTimeout(kPatience));
}

// Others', that began before, come with it.
TEST(ServiceWorkerTest, AShortLeaseIsRenewedBeforeItRunsOut) {
  std::vector<SessionId> sessions;
  absl::Notification renewed;
  ServiceWorker worker(
      [&](std::vector<SessionId> due) {
        if (renewed.HasBeenNotified()) return;
        sessions = std::move(due);
        renewed.Notify();
      },
      absl::Hours(1));
  worker.Hold(SessionId(7), absl::InfiniteDuration());
  worker.Hold(SessionId(8), absl::Milliseconds(20));
  ASSERT_TRUE(renewed.WaitForNotificationWithTimeout(kPatience));
  EXPECT_THAT(sessions, testing::UnorderedElementsAre(SessionId(7), SessionId(8)));
}

TEST(ServiceWorkerTest, OneForWhomMuchIsToBeDoneKeepsNobodyWaiting) {
  absl::Notification begun;
  absl::Notification all;
  ServiceWorker worker([](const std::vector<SessionId>&) {}, absl::Hours(1));
  worker.Post("a", [&] {
    begun.Notify();
    all.WaitForNotification();
  });
  begun.WaitForNotification();
  constexpr int kJobs = 1000;
  int done = 0;
  int before_b = -1;
  for (int i = 0; i < kJobs; ++i) worker.Post("a", [&done] { ++done; });
  worker.Post("b", [&] { before_b = done; });
  all.Notify();
  worker.Stop();
  EXPECT_EQ(done, kJobs);
  EXPECT_EQ(before_b, 1);
}

TEST(ServiceWorkerTest, WhatComesBehindItsEndGoesAtOnce) {
  ServiceWorker worker([](const std::vector<SessionId>&) {}, absl::Hours(1));
  bool ran = false;
  worker.Post("a", [&ran] { ran = true; });
  worker.Stop();
  EXPECT_TRUE(ran);
  auto kept = std::make_shared<int>(1);
  const std::weak_ptr<int> seen = kept;
  worker.Post("a", [kept = std::move(kept)] { FAIL() << *kept; });
  EXPECT_TRUE(seen.expired());
}

}  // namespace
}  // namespace chorus::server
