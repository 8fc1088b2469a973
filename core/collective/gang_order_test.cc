#include "core/collective/gang_order.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "core/base/work.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

// Instances are calls 0, 1, 2 ... of the world group, unless a test says otherwise.
class Gang {
 public:
  explicit Gang(int32_t num_instances) : keys_(num_instances) {
    for (int32_t i = 0; i < num_instances; ++i) {
      keys_[i].at.call = i;
      view_.instances.push_back({&keys_[i], -1});
    }
  }

  // Returns the new run.
  int32_t Run(int32_t rank, std::vector<int32_t> instances, std::vector<int32_t> producers = {}) {
    parts_.emplace_back(instances.size());
    for (Participation& part : parts_.back()) part.member = GroupRank(rank);
    ranks_.push_back({Rank(rank)});
    view_.runs.push_back({parts_.back(), std::move(instances), ranks_.back(), producers});
    return static_cast<int32_t>(view_.runs.size()) - 1;
  }
  // The call at `after` of a run needs the result of the one at `before`.
  void Needs(int32_t run, int32_t after, int32_t before) {
    parts_[run][after].after.push_back(before);
  }
  Participation& part(int32_t run, int32_t i) { return parts_[run][i]; }
  InstanceKey& key(int32_t i) { return keys_[i]; }
  void IsGradientOf(int32_t gradient, int32_t forward) {
    view_.instances[gradient].forward = forward;
  }

  absl::optional<GangConflict> Find(GangOrder* order) const { return FindGangOrder(view_, order); }
  GangOrder Order() const {
    GangOrder order;
    EXPECT_FALSE(Find(&order).has_value());
    return order;
  }
  GangConflict Conflict() const {
    GangOrder order;
    const absl::optional<GangConflict> conflict = Find(&order);
    EXPECT_TRUE(conflict.has_value());
    return conflict.value_or(GangConflict());
  }

 private:
  std::deque<InstanceKey> keys_;
  std::deque<std::vector<Participation>> parts_;
  std::deque<std::vector<Rank>> ranks_;
  GangView view_;
};

TEST(GangOrderTest, FreeInstancesStandByTheirKeysAndWhoCallsOtherwiseIsReordered) {
  Gang gang(3);
  gang.Run(0, {2, 0, 1});
  gang.Run(1, {0, 1, 2});
  const GangOrder order = gang.Order();
  EXPECT_THAT(order.instances, ElementsAre(0, 1, 2));
  EXPECT_THAT(order.runs, ElementsAre(0, 1));
  EXPECT_THAT(order.reordered, ElementsAre(ElementsAre(1, 2, 0), IsEmpty()));
}

TEST(GangOrderTest, EveryRanksDependencesAreKept) {
  Gang gang(3);
  const int32_t first = gang.Run(0, {2, 1});
  gang.Needs(first, 1, 0);
  const int32_t second = gang.Run(1, {1, 0, 2});
  gang.Needs(second, 1, 0);
  EXPECT_THAT(gang.Order().instances, ElementsAre(2, 1, 0));
}

TEST(GangOrderTest, AGradientStandsBehindItsForward) {
  Gang gang(2);
  gang.Run(0, {0, 1});
  gang.IsGradientOf(0, 1);
  EXPECT_THAT(gang.Order().instances, ElementsAre(1, 0));
}

TEST(GangOrderTest, AConsumerStandsBehindAllOfItsProducerAndALocalRunBetween) {
  Gang gang(3);
  const int32_t producer = gang.Run(0, {1, 2});
  const int32_t local = gang.Run(0, {}, {producer});
  gang.Run(0, {0}, {local});
  gang.Run(1, {0, 1, 2});
  const GangOrder order = gang.Order();
  EXPECT_THAT(order.instances, ElementsAre(1, 2, 0));
  EXPECT_THAT(order.runs, ElementsAre(0, 3, 1, 2));
}

TEST(GangOrderTest, ARanksRunsStandInTheOrderOfItsLogIfTheDataAllowsIt) {
  for (const bool forced : {false, true}) {
    Gang gang(2);
    gang.Run(0, {1});
    gang.Run(0, {0});
    const int32_t other = gang.Run(1, {0, 1});
    if (forced) gang.Needs(other, 1, 0);
    const GangOrder order = gang.Order();
    if (forced) {
      EXPECT_THAT(order.instances, ElementsAre(0, 1));
      EXPECT_THAT(order.runs, ElementsAre(1, 2, 0));
    } else {
      EXPECT_THAT(order.instances, ElementsAre(1, 0));
      EXPECT_THAT(order.runs, ElementsAre(0, 2, 1));
    }
  }
}

TEST(GangOrderTest, WhoSendsToItselfDoesSoBeforeItReceives) {
  Gang gang(1);
  gang.key(0).source = GroupRank(0);
  gang.key(0).destination = GroupRank(0);
  const int32_t run = gang.Run(0, {0, 0});
  gang.part(run, 0).is_recv = true;
  EXPECT_THAT(gang.Order().reordered, ElementsAre(ElementsAre(1, 0)));
}

TEST(GangOrderTest, ACircleOfDependencesNamesWhoNeedsWhat) {
  Gang gang(2);
  const int32_t a = gang.Run(0, {0, 1});
  gang.Needs(a, 1, 0);
  const int32_t b = gang.Run(1, {1, 0});
  gang.Needs(b, 1, 0);
  const GangConflict conflict = gang.Conflict();
  EXPECT_FALSE(conflict.interleaved);
  ASSERT_THAT(conflict.circle, SizeIs(2));
  for (const GangConflict::Wait& wait : conflict.circle) {
    EXPECT_FALSE(wait.of_runs);
    EXPECT_EQ(wait.before, 1 - wait.after);
    EXPECT_EQ(wait.run, wait.after == 1 ? a : b);
    EXPECT_EQ(wait.participation, 1);
  }
  EXPECT_GE(conflict.instance, 0);
}

TEST(GangOrderTest, ACircleThroughRunsNamesTheRuns) {
  Gang gang(2);
  const int32_t producer = gang.Run(0, {1});
  const int32_t consumer = gang.Run(0, {0}, {producer});
  const int32_t other = gang.Run(1, {0, 1});
  gang.Needs(other, 1, 0);
  const GangConflict conflict = gang.Conflict();
  ASSERT_THAT(conflict.circle, SizeIs(2));
  int runs = 0;
  for (const GangConflict::Wait& wait : conflict.circle) {
    if (!wait.of_runs) continue;
    ++runs;
    EXPECT_EQ(wait.after, consumer);
    EXPECT_EQ(wait.before, producer);
  }
  EXPECT_EQ(runs, 1);
}

TEST(GangOrderTest, RunsOfOneRankThatWouldInterleaveAreAConflict) {
  Gang gang(3);
  const int32_t around = gang.Run(0, {0, 2});
  const int32_t between = gang.Run(0, {1});
  const int32_t other = gang.Run(1, {0, 1, 2});
  gang.Needs(other, 1, 0);
  gang.Needs(other, 2, 1);
  const GangConflict conflict = gang.Conflict();
  EXPECT_TRUE(conflict.interleaved);
  EXPECT_EQ(conflict.rank, Rank(0));
  EXPECT_EQ(conflict.run, between);
  EXPECT_EQ(conflict.other_run, around);
  EXPECT_EQ(conflict.instance, 1);
}

// A local run has no instance to name: the other's is named.
TEST(GangOrderTest, ALocalRunBetweenTheCollectivesOfAnotherIsAConflictThatNamesTheOther) {
  Gang gang(3);
  const int32_t around = gang.Run(0, {0, 2});
  const int32_t elsewhere = gang.Run(1, {1});
  const int32_t local = gang.Run(0, {}, {elsewhere});
  const int32_t other = gang.Run(2, {0, 1, 2});
  gang.Needs(other, 1, 0);
  gang.Needs(other, 2, 1);
  gang.Run(3, {2}, {local});
  const GangConflict conflict = gang.Conflict();
  EXPECT_TRUE(conflict.interleaved);
  EXPECT_EQ(conflict.run, local);
  EXPECT_EQ(conflict.other_run, around);
  EXPECT_EQ(conflict.instance, 0);
}

// `calls` of which each of the second half needs all of the first; or each another but one.
enum class Needs { kAll, kAllButOne };
void AllNeedAll(Gang* gang, int32_t rank, const std::vector<int32_t>& calls,
                Needs needs = Needs::kAll) {
  const auto half = static_cast<int32_t>(calls.size() / 2);
  const int32_t run = gang->Run(rank, calls);
  for (int32_t after = half; after < 2 * half; ++after) {
    for (int32_t before = 0; before < half; ++before) {
      if (needs == Needs::kAllButOne && before == after - half) continue;
      gang->Needs(run, after, before);
    }
  }
}

std::vector<int32_t> Numbers(int32_t count) {
  std::vector<int32_t> numbers(static_cast<size_t>(count));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

TEST(GangOrderTest, WhatItTakesDoesNotGrowWithTheNeedsOfACall) {
  for (const int32_t half : {251, 512}) {
    Gang gang(2 * half);
    for (int32_t rank = 0; rank < 2; ++rank) {
      AllNeedAll(&gang, rank, Numbers(2 * half), rank == 0 ? Needs::kAll : Needs::kAllButOne);
    }
    const WorkSlice slice;
    const GangOrder order = gang.Order();
    EXPECT_EQ(order.instances, Numbers(2 * half));
    EXPECT_THAT(order.reordered, Each(IsEmpty()));
    EXPECT_LT(SliceWork(), 20 * 2 * half) << half;
  }
}

// About as many needs as there may be without that, and more.
TEST(GangOrderTest, ARunOfManyNeedsStandsInTheOrderOfItsProgram) {
  const auto half = static_cast<int32_t>(std::sqrt(kMostNeeds)) - 1;
  for (const bool many : {false, true}) {
    SCOPED_TRACE(many);
    const int32_t size = 2 * half + (many ? 60 : 0);
    // Half of the second rank's calls stand the other way round. The first rank needs few, so that
    // its own order is any.
    std::vector<int32_t> calls = Numbers(size);
    std::reverse(calls.begin(), calls.begin() + size / 2);
    Gang gang(size);
    const int32_t first = gang.Run(0, Numbers(size));
    AllNeedAll(&gang, 1, calls, Needs::kAllButOne);
    EXPECT_EQ(gang.Order().instances, many ? calls : Numbers(size));
    gang.Needs(first, 7, 3);
    if (!many) {
      EXPECT_EQ(gang.Order().instances, Numbers(size));
      continue;
    }
    const GangConflict conflict = gang.Conflict();
    ASSERT_THAT(conflict.circle, Not(IsEmpty()));
    for (const GangConflict::Wait& wait : conflict.circle) {
      EXPECT_EQ(wait.run, wait.after == 7 ? first : 1);
      EXPECT_EQ(wait.participation, wait.after == 7 ? 7 : size / 2 - 1 - wait.after);
    }
  }
}

// As many as there are, each rank may have an order of its own.
TEST(GangOrderTest, CallsThatNeedTheSameMayStandInAnyOrder) {
  constexpr int32_t kHalf = 512;
  for (const bool chain : {false, true}) {
    SCOPED_TRACE(chain);
    Gang gang(2 * kHalf);
    std::vector<int32_t> calls = Numbers(2 * kHalf);
    for (int32_t rank = 0; rank < 2; ++rank) {
      if (!chain) {
        AllNeedAll(&gang, rank, calls);
        std::reverse(calls.begin(), calls.begin() + kHalf);
        continue;
      }
      // Each needs all before it.
      const int32_t run = gang.Run(rank, calls);
      for (int32_t after = 0; after < 2 * kHalf; ++after) {
        for (int32_t before = 0; before < after; ++before) gang.Needs(run, after, before);
      }
    }
    const WorkSlice slice;
    EXPECT_EQ(gang.Order().instances, Numbers(2 * kHalf));
    EXPECT_LT(SliceWork(), 20 * 2 * kHalf + 2 * kHalf * kHalf / 8);
  }
  // And what contradicts that is told by the calls that wait for each other.
  Gang gang(2 * kHalf);
  AllNeedAll(&gang, 0, Numbers(2 * kHalf));
  const int32_t other = gang.Run(1, Numbers(2 * kHalf));
  gang.Needs(other, 3, kHalf + 5);
  const GangConflict conflict = gang.Conflict();
  ASSERT_THAT(conflict.circle, SizeIs(2));
  for (const GangConflict::Wait& wait : conflict.circle) {
    EXPECT_EQ(wait.run, wait.after == 3 ? other : 0);
    EXPECT_EQ(wait.before, wait.after == 3 ? kHalf + 5 : 3);
  }
}

// What calls have in common changes nothing: against all pairs one by one.
TEST(GangOrderTest, TheOrderIsThatOfAllNeeds) {
  constexpr int32_t kCalls = 24;
  constexpr int kGangs = 2000;
  std::mt19937_64 random(20261126);
  const auto below = [&random](int32_t bound) {
    return static_cast<int32_t>(random() % static_cast<uint64_t>(bound));
  };
  int circles = 0;
  for (int g = 0; g < kGangs; ++g) {
    SCOPED_TRACE(g);
    Gang gang(kCalls);
    bool needs[kCalls][kCalls] = {};  // by instance: the first is needed by the second
    for (int32_t rank = 0; rank < 3; ++rank) {
      std::vector<int32_t> calls = Numbers(kCalls);
      // Mostly in order, so that there are gangs without a circle.
      for (int32_t swaps = below(3); swaps > 0; --swaps) {
        std::swap(calls[static_cast<size_t>(below(kCalls))],
                  calls[static_cast<size_t>(below(kCalls))]);
      }
      const int32_t run = gang.Run(rank, calls);
      std::vector<int32_t> last;
      for (int32_t after = 1; after < kCalls; ++after) {
        std::vector<int32_t> next;
        const int32_t kind = below(4);
        if (kind == 0) next = last;
        for (int32_t before = 0; before < after; ++before) {
          const bool was = std::find(last.begin(), last.end(), before) != last.end();
          if (kind == 1 && (was || before > below(after) + 8)) next.push_back(before);
          if (kind == 2 && below(3) == 0) next.push_back(before);
        }
        for (const int32_t before : next) {
          gang.Needs(run, after, before);
          needs[calls[static_cast<size_t>(before)]][calls[static_cast<size_t>(after)]] = true;
        }
        last = next;
      }
    }
    std::vector<int32_t> expected;
    bool placed[kCalls] = {};
    const auto is_free = [&](int32_t i) {
      for (int32_t before = 0; before < kCalls; ++before) {
        if (needs[before][i] && !placed[before]) return false;
      }
      return !placed[i];
    };
    for (int32_t i = 0; i < kCalls;) {
      if (!is_free(i)) {
        ++i;
        continue;
      }
      placed[i] = true;
      expected.push_back(i);
      i = 0;
    }
    GangOrder order;
    const absl::optional<GangConflict> conflict = gang.Find(&order);
    ASSERT_EQ(conflict.has_value(), expected.size() < kCalls);
    if (!conflict.has_value()) {
      ASSERT_EQ(order.instances, expected);
      continue;
    }
    ++circles;
    // Each waits for what it needs.
    ASSERT_THAT(conflict->circle, Not(IsEmpty()));
    for (const GangConflict::Wait& wait : conflict->circle) {
      ASSERT_TRUE(needs[wait.before][wait.after]);
      ASSERT_GE(wait.run, 0);
    }
  }
  EXPECT_GT(circles, kGangs / 10);
  EXPECT_LT(circles, kGangs - kGangs / 10);
}

// A run that speaks for two members, whose calls of an instance stand together or do not.
TEST(GangOrderTest, ARunOfManyNeedsMayComeToAnInstanceTwice) {
  const int32_t half = 256;
  for (const bool one_by_one : {false, true}) {
    SCOPED_TRACE(one_by_one);
    Gang gang(2 * half);
    std::vector<int32_t> calls;
    for (int32_t i = 0; i < 4 * half; ++i) calls.push_back(one_by_one ? i % (2 * half) : i / 2);
    const int32_t run = gang.Run(0, calls);
    const auto phase = [&](int32_t i) { return calls[i] / half; };
    for (int32_t after = 0; after < 4 * half; ++after) {
      for (int32_t before = 0; before < after; ++before) {
        if (phase(before) < phase(after)) gang.Needs(run, after, before);
      }
    }
    EXPECT_EQ(gang.Order().instances, Numbers(2 * half));
    // The second member's first call needs what the first one has made of the last.
    if (!one_by_one) continue;
    gang.Needs(run, 2 * half, 2 * half - 1);
    const GangConflict conflict = gang.Conflict();
    EXPECT_THAT(conflict.circle, Not(IsEmpty()));
  }
}

TEST(GangOrderTest, ManyConsumersOfALargeRunTakeNoMoreThanOne) {
  const int32_t size = 1000;
  Gang gang(size + 1);
  int32_t last = gang.Run(0, Numbers(size));
  for (int32_t i = 0; i < size; ++i) last = gang.Run(0, {}, {0, last});
  gang.Run(0, {size}, {last});
  const WorkSlice slice;
  EXPECT_EQ(gang.Order().instances, Numbers(size + 1));
  EXPECT_LT(SliceWork(), 20 * size);
}

}  // namespace
}  // namespace chorus
