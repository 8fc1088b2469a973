#include "core/base/adaptive_spin.h"

#include <cstdint>

#include "gtest/gtest.h"

namespace chorus {
namespace {

// Time passes only in Yield: `round` each, of which the processor was ours for `own` at most.
class FakeClock : public SpinClock {
 public:
  int64_t NowNanos() override { return now; }
  void Yield() override {
    now += round;
    ++yields;
  }
  int64_t now = 1000000;
  int64_t round = 500;
  int64_t yields = 0;
};

class AdaptiveSpinTest : public ::testing::Test {
 protected:
  // A wait for something that comes `duration` from now. Returns whether it was over while
  // spinning. Asleep, the waiter learns of it `wake` later.
  bool Wait(int64_t duration, int64_t wake = 5000) {
    const int64_t start = clock_.now;
    const int64_t yields = clock_.yields;
    int64_t began = start;
    const bool caught = spin_.Spin([&] { return clock_.now >= start + duration; }, &began);
    EXPECT_EQ(began, start);
    spun_ns_ += (clock_.yields - yields) * clock_.round;
    if (!caught) {
      if (clock_.now < start + duration) clock_.now = start + duration + wake;
      spin_.WaitEnded(clock_.now - start);
    }
    return caught;
  }

  FakeClock clock_;
  AdaptiveSpin spin_{&clock_};
  int64_t spun_ns_ = 0;
};

TEST_F(AdaptiveSpinTest, WhatIsReadyNeedsNoClockAndNoYield) {
  int64_t start = -1;
  EXPECT_TRUE(spin_.Spin([] { return true; }, &start));
  EXPECT_EQ(clock_.yields, 0);
}

TEST_F(AdaptiveSpinTest, ShortWaitsAreCaughtForEver) {
  for (int i = 0; i < 100000; ++i) ASSERT_TRUE(Wait(8000)) << i;
}

TEST_F(AdaptiveSpinTest, WhoMostlyWaitsGoesOnSpinning) {
  for (int i = 0; i < 10000; ++i) {
    ASSERT_TRUE(Wait(150000)) << i;
    clock_.now += 20000;
  }
  // Until there is work again.
  int64_t caught = 0;
  for (int i = 0; i < 1000; ++i) {
    caught += Wait(150000) ? 1 : 0;
    clock_.now += 300000;
  }
  EXPECT_LT(caught, 100);
}

TEST_F(AdaptiveSpinTest, TheBoundFollowsShortWaitsDown) {
  for (int i = 0; i < 1000; ++i) Wait(8000);
  EXPECT_LT(spin_.bound_ns(), 40000);
  EXPECT_GE(spin_.bound_ns(), 16000);
  // Then a wait that takes long costs no more than that.
  spun_ns_ = 0;
  EXPECT_FALSE(Wait(5000000));
  EXPECT_LT(spun_ns_, 40000);
  EXPECT_TRUE(Wait(8000));
}

// What waiting may cost those that compute: one wait each millisecond, most of them long.
TEST_F(AdaptiveSpinTest, LongWaitsCostTwoPercent) {
  for (int i = 0; i < 200; ++i) {
    Wait(400000);
    clock_.now += 600000;
  }
  spun_ns_ = 0;
  const int64_t start = clock_.now;
  for (int i = 0; i < 2000; ++i) {
    Wait(400000);
    clock_.now += 600000;
  }
  EXPECT_LT(static_cast<double>(spun_ns_), 0.02 * static_cast<double>(clock_.now - start));
}

// Of four ranks the last to come waits little, the others long.
TEST_F(AdaptiveSpinTest, MixedWaitsCostTwoPercent) {
  const auto round = [this](int i) {
    Wait(i % 4 == 0 ? 8000 : 250000 * (i % 4));
    clock_.now += 1000000;
  };
  for (int i = 0; i < 200; ++i) round(i);
  spun_ns_ = 0;
  const int64_t start = clock_.now;
  for (int i = 0; i < 4000; ++i) round(i);
  EXPECT_LT(static_cast<double>(spun_ns_), 0.02 * static_cast<double>(clock_.now - start));
}

// The worst that a schedule can do within a millisecond's period: waits that end just inside what
// pays. See the header: credit a wait, and the share of the time.
TEST_F(AdaptiveSpinTest, NoScheduleCostsMoreThanCreditAndShare) {
  for (int64_t duration : {4000, 12000, 20000, 30000, 50000, 90000, 110000}) {
    SCOPED_TRACE(duration);
    for (int i = 0; i < 400; ++i) {
      Wait(duration);
      clock_.now += 1000000;
    }
    spun_ns_ = 0;
    const int64_t start = clock_.now;
    for (int i = 0; i < 4000; ++i) {
      Wait(duration);
      clock_.now += 1000000;
    }
    EXPECT_LT(static_cast<double>(spun_ns_), 0.0205 * static_cast<double>(clock_.now - start));
  }
}

TEST_F(AdaptiveSpinTest, AfterLongWaitsShortOnesAreSoonCaughtAgain) {
  for (int i = 0; i < 1000; ++i) {
    Wait(2000000);
    clock_.now += 100000;
  }
  // A tight loop of short waits, each followed by little work.
  const int64_t start = clock_.now;
  int in_a_row = 0;
  while (in_a_row < 100 && clock_.now - start < 1000000000) {
    in_a_row = Wait(8000) ? in_a_row + 1 : 0;
    clock_.now += 1000;
  }
  EXPECT_EQ(in_a_row, 100);
  EXPECT_LT(clock_.now - start, 60000000) << "took more than 60 ms to notice";
}

// Where processors are short, a yield runs another thread: that time is not the spinner's.
TEST_F(AdaptiveSpinTest, TimeGivenToOthersIsNotPaidFor) {
  clock_.round = 6000;  // three others of 2 us each, counted with 1 us of our own
  for (int i = 0; i < 10000; ++i) ASSERT_TRUE(Wait(18000)) << i;
}

// A yield that comes back after milliseconds saved nothing: asleep, the waiter would be woken.
TEST_F(AdaptiveSpinTest, AmongComputingProcessesItSleepsAtOnce) {
  clock_.round = 3000000;
  for (int i = 0; i < 3000; ++i) Wait(10000);
  const int64_t yields = clock_.yields;
  for (int i = 0; i < 1000; ++i) {
    Wait(10000);
    clock_.now += 1000000;
  }
  EXPECT_LT(clock_.yields - yields, 200);
}

TEST_F(AdaptiveSpinTest, ABoundOfZeroNeverSpins) {
  AdaptiveSpinOptions options;
  options.min_bound_ns = 0;
  options.max_bound_ns = 0;
  AdaptiveSpin spin(&clock_, options);
  int64_t start = 0;
  EXPECT_FALSE(spin.Spin([] { return false; }, &start));
  EXPECT_EQ(clock_.yields, 0);
}

TEST_F(AdaptiveSpinTest, TheRealClockGoesForward) {
  SpinClock* clock = SpinClock::Real();
  const int64_t before = clock->NowNanos();
  clock->Yield();
  EXPECT_GT(clock->NowNanos(), before);
}

}  // namespace
}  // namespace chorus
