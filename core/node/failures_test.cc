#include "core/node/failures.h"

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "core/base/counting_heap.h"
#include "core/base/error.h"
#include "core/base/work.h"
#include "core/collective/decisions.h"
#include "core/collective/vote.h"
#include "core/node/agreement.h"
#include "core/node/records.h"
#include "core/node/timers.h"
#include "core/node/world.h"
#include "core/runtime/budget.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

class GivenUpTest : public ::testing::Test {
 protected:
  GivenUpTest() {
    world_.tenant = "uid:0";
    EXPECT_TRUE(world_.MakeMembers(3).ok());
  }
  static LaunchedInstance GivenUp(int32_t rank, const std::string& line) {
    LaunchedInstance instance;
    instance.given_up.push_back(
        {Rank(rank), std::make_shared<const PartLabel>(PartLabel{"sum", "sum f32[4]", line})});
    return instance;
  }
  // The error that tells of it.
  static ErrorId GiveUp(Failures* failures, World* world, int32_t rank, const std::string& line) {
    EXPECT_EQ(failures->NoteGivenUp(world, {GivenUp(rank, line)}, Ticket(1), absl::UnixEpoch()), 1);
    return failures->flight().Latest(1)[0].error;
  }

  World world_{Budget::OfNode(int64_t{1} << 20)};
};

TEST_F(GivenUpTest, EachLineOfEachRankHasItsError) {
  ErrorStore errors(kMaxErrors);
  Failures failures(&errors, nullptr);
  const ErrorId first = GiveUp(&failures, &world_, 0, "train.py:1");
  const ErrorId line = GiveUp(&failures, &world_, 0, "train.py:2");
  const ErrorId rank = GiveUp(&failures, &world_, 2, "train.py:1");
  EXPECT_NE(first, line);
  EXPECT_NE(first, rank);
  EXPECT_NE(line, rank);
  EXPECT_EQ(GiveUp(&failures, &world_, 0, "train.py:1"), first) << "it is told once";
  EXPECT_EQ(GiveUp(&failures, &world_, 2, "train.py:1"), rank);
  EXPECT_EQ(errors.Find(rank, "uid:0")->culprit.rank, 2);
  EXPECT_EQ(errors.Find(line, "uid:0")->source, "train.py:2");
}

// One launch may have as many as a graph may have collectives, each in a line of its own.
TEST_F(GivenUpTest, OfManyLinesEachHasItsTurn) {
  constexpr int kLines = 2048;
  constexpr int kAtOnce = Failures::kMostToldAtOnce;
  ErrorStore errors(kMaxErrors);
  Failures failures(&errors, nullptr);
  std::vector<LaunchedInstance> launch;
  for (int line = 0; line < kLines; ++line) {
    launch.push_back(GivenUp(line % 3, absl::StrCat("train.py:", line)));
  }
  std::set<std::string> told;
  for (int64_t ticket = 1; ticket <= kLines / kAtOnce; ++ticket) {
    const WorkSlice slice;
    ASSERT_EQ(failures.NoteGivenUp(&world_, launch, Ticket(ticket), absl::UnixEpoch()), kLines);
    EXPECT_GE(SliceWork(), kLines);
    EXPECT_LE(SliceWork(), kMaxSliceWork / 2);
    int64_t of_others = 0;
    for (const FlightEvent& event : failures.flight().Latest(kLines)) {
      if (event.ticket != Ticket(ticket)) continue;
      const Error error = *errors.Find(event.error, "uid:0");
      EXPECT_EQ(error.reason, Reason::kGradientLost);
      const size_t at = error.message.find("So it is with ");
      if (at == std::string::npos) {
        told.insert(error.source);
      } else {
        EXPECT_TRUE(
            absl::SimpleAtoi(absl::string_view(error.message)
                                 .substr(at + 14, error.message.find(' ', at + 14) - at - 14),
                             &of_others));
      }
    }
    ASSERT_EQ(told.size(), ticket * kAtOnce);
    // Beside those that have been told of lately.
    EXPECT_GE(of_others, kLines - World::kMostGivenUp - kAtOnce);
    EXPECT_LE(of_others, kLines - kAtOnce);
  }
}

// A world is charged for what is kept of lines, however many there are and however long.
TEST_F(GivenUpTest, WhatIsKeptOfLinesIsWhatAWorldIsChargedFor) {
  ErrorStore errors(/*capacity=*/1);
  Failures failures(&errors, nullptr);
  const std::string folder(240, '/');
  GiveUp(&failures, &world_, 0, folder);
  const HeapUse heap;
  for (int line = 0; line < 1009; ++line) {
    GiveUp(&failures, &world_, line % 3, absl::StrCat(folder, line, ".py:1"));
    ASSERT_LE(heap.bytes(), World::kGivenUpBytes) << line;
    ASSERT_LE(world_.given_up.size(), World::kMostGivenUp);
  }
}

// Those for which there is no memory are counted.
TEST(WorldTest, WarningsThatWaitAreChargedInTheirOrder) {
  constexpr size_t kWarnings = 1000;
  const BudgetRef node = Budget::OfNode(int64_t{1} << 20);
  TimerQueue timers;
  World world(node);
  ASSERT_TRUE(world.MakeMembers(2).ok());
  world.agreement = std::make_unique<Agreement>(&world, SequencerOptions(), /*queue=*/nullptr,
                                                &timers, /*background=*/nullptr);
  const int64_t charged_before = node->used();
  const auto text = [](size_t i) { return absl::StrCat(i, std::string(2000, 'w')); };
  EXPECT_FALSE(world.warns());
  for (size_t i = 0; i < kWarnings; ++i) {
    world.AddWarning(std::make_shared<const Error>(Reason::kMismatch, text(i)));
  }
  const size_t kept = world.warnings.size();
  ASSERT_GT(kept, 100u);
  ASSERT_LT(kept, kWarnings);
  constexpr int64_t kStep = int64_t{64} << 10;
  EXPECT_GE(node->used() - charged_before, static_cast<int64_t>(kept) * 2000 - kStep);
  for (size_t i = 0; i < kept; ++i) {
    ASSERT_TRUE(world.warns());
    ASSERT_EQ(world.TakeWarning()->message, text(i));
  }
  ASSERT_TRUE(world.warns());
  const std::shared_ptr<const Error> last = world.TakeWarning();
  EXPECT_EQ(last->reason, Reason::kMismatch);
  EXPECT_NE(last->message.find(absl::StrCat(kWarnings - kept, " more calls")), std::string::npos)
      << last->message;
  EXPECT_FALSE(world.warns());
  world.TakeBeyond();
  EXPECT_EQ(node->used(), charged_before);
}

}  // namespace
}  // namespace chorus::node
