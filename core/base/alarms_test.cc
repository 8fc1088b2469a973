#include "core/base/alarms.h"

#include <future>
#include <memory>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "core/base/clock.h"
#include "core/base/wall_clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using ::testing::ElementsAre;

constexpr absl::Duration kPatience = absl::Seconds(20);

// What `alarms` comes to behind all that is due before `due`.
void AwaitAll(Alarms* alarms, absl::Time due) {
  const auto come = std::make_shared<absl::Notification>();
  alarms->Set(due, [come] { come->Notify(); });
  EXPECT_TRUE(come->WaitForNotificationWithTimeout(kPatience));
}

TEST(AlarmsTest, ComeInTheOrderOfTheirTimesAndNeverBefore) {
  Alarms alarms;
  const absl::Time start = SteadyNow();
  std::vector<int> order;
  std::vector<absl::Time> early;
  for (const int place : {3, 1, 4, 0, 2, 4}) {
    const absl::Time due = start + absl::Milliseconds(10 * place);
    alarms.Set(due, [&order, &early, place, due] {
      order.push_back(place);
      if (SteadyNow() < due) early.push_back(due);
    });
  }
  AwaitAll(&alarms, start + absl::Milliseconds(41));
  EXPECT_THAT(order, ElementsAre(0, 1, 2, 3, 4, 4));
  EXPECT_THAT(early, ElementsAre());
}

// One that is before all others wakes the thread, whatever it waits for.
TEST(AlarmsTest, AnEarlierOneIsNotKeptWaiting) {
  Alarms alarms;
  bool late = false;
  for (const absl::Duration far : {absl::InfiniteDuration(), absl::Hours(3), absl::Hours(1)}) {
    alarms.Set(SteadyNow() + far, [&late] { late = true; });
  }
  AwaitAll(&alarms, SteadyNow() + absl::Milliseconds(1));
  AwaitAll(&alarms, absl::InfinitePast());
  EXPECT_FALSE(late);
}

TEST(AlarmsTest, OneThatIsCancelledDoesNotComeAndKeepsNothing) {
  Alarms alarms;
  const absl::Time due = SteadyNow() + absl::Hours(1);
  const auto kept = std::make_shared<int>(7);
  const Alarms::Id first = alarms.Set(due, [kept] { ++*kept; });
  const Alarms::Id second = alarms.Set(due, [kept] { ++*kept; });
  EXPECT_EQ(kept.use_count(), 3);
  alarms.Cancel(first);
  alarms.Cancel(first);
  alarms.Cancel(Alarms::Id());
  EXPECT_EQ(kept.use_count(), 2);
  alarms.Cancel(second);
  EXPECT_EQ(kept.use_count(), 1);
  EXPECT_EQ(*kept, 7);
}

// One sets the next, cancels itself and others: none runs under the lock.
TEST(AlarmsTest, OneMaySetAndCancelOthers) {
  Alarms alarms;
  absl::Notification over;
  bool cancelled_came = false;
  const absl::Time now = SteadyNow();
  const Alarms::Id other =
      alarms.Set(now + absl::Hours(1), [&cancelled_came] { cancelled_came = true; });
  alarms.Set(now, [&] {
    alarms.Cancel(other);
    alarms.Set(now, [&] { over.Notify(); });
  });
  EXPECT_TRUE(over.WaitForNotificationWithTimeout(kPatience));
  EXPECT_FALSE(cancelled_came);
}

TEST(AlarmsTest, WhatHasNotComeWhenItStopsNeverWill) {
  const auto kept = std::make_shared<int>(7);
  {
    Alarms alarms;
    alarms.Set(SteadyNow() + absl::Hours(1), [kept] { ++*kept; });
    alarms.Stop();
    alarms.Set(absl::InfinitePast(), [kept] { ++*kept; });
    alarms.Stop();
  }
  EXPECT_EQ(*kept, 7);
  EXPECT_EQ(kept.use_count(), 1);
}

TEST(AlarmsTest, NoSettingOfTheWallClockMovesThem) {
  for (const absl::Duration step : {absl::Hours(1), -absl::Hours(1)}) {
    Alarms alarms;
    absl::Notification early;
    alarms.Set(SteadyNow() + absl::Minutes(30), [&early] { early.Notify(); });
    AwaitAll(&alarms, absl::InfinitePast());  // the thread has begun
    const absl::Time due = SteadyNow() + absl::Milliseconds(20);
    const auto come = std::make_shared<std::promise<void>>();
    alarms.Set(due, [come] { come->set_value(); });
    wall_ahead_nanos = absl::ToInt64Nanoseconds(step);
    EXPECT_EQ(come->get_future().wait_for(absl::ToChronoSeconds(kPatience)),
              std::future_status::ready)
        << step;
    wall_ahead_nanos = 0;
    EXPECT_FALSE(early.HasBeenNotified()) << step;
  }
}

}  // namespace
}  // namespace chorus
