#include "core/node/command_log.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/counting_heap.h"
#include "core/base/error.h"
#include "core/transport/completion.h"
#include "core/transport/session_memory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

const absl::Time kStart = absl::FromUnixSeconds(1000);

// Outcomes of the commands that are waited for: "SEQUENCE REASON", in the order of telling.
class CommandLogTest : public ::testing::Test {
 protected:
  OnOutcome Note() {
    return [this](const Outcome& outcome) {
      told_.push_back(
          absl::StrCat(outcome.sequence.value(), " ",
                       outcome.status.ok() ? "OK" : ReasonName(ErrorOf(outcome.status).reason)));
      last_ = outcome.status;
    };
  }
  void Hold(int64_t sequence, absl::Time now = kStart) {
    log_.Hold(Sequence(sequence), absl::StrCat("frame ", sequence), now, Note());
  }
  // Takes a command whose turn it is, and ends it.
  void Run(int64_t sequence) {
    ASSERT_EQ(log_.next(), Sequence(sequence));
    log_.Begin(Sequence(sequence), nullptr);
    log_.Finish(Sequence(sequence));
  }

  TimerQueue timers_;
  ErrorStore errors_{4};
  News news_;
  Completions completions_{&news_};
  BudgetRef budget_ = Budget::OfNode(1 << 20);
  CommandLog log_{{&timers_, &errors_, absl::Seconds(10)}, "uid:1", budget_, &completions_};
  std::vector<std::string> told_;
  absl::Status last_;
};

TEST_F(CommandLogTest, ParkedItHoldsWhatComesWithoutAGap) {
  log_.Begin(Sequence(1), Note());
  EXPECT_FALSE(log_.IsEarly(Sequence(2)));
  log_.Park();
  EXPECT_TRUE(log_.IsEarly(Sequence(2)));
  EXPECT_FALSE(log_.IsEarly(Sequence(1))) << "a repeat waits for its outcome";
  Hold(3);
  Hold(2);
  int calls = 0;
  log_.WhenTaken(absl::InfiniteFuture(),
                 [&](const absl::Status& status) { calls += status.ok() ? 1 : 100; });
  timers_.Fire(kStart + absl::Hours(1));
  EXPECT_THAT(told_, IsEmpty()) << "nothing is missing";
  log_.Unpark();
  log_.Finish(Sequence(1));
  for (const int64_t sequence : {2, 3}) {
    const absl::optional<CommandLog::HeldFrame> held = log_.TakeHeld(kStart);
    ASSERT_TRUE(held.has_value());
    EXPECT_EQ(held->frame, absl::StrCat("frame ", sequence));
    EXPECT_EQ(calls, 0);
    Run(sequence);
  }
  EXPECT_FALSE(log_.TakeHeld(kStart).has_value());
  EXPECT_EQ(calls, 1);
  log_.WhenTaken(kStart, [&](const absl::Status& status) { calls += status.ok() ? 1 : 100; });
  EXPECT_EQ(calls, 2);
}

TEST_F(CommandLogTest, AGapBehindAParkedCommandHasItsTimeWhenTheLogGoesOn) {
  Hold(3);
  log_.Begin(Sequence(1), nullptr);
  log_.Park();
  timers_.Fire(kStart + absl::Hours(1));
  EXPECT_THAT(told_, IsEmpty());
  log_.Unpark();
  log_.Finish(Sequence(1));
  EXPECT_FALSE(log_.TakeHeld(kStart + absl::Hours(1)).has_value());
  timers_.Fire(kStart + absl::Hours(1) + absl::Seconds(9));
  EXPECT_THAT(told_, IsEmpty());
  timers_.Fire(kStart + absl::Hours(1) + absl::Seconds(10));
  EXPECT_THAT(told_, ElementsAre("3 SEQUENCE_GAP"));
}

TEST_F(CommandLogTest, AbandonedItTellsWhoWaitsForItToGoOn) {
  log_.Begin(Sequence(1), nullptr);
  log_.Park();
  absl::Status outcome;
  const TimerQueue::Id timer = log_.WhenTaken(
      kStart + absl::Hours(1), [&](const absl::Status& status) { outcome = status; });
  log_.Abandon(MakeError(Reason::kDraining, "the end"));
  EXPECT_EQ(ErrorOf(outcome).reason, Reason::kDraining);
  EXPECT_NE(timer.serial, 0u);
  EXPECT_EQ(timers_.Next(), absl::InfiniteFuture());
}

TEST_F(CommandLogTest, WhoWaitsForItToGoOnWaitsNoLongerThanItsDeadline) {
  log_.Begin(Sequence(1), nullptr);
  log_.Park();
  std::vector<Reason> told;
  const auto note = [&](const absl::Status& status) { told.push_back(ErrorOf(status).reason); };
  log_.WhenTaken(kStart + absl::Seconds(2), note);
  const TimerQueue::Id withdrawn = log_.WhenTaken(kStart + absl::Hours(1), note);
  timers_.Fire(kStart + absl::Seconds(1));
  EXPECT_THAT(told, IsEmpty());
  timers_.Fire(kStart + absl::Seconds(2));
  EXPECT_THAT(told, ElementsAre(Reason::kTransportTimeout));
  timers_.Expire(withdrawn, kStart + absl::Seconds(3));
  EXPECT_THAT(told, ElementsAre(Reason::kTransportTimeout, Reason::kTransportTimeout));
  log_.Unpark();
  log_.Finish(Sequence(1));
  EXPECT_FALSE(log_.TakeHeld(kStart).has_value());
  EXPECT_THAT(told, SizeIs(2)) << "once each";
}

TEST_F(CommandLogTest, WhoeverWaitsIsToldOnce) {
  log_.Begin(Sequence(1), Note());
  log_.Wait(Sequence(1), absl::InfiniteFuture(), Note());
  EXPECT_THAT(told_, IsEmpty());
  log_.Finish(Sequence(1));
  EXPECT_THAT(told_, ElementsAre("1 OK", "1 OK"));
  log_.Wait(Sequence(1), absl::InfiniteFuture(), Note());  // answered from the record
  EXPECT_EQ(told_.size(), 3u);
  EXPECT_EQ(log_.taken(), 1);
}

TEST_F(CommandLogTest, AnErrorIsToldAsItWasRecordedUntilItIsForgotten) {
  Error error(Reason::kBadType, "f32 was expected");
  errors_.Record("uid:1", &error);
  log_.Begin(Sequence(1), nullptr);
  log_.Finish(Sequence(1), error);
  log_.Wait(Sequence(1), absl::InfiniteFuture(), Note());
  EXPECT_EQ(ErrorOf(last_).message, "f32 was expected");
  for (int i = 0; i < 4; ++i) {
    Error other(Reason::kBadType, absl::StrCat("another ", i));
    errors_.Record("uid:1", &other);
  }
  log_.Wait(Sequence(1), absl::InfiniteFuture(), Note());
  EXPECT_THAT(told_, ElementsAre("1 BAD_TYPE", "1 OUTCOME_FORGOTTEN"));
}

TEST_F(CommandLogTest, WhatWentWellLongAgoWentWell) {
  for (int64_t i = 1; i <= CommandLog::kKeptOutcomes + 1; ++i) Run(i);
  log_.Wait(Sequence(2), absl::InfiniteFuture(), Note());
  log_.Wait(Sequence(1), absl::InfiniteFuture(), Note());
  log_.Wait(Sequence(0), absl::InfiniteFuture(), Note());
  EXPECT_THAT(told_, ElementsAre("2 OK", "1 OK", "0 OUTCOME_FORGOTTEN"));
}

TEST_F(CommandLogTest, WhatIsNotOverIsNotForgotten) {
  log_.Begin(Sequence(1), nullptr);
  log_.Begin(Sequence(2), nullptr);
  for (int64_t i = 3; i <= 3 * CommandLog::kKeptOutcomes; ++i) Run(i);
  log_.Wait(Sequence(1), absl::InfiniteFuture(), Note());
  log_.Wait(Sequence(2), kStart, Note());
  EXPECT_THAT(told_, IsEmpty());
  timers_.Fire(kStart);
  EXPECT_THAT(told_, ElementsAre("2 TRANSPORT_TIMEOUT"));
  log_.Finish(Sequence(1));
  EXPECT_THAT(told_, ElementsAre("2 TRANSPORT_TIMEOUT", "1 OK"));
  Error error(Reason::kBadType, "f32 was expected");
  errors_.Record("uid:1", &error);
  log_.Finish(Sequence(2), error);
  log_.Wait(Sequence(1), absl::InfiniteFuture(), Note());
  log_.Wait(Sequence(2), absl::InfiniteFuture(), Note());
  EXPECT_THAT(told_, ElementsAre("2 TRANSPORT_TIMEOUT", "1 OK", "1 OK", "2 BAD_TYPE"));
}

// The first failure of all is the one too many.
TEST_F(CommandLogTest, SoManyFailuresOfLongAgoAreKept) {
  Error error(Reason::kBadType, "f32 was expected");
  errors_.Record("uid:1", &error);
  const int64_t failures = CommandLog::kKeptOutcomes + 1;
  Run(1);
  for (int64_t i = 2; i < 2 + failures; ++i) {
    log_.Begin(Sequence(i), nullptr);
    log_.Finish(Sequence(i), error);
  }
  for (int64_t i = 2 + failures; i < 2 + failures + CommandLog::kKeptOutcomes; ++i) Run(i);
  for (const int64_t asked : {1, 2, 3, 1026, 1027}) {
    log_.Wait(Sequence(asked), absl::InfiniteFuture(), Note());
  }
  EXPECT_THAT(told_, ElementsAre("1 OUTCOME_FORGOTTEN", "2 OUTCOME_FORGOTTEN", "3 BAD_TYPE",
                                 "1026 BAD_TYPE", "1027 OK"));
}

TEST_F(CommandLogTest, SharedMemorySaysWhatIsNotOverThoughItsRecordIsGone) {
  const auto memory = CreateSessionMemory({4096, 16});
  ASSERT_TRUE(memory.ok()) << memory.status();
  const CompletionWaiter client(memory->get());
  const auto may_go_on = [&] {
    return std::make_pair(client.MayGoOn(Sequence(1)), client.MayGoOn(Sequence(2)));
  };
  completions_.Attach(memory->get());
  log_.Begin(Sequence(1), nullptr);
  log_.Begin(Sequence(2), nullptr);
  for (int64_t i = 3; i <= CommandLog::kKeptOutcomes + 2; ++i) Run(i);
  EXPECT_EQ(ErrorOf(client.Run(Sequence(1)).status()).reason, Reason::kOutcomeForgotten);
  EXPECT_EQ(may_go_on(), std::make_pair(true, true));
  log_.Finish(Sequence(1));
  EXPECT_EQ(may_go_on(), std::make_pair(false, true));
  log_.Finish(Sequence(2));
  EXPECT_EQ(may_go_on(), std::make_pair(false, false));
  completions_.Detach();
}

TEST_F(CommandLogTest, AWaitEndsAtItsDeadline) {
  log_.Wait(Sequence(1), kStart + absl::Seconds(1), Note());  // it has not come
  timers_.Fire(kStart);
  EXPECT_THAT(told_, IsEmpty());
  timers_.Fire(kStart + absl::Seconds(1));
  EXPECT_THAT(told_, ElementsAre("1 TRANSPORT_TIMEOUT"));
  Run(1);
  EXPECT_EQ(told_.size(), 1u) << "it was told already";
  EXPECT_EQ(timers_.Next(), absl::InfiniteFuture());
}

TEST_F(CommandLogTest, AWaitMayEndBeforeItsDeadline) {
  const TimerQueue::Id first = log_.Wait(Sequence(1), kStart + absl::Seconds(1), Note());
  const TimerQueue::Id second = log_.Wait(Sequence(1), kStart + absl::Seconds(1), Note());
  timers_.Expire(first, kStart);
  EXPECT_THAT(told_, ElementsAre("1 TRANSPORT_TIMEOUT"));
  Run(1);
  EXPECT_THAT(told_, ElementsAre("1 TRANSPORT_TIMEOUT", "1 OK"));
  timers_.Expire(second, kStart);
  EXPECT_EQ(told_.size(), 2u) << "it was told already";
  EXPECT_EQ(timers_.Next(), absl::InfiniteFuture());
}

TEST_F(CommandLogTest, WhatHasBeenToldNeedsNoTimer) {
  log_.Wait(Sequence(1), kStart + absl::Seconds(1), Note());
  Run(1);
  EXPECT_THAT(told_, ElementsAre("1 OK"));
  EXPECT_EQ(timers_.Next(), absl::InfiniteFuture());
}

TEST_F(CommandLogTest, HeldFramesComeInTheirTurn) {
  Hold(3);
  Hold(2);
  EXPECT_FALSE(log_.TakeHeld(kStart).has_value()) << "1 has not come";
  Run(1);
  for (const char* frame : {"frame 2", "frame 3"}) {
    const absl::optional<CommandLog::HeldFrame> held = log_.TakeHeld(kStart);
    ASSERT_TRUE(held.has_value());
    EXPECT_EQ(held->frame, frame);
    log_.Begin(log_.next(), nullptr);
  }
  EXPECT_FALSE(log_.TakeHeld(kStart).has_value());
  EXPECT_FALSE(log_.holds());
  EXPECT_EQ(timers_.Next(), absl::InfiniteFuture());
}

TEST_F(CommandLogTest, AGapHasALimit) {
  Hold(3);
  Hold(2, kStart + absl::Seconds(5));  // the clock runs since the first
  timers_.Fire(kStart + absl::Seconds(10));
  EXPECT_THAT(told_, ElementsAre("2 SEQUENCE_GAP", "3 SEQUENCE_GAP"));
  EXPECT_THAT(ErrorOf(last_).message, HasSubstr("command 1 did not arrive within 10s"));
  EXPECT_FALSE(log_.holds());
}

TEST_F(CommandLogTest, WhatIsHeldBehindAnotherGapHasATimeOfItsOwn) {
  Hold(2);
  Hold(5);
  Run(1);
  ASSERT_TRUE(log_.TakeHeld(kStart + absl::Seconds(9)).has_value());
  Run(2);
  EXPECT_FALSE(log_.TakeHeld(kStart + absl::Seconds(9)).has_value());
  timers_.Fire(kStart + absl::Seconds(18));
  EXPECT_THAT(told_, ElementsAre("2 OK"));
  timers_.Fire(kStart + absl::Seconds(19));
  EXPECT_THAT(told_, ElementsAre("2 OK", "5 SEQUENCE_GAP"));
  EXPECT_THAT(ErrorOf(last_).message, HasSubstr("command 3 did not arrive"));
}

TEST_F(CommandLogTest, SoManyFramesAreHeldAndNoMore) {
  for (size_t i = 0; i < CommandLog::kMaxHeldFrames; ++i) Hold(static_cast<int64_t>(i) + 2);
  EXPECT_THAT(told_, IsEmpty());
  Hold(5000);
  EXPECT_THAT(told_, ElementsAre("5000 SEQUENCE_GAP"));
  EXPECT_THAT(ErrorOf(last_).message,
              HasSubstr("command 5000 came before command 1, and is not kept until that comes"));
  Hold(2);  // held already: a second sender waits as well
  EXPECT_EQ(told_.size(), 1u);
}

TEST_F(CommandLogTest, HeldFramesAreChargedWhileTheyAreHeld) {
  constexpr int64_t kHalf = 1 << 19;  // with its row
  const std::string half(kHalf - CommandLog::kHeldRowBytes, 'x');
  log_.Hold(Sequence(2), half, kStart, Note());
  EXPECT_EQ(budget_->used(), kHalf);
  log_.Hold(Sequence(2), half, kStart, Note());  // again
  EXPECT_EQ(budget_->used(), kHalf);
  log_.Hold(Sequence(3), half + "x", kStart, Note());
  EXPECT_THAT(told_, ElementsAre("3 SEQUENCE_GAP"));
  Run(1);
  ASSERT_TRUE(log_.TakeHeld(kStart).has_value());
  EXPECT_EQ(budget_->used(), 0);
}

TEST_F(CommandLogTest, ASenderThatIsForgottenIsNotTold) {
  const auto held = std::make_shared<int>(0);
  const auto note = [&] {
    return [held, told = Note()](const Outcome& outcome) { told(outcome); };
  };
  std::vector<CommandLog::Sender> senders;
  for (int i = 0; i < 3; ++i) senders.push_back(log_.Hold(Sequence(2), "two", kStart, note()));
  senders.push_back(log_.Begin(Sequence(1), note()));
  for (int i = 0; i < 3; ++i) senders.push_back(log_.Repeat(Sequence(1), note()));
  EXPECT_EQ(held.use_count(), 8);
  log_.Forget(senders[1]);
  log_.Forget(senders[3]);
  log_.Forget(senders[5]);
  log_.Forget({});
  EXPECT_EQ(held.use_count(), 5);
  // One that was held keeps its name when its turn comes.
  ASSERT_TRUE(log_.TakeHeld(kStart).has_value());
  log_.Begin(Sequence(2), nullptr);
  log_.Forget(senders[2]);
  EXPECT_EQ(held.use_count(), 4);
  log_.Finish(Sequence(1));
  log_.Finish(Sequence(2));
  EXPECT_THAT(told_, ElementsAre("1 OK", "1 OK", "2 OK"));
  EXPECT_EQ(held.use_count(), 1);
  log_.Forget(senders[0]);
}

TEST_F(CommandLogTest, AnAbandonedLogLeavesNobodyWaiting) {
  log_.Begin(Sequence(1), Note());
  log_.Wait(Sequence(7), kStart + absl::Seconds(1), Note());
  Hold(3);
  log_.Abandon(MakeError(Reason::kSessionLost, "it has ended"));
  EXPECT_THAT(
      told_, ::testing::UnorderedElementsAre("1 SESSION_LOST", "3 SESSION_LOST", "7 SESSION_LOST"));
  EXPECT_EQ(timers_.Next(), absl::InfiniteFuture());
}

// Of many that fail, in whatever order they end, the last are kept.
TEST_F(CommandLogTest, WhatIsKeptOfOutcomesIsBounded) {
  constexpr int64_t kKept = CommandLog::kKeptOutcomes;
  constexpr int64_t kCommands = 4 * kKept;
  const Error failed(Reason::kAborted, "it failed");
  for (const int64_t stride : {1, 2, 3, 7, 641}) {
    SCOPED_TRACE(stride);
    const HeapUse heap;
    CommandLog log({&timers_, &errors_, absl::Seconds(10)}, "uid:1", budget_, &completions_);
    const int64_t before = heap.bytes();
    for (int64_t sequence = 1; sequence <= kCommands; ++sequence) {
      log.Begin(Sequence(sequence), nullptr);
    }
    for (int64_t first = 0; first < stride; ++first) {
      for (int64_t sequence = kCommands - first; sequence > 0; sequence -= stride) {
        log.Finish(Sequence(sequence), failed);
      }
    }
    EXPECT_LE(heap.bytes() - before, CommandLog::kMaxOutcomeBytes);
    // Those that are among the last, and so many before them.
    absl::Status status;
    const auto outcome = [&](int64_t sequence) {
      log.Wait(Sequence(sequence), absl::InfiniteFuture(),
               [&status](const Outcome& out) { status = out.status; });
      return status.ok() ? "OK" : std::string(ReasonName(ErrorOf(status).reason));
    };
    // The store of these errors has let go of them: what they came to is known.
    EXPECT_THAT(outcome(kCommands), "OUTCOME_FORGOTTEN");
    EXPECT_THAT(status.message(), HasSubstr("it failed with ABORTED"));
    outcome(kCommands - 2 * kKept + 1);
    EXPECT_THAT(status.message(), HasSubstr("it failed with ABORTED"));
    outcome(kCommands - 2 * kKept);
    EXPECT_THAT(status.message(), HasSubstr("is not among the last"));
    log.Begin(Sequence(kCommands + 1), nullptr);
    log.Finish(Sequence(kCommands + 1));
    EXPECT_EQ(outcome(kCommands + 1), "OK");
  }
}

}  // namespace
}  // namespace chorus::node
