#include "tools/gpu_probe/report.h"

#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tools/gpu_probe/assumptions.h"

namespace chorus {
namespace probe {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Outcome Measured() {
  Outcome outcome;
  outcome.stage = {"P6", "ordered reductions", 1, 2};
  outcome.seconds = 1.5;
  Record fact;
  fact.what = "a | in a cell";
  fact.text = "of\ntwo lines";
  Record number;
  number.kind = Record::Kind::kNumber;
  number.what = "sum";
  number.value = 2.5;
  number.least = 2;
  number.most = 3;
  number.samples = 9;
  number.unit = "GB/s";
  Record single = number;
  single.what = "share";
  single.samples = 1;
  single.unit = "";
  Record verdict;
  verdict.kind = Record::Kind::kVerdict;
  verdict.what = "P6";
  verdict.text = "0.90 < 0.92";
  verdict.decision = Decision::kDoesNotHold;
  outcome.records = {fact, number, single, verdict};
  return outcome;
}

TEST(ReportTest, AStageHasItsAssumptionNumbersVerdictAndConsequence) {
  const std::string text = StageText(Measured());
  EXPECT_THAT(text, HasSubstr("### P6: ordered reduce reaches copy rate\n"));
  EXPECT_THAT(text, HasSubstr("| a \\| in a cell | of two lines | | |\n"));
  EXPECT_THAT(text, HasSubstr("| sum | 2.50 GB/s | 2 to 3 | 9 |\n"));
  EXPECT_THAT(text, HasSubstr("| share | 2.50 | | 1 |\n"));
  EXPECT_THAT(text, HasSubstr("**P6 does not hold**: 0.90 < 0.92\n"));
  EXPECT_THAT(text, HasSubstr("If it is false: tune; cp.async.bulk\n"));
}

TEST(ReportTest, WhatHoldsHasNoConsequence) {
  Outcome outcome = Measured();
  outcome.records.back().decision = Decision::kHolds;
  EXPECT_THAT(StageText(outcome), Not(HasSubstr("If it is false")));
}

TEST(ReportTest, AStageThatCrashedShowsWhatItPrintedAndWhatItMeasured) {
  Outcome outcome = Measured();
  outcome.records.pop_back();
  outcome.how = Outcome::How::kCrashed;
  outcome.how_text = "signal 11";
  outcome.log_tail = "first line\nsecond line";
  const std::string text = StageText(outcome);
  EXPECT_THAT(text, HasSubstr("| sum | 2.50 GB/s"));
  EXPECT_THAT(text, HasSubstr("**P6 not decided**: the stage crashed: signal 11\n"));
  EXPECT_THAT(text, HasSubstr("    first line\n    second line\n"));
}

TEST(ReportTest, TheSummaryHasARowForEachAssumption) {
  const std::string text = SummaryText({Measured()});
  const std::vector<std::string> lines = absl::StrSplit(text, '\n', absl::SkipEmpty());
  ASSERT_EQ(lines.size(), 2 + Assumptions().size());
  EXPECT_EQ(Assumptions().size(), 12u);
  for (size_t n = 0; n < Assumptions().size(); ++n) {
    const Assumption& assumption = Assumptions()[n];
    EXPECT_THAT(lines[2 + n], HasSubstr(std::string("| ") + assumption.id + " | "));
    EXPECT_THAT(lines[2 + n], HasSubstr(assumption.if_false));
    EXPECT_THAT(lines[2 + n],
                HasSubstr(std::string(assumption.id) == "P6" ? "| does not hold | 0.90 < 0.92 |"
                                                             : "| not decided | not asked for |"));
  }
}

TEST(ReportTest, EveryRecordIsALineOfJsonWithItsStage) {
  const std::vector<std::string> lines =
      absl::StrSplit(JsonLines({Measured()}), '\n', absl::SkipEmpty());
  ASSERT_EQ(lines.size(), 5u);
  for (const std::string& line : lines) {
    EXPECT_EQ(nlohmann::json::parse(line)["stage"], "P6") << line;
  }
  EXPECT_EQ(nlohmann::json::parse(lines[1])["value"], 2.5);
  EXPECT_EQ(nlohmann::json::parse(lines[4])["how"], "ended");
  EXPECT_EQ(nlohmann::json::parse(lines[4])["seconds"], 1.5);
}

}  // namespace
}  // namespace probe
}  // namespace chorus
