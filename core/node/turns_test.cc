#include "core/node/turns.h"

#include <gtest/gtest.h>

#include <vector>

namespace chorus::node {
namespace {

class TurnsTest : public testing::Test {
 protected:
  // Whose turn it is when the first so many want one.
  size_t Next(size_t count) {
    ++round_;
    size_t next = 0;
    for (size_t i = 0; i < count; ++i) {
      parts_[i].Enter(round_, whole_);
      if (parts_[i].work_after_turn() < parts_[next].work_after_turn()) next = i;
    }
    return next;
  }

  int64_t round_ = 0;
  Turns whole_;
  std::vector<Turns> parts_;
};

TEST_F(TurnsTest, WorkIsSharedEquallyHoweverLongTheTurnsAre) {
  parts_.resize(4);
  int64_t work[4] = {};
  const int64_t of_a_turn[4] = {kTurnWork, kTurnWork / 7, kTurnWork / 100, 3};
  for (int i = 0; i < 100000; ++i) {
    const size_t next = Next(4);
    parts_[next].Leave(of_a_turn[next], &whole_);
    work[next] += of_a_turn[next];
  }
  for (const int64_t one : work) {
    EXPECT_NEAR(static_cast<double>(one), static_cast<double>(work[0]), 2 * kTurnWork);
  }
}

// As slices that are much longer than a turn should be.
TEST_F(TurnsTest, NobodyWaitsForEver) {
  parts_.resize(3);
  const int64_t of_a_turn[3] = {kMaxSliceWork, kTurnWork / 100, 1};
  int turns[3] = {};
  for (int i = 0; i < 200000; ++i) {
    const size_t next = Next(3);
    parts_[next].Leave(of_a_turn[next], &whole_);
    ++turns[next];
  }
  for (const int each : turns) EXPECT_GE(each, 10);
}

TEST_F(TurnsTest, WhoComesBackHasNotSavedUpTurns) {
  parts_.resize(9);
  for (int i = 0; i < 1000; ++i) parts_[Next(8)].Leave(kTurnWork, &whole_);
  int turns = 0;
  for (int i = 0; i < 18; ++i) {
    const size_t next = Next(9);
    parts_[next].Leave(kTurnWork, &whole_);
    turns += next == 8 ? 1 : 0;
  }
  EXPECT_GE(turns, 1);
  EXPECT_LE(turns, 3);
}

// All of them come at once, and one that asks for little is there all the time.
TEST_F(TurnsTest, WhoAsksForLittleIsBeforeAllWhoComeAndAskForMuch) {
  constexpr size_t kMany = 49;
  constexpr int64_t kLittle = 20;
  parts_.resize(1 + kMany);
  for (int burst = 0; burst < 10; ++burst) {
    for (int i = 0; i < 1000; ++i) parts_[Next(1)].Leave(kLittle, &whole_);
    for (size_t i = 0; i < kMany; ++i) {
      EXPECT_EQ(Next(1 + kMany), 0u) << "burst " << burst << ", turn " << i;
      parts_[0].Leave(kLittle, &whole_);
      parts_[1 + i].Leave(kTurnWork, &whole_);
    }
  }
}

}  // namespace
}  // namespace chorus::node
