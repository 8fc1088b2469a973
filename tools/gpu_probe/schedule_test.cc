#include "tools/gpu_probe/schedule.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "core/base/unique_fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/gpu_probe/child.h"
#include "tools/gpu_probe/report.h"

namespace chorus {
namespace probe {
namespace {

using ::testing::HasSubstr;

// Limits that nothing but a stage that hangs comes near.
constexpr double kLong = 300;
constexpr double kShort = 0.3;

std::vector<std::string> Command(const Stage& stage, double /*limit_seconds*/) {
  const char* const folder = std::getenv("TEST_SRCDIR");
  const std::string base = folder == nullptr ? "" : std::string(folder) + "/chorus/";
  return {base + "tools/gpu_probe/testing/fake_stage", stage.name};
}

std::vector<Outcome> RunAll(const std::vector<Stage>& stages, double limit = kLong) {
  Schedule schedule;
  schedule.limit_seconds = limit;
  schedule.command = &Command;
  std::vector<std::string> ended;
  auto outcomes = RunStages(schedule, stages,
                            [&](const Outcome& outcome) { ended.push_back(outcome.stage.name); });
  EXPECT_EQ(ended.size(), stages.size());
  for (size_t n = 0; n < ended.size(); ++n) EXPECT_EQ(ended[n], stages[n].name);
  return outcomes;
}

Stage Make(const std::string& name, double limit = kLong, double usual = 0) {
  return {name, "a test's", usual, limit};
}

TEST(ScheduleTest, KeepsWhatOthersToldWhateverOneDoes) {
  const auto outcomes = RunAll({Make("holds"), Make("crashes"), Make("hangs", kShort),
                                Make("garbles"), Make("fails"), Make("silent"), Make("holds")});
  ASSERT_EQ(outcomes.size(), 7u);
  for (const Outcome& outcome : outcomes) {
    ASSERT_FALSE(outcome.records.empty()) << outcome.stage.name;
    EXPECT_EQ(outcome.records[0].text, "told") << outcome.stage.name;
  }
  EXPECT_EQ(outcomes[0].how, Outcome::How::kEnded);
  EXPECT_EQ(VerdictOf(outcomes[0]).decision, Decision::kHolds);
  EXPECT_EQ(outcomes[1].how, Outcome::How::kCrashed);
  EXPECT_THAT(outcomes[1].how_text, HasSubstr("signal 11"));
  EXPECT_THAT(outcomes[1].log_tail, HasSubstr("last words"));
  EXPECT_EQ(outcomes[2].how, Outcome::How::kHung);
  EXPECT_EQ(outcomes[2].how_text, "killed after 0.300 s");
  EXPECT_EQ(outcomes[3].how, Outcome::How::kEnded);
  EXPECT_EQ(outcomes[3].garbage_lines, 2);
  EXPECT_EQ(outcomes[4].how, Outcome::How::kFailed);
  EXPECT_EQ(outcomes[4].how_text, "status 3");
  EXPECT_EQ(outcomes[5].how, Outcome::How::kEnded);
  EXPECT_EQ(outcomes[6].how, Outcome::How::kEnded);
}

TEST(ScheduleTest, OnlyAStageThatSaysSoHolds) {
  const auto outcomes =
      RunAll({Make("crashes"), Make("hangs", kShort), Make("fails"), Make("silent")});
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(VerdictOf(outcome).decision, Decision::kNotDecided) << outcome.stage.name;
  }
  EXPECT_THAT(VerdictOf(outcomes[0]).why, HasSubstr("crashed: signal 11"));
  EXPECT_THAT(VerdictOf(outcomes[1]).why, HasSubstr("hung: killed after"));
  EXPECT_EQ(VerdictOf(outcomes[3]).why, "it said nothing");
}

TEST(ScheduleTest, AVerdictStandsWhenItsStageHangsAfterwardsAndSaysSo) {
  const auto outcomes = RunAll({Make("hangs_on", kShort)});
  const Verdict verdict = VerdictOf(outcomes[0]);
  EXPECT_EQ(verdict.decision, Decision::kHolds);
  EXPECT_THAT(verdict.why, HasSubstr("it does (but the stage hung"));
}

TEST(ScheduleTest, KillsAlsoWhatAStageHasStarted) {
  // Both processes of the stage have this pipe: it ends when neither lives any more.
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  // Beyond the numbers that a stage's own descriptors take the place of.
  UniqueFd write_end(fcntl(ends[1], F_DUPFD, 50));
  close(ends[1]);
  RunAll({Make("hangs_on", kShort)});
  write_end.Reset();
  pollfd end{ends[0], POLLIN, 0};
  ASSERT_EQ(poll(&end, 1, 60000), 1) << "a process of the stage lives on";
  EXPECT_NE(end.revents & POLLHUP, 0);
  close(ends[0]);
}

TEST(ScheduleTest, LeavesOutWhatNoLongerFits) {
  const auto outcomes =
      RunAll({Make("hangs", kLong, 0), Make("holds", kLong, 10), Make("holds", kLong, 0)}, kShort);
  // The first takes all that there is, and no more.
  EXPECT_EQ(outcomes[0].how, Outcome::How::kHung);
  EXPECT_EQ(outcomes[1].how, Outcome::How::kLeftOut);
  EXPECT_THAT(outcomes[1].how_text, HasSubstr("usually takes 10 s, 0 s were left"));
  EXPECT_EQ(VerdictOf(outcomes[1]).decision, Decision::kNotDecided);
  EXPECT_THAT(VerdictOf(outcomes[1]).why, HasSubstr("left out"));
}

TEST(ScheduleTest, AProgramThatIsNotThereIsAnOutcome) {
  Schedule schedule;
  schedule.command = [](const Stage&, double) {
    return std::vector<std::string>{"/no/such/program"};
  };
  const auto outcomes = RunStages(schedule, {Make("x")}, [](const Outcome&) {});
  EXPECT_EQ(outcomes[0].how, Outcome::How::kNotStarted);
  EXPECT_THAT(outcomes[0].how_text, HasSubstr("/no/such/program: No such file"));
}

TEST(ScheduleTest, KeepsTheEndOfWhatIsPrinted) {
  const auto outcomes = RunAll({Make("shouts")});
  EXPECT_EQ(outcomes[0].how, Outcome::How::kFailed);
  EXPECT_LT(outcomes[0].log_tail.size(), 4096u);
  EXPECT_THAT(outcomes[0].log_tail, ::testing::EndsWith("THE END"));
}

TEST(ChannelTest, CarriesTextsAndDescriptors) {
  auto ends = Channel::Pair();
  ASSERT_TRUE(ends.ok());
  const UniqueFd file = TemporaryFile();
  ASSERT_EQ(write(file.get(), "content", 7), 7);
  ASSERT_TRUE(ends->first.Send("a text", file.get()).ok());
  ASSERT_TRUE(ends->first.Send("another").ok());
  UniqueFd received;
  EXPECT_EQ(*ends->second.Receive(60, &received), "a text");
  ASSERT_TRUE(received.valid());
  EXPECT_EQ(ContentOf(received.get()), "content");
  UniqueFd none;
  EXPECT_EQ(*ends->second.Receive(60, &none), "another");
  EXPECT_FALSE(none.valid());
  EXPECT_EQ(ends->second.Receive(0.01).status().code(), absl::StatusCode::kDeadlineExceeded);
  ends->first = Channel();
  EXPECT_EQ(ends->second.Receive(60).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(ends->second.Send("to nobody").ok());
}

}  // namespace
}  // namespace probe
}  // namespace chorus
