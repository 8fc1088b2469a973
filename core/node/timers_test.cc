#include "core/node/timers.h"

#include <gtest/gtest.h>

#include <vector>

#include "core/base/work.h"

namespace chorus::node {
namespace {

const absl::Time kNow = absl::UnixEpoch();

TEST(TimerQueueTest, WhatIsDueAndMoreThanASliceHasTheTimeForWaitsForTheNext) {
  constexpr int kTimers = 100;
  constexpr int64_t kWork = kTurnWork / 10;
  TimerQueue timers;
  std::vector<int> fired;
  for (int i = kTimers; i-- > 0;) {
    timers.Add(kNow - absl::Seconds(kTimers - i), [&fired, i](absl::Time) {
      fired.push_back(i);
      CountWork(kWork);
    });
  }
  timers.Add(kNow + absl::Seconds(1), [](absl::Time) { ADD_FAILURE() << "it is not due"; });
  int slices = 0;
  const auto fire = [&] {
    const WorkSlice slice;
    const bool any = timers.Fire(kNow);
    EXPECT_LE(SliceWork(), kTurnWork + 2 * kWork);
    return any;
  };
  while (fire()) {
    ++slices;
    EXPECT_EQ(fired.size() < kTimers, timers.Next() <= kNow);
  }
  EXPECT_GE(slices, kTimers / 12);
  EXPECT_LE(slices, kTimers / 8);
  ASSERT_EQ(fired.size(), static_cast<size_t>(kTimers));
  for (int i = 0; i < kTimers; ++i) EXPECT_EQ(fired[static_cast<size_t>(i)], i);
}

TEST(TimerQueueTest, ATimerMayAddAndCancelOthers) {
  TimerQueue timers;
  int fired = 0;
  TimerQueue::Id other;
  timers.Add(kNow, [&](absl::Time) {
    ++fired;
    timers.Cancel(other);
    timers.Add(kNow, [&](absl::Time) { ++fired; });
  });
  other = timers.Add(kNow, [&](absl::Time) { ADD_FAILURE() << "it was cancelled"; });
  EXPECT_TRUE(timers.Fire(kNow));
  EXPECT_FALSE(timers.Fire(kNow));
  EXPECT_EQ(fired, 2);
  EXPECT_EQ(timers.Next(), absl::InfiniteFuture());
}

}  // namespace
}  // namespace chorus::node
