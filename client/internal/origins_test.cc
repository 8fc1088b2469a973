#include "client/internal/origins.h"

#include <cstdint>
#include <vector>

#include "core/base/ids.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace internal {
namespace {

using ::testing::ElementsAre;

// Runs have ten times the numbers of their origins.
class OriginsTest : public ::testing::Test {
 protected:
  OriginPtr Add(const Origins& operands = {}) {
    return table_.Add(Sequence(10 * ++num_runs_), nullptr, operands);
  }
  // The indices of both, in whatever order they are joined.
  std::vector<int64_t> Joined(const Origins& a, const Origins& b) const {
    const auto oldest_run = [this] { return oldest_run_; };
    Origins both = a;
    OriginTable::Join(&both, b, oldest_run);
    Origins reverse = b;
    OriginTable::Join(&reverse, a, oldest_run);
    EXPECT_EQ(both, reverse);
    std::vector<int64_t> indices;
    for (const OriginPtr& origin : both) indices.push_back(origin->index);
    return indices;
  }

  OriginTable table_;
  int64_t num_runs_ = 0;
  Sequence oldest_run_;
};

TEST_F(OriginsTest, RunsThatDoNotWaitForEachOtherAreAllWaitedFor) {
  const OriginPtr one = Add();
  const OriginPtr two = Add();
  const OriginPtr three = Add();
  EXPECT_THAT(Joined({}, {}), ElementsAre());
  EXPECT_THAT(Joined({}, {two}), ElementsAre(2));
  EXPECT_THAT(Joined({two}, {two}), ElementsAre(2));
  EXPECT_THAT(Joined({one, three}, {two, three}), ElementsAre(1, 2, 3));
}

TEST_F(OriginsTest, OfAChainTheLastIsWaitedFor) {
  const OriginPtr one = Add();
  const OriginPtr beside = Add();
  const OriginPtr three = Add({one});
  const OriginPtr four = Add({three});
  const OriginPtr five = Add({beside, three});
  EXPECT_THAT(Joined({one}, {three}), ElementsAre(3));
  EXPECT_THAT(Joined({one}, {four}), ElementsAre(4));
  EXPECT_THAT(Joined({one, beside}, {four}), ElementsAre(2, 4));
  EXPECT_THAT(Joined({beside, four}, {five}), ElementsAre(4, 5));
  EXPECT_THAT(Joined({one, beside}, {four, five}), ElementsAre(4, 5));
}

TEST_F(OriginsTest, WhatIsFarBackMayBeWaitedForTwice) {
  const auto size = static_cast<int64_t>(EarlierRuns().size());
  for (const int64_t distance : {size - 1, size, size + 1}) {
    const OriginPtr early = Add();
    for (int64_t i = 1; i < distance; ++i) Add();
    const OriginPtr late = Add({early});
    const OriginPtr later = Add({late});
    const int64_t n = late->index;
    ASSERT_EQ(n, early->index + distance);
    if (distance <= size) {
      EXPECT_THAT(Joined({early}, {late}), ElementsAre(n)) << distance;
    } else {
      EXPECT_THAT(Joined({early}, {late}), ElementsAre(early->index, n)) << distance;
    }
    if (distance < size) {
      EXPECT_THAT(Joined({early}, {later}), ElementsAre(n + 1)) << distance;
    } else {
      EXPECT_THAT(Joined({early}, {later}), ElementsAre(early->index, n + 1)) << distance;
    }
    EXPECT_THAT(Joined({late}, {later}), ElementsAre(n + 1)) << distance;
  }
}

TEST_F(OriginsTest, OfManyThoseThatMayBeUnderWayAreWaitedFor) {
  Origins eight;
  for (int i = 0; i < 8; ++i) eight.push_back(Add());
  oldest_run_ = Sequence(70);
  EXPECT_THAT(Joined({eight[0], eight[7]}, eight), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
  EXPECT_THAT(Joined(eight, {Add()}), ElementsAre(7, 8, 9));
  oldest_run_ = Sequence(1000);
  EXPECT_THAT(Joined(eight, {Add()}), ElementsAre());
}

}  // namespace
}  // namespace internal
}  // namespace chorus
