#include "benchmarks/report.h"

#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace chorus {
namespace bench {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Facts = std::vector<std::pair<std::string, std::string>>;

Measured Row(const std::string& name, Role role, double p50, double p99) {
  Measured row;
  row.name = name;
  row.role = role;
  row.setting = name + " setting";
  row.iterations = 10;
  RoundStats round;
  round.count = 10;
  round.p50 = p50;
  round.p99 = p99;
  row.summary = Summarize({round, round});
  return row;
}

std::vector<Measured> SomeRows() {
  return {Row("chorus", Role::kOurs, 3000, 9000), Row("yield", Role::kFloor, 2000, 4000),
          Row("futex", Role::kFloor, 8000, 9000), Row("MPI", Role::kPeer, 6000, 7000)};
}

TEST(ReportTest, RatiosAreToTheBestOfARole) {
  EXPECT_DOUBLE_EQ(RatioTo(SomeRows(), "chorus", Role::kFloor), 1.5);
  EXPECT_DOUBLE_EQ(RatioTo(SomeRows(), "chorus", Role::kPeer), 0.5);
  EXPECT_EQ(RatioTo({Row("chorus", Role::kOurs, 1, 1)}, "chorus", Role::kPeer), 0);
  EXPECT_EQ(RatioTo(SomeRows(), "nobody", Role::kPeer), 0);
}

TEST(ReportTest, TextsHaveThreeDigitsAndAUnit) {
  EXPECT_EQ(TimeText(17), "17 ns");
  EXPECT_EQ(TimeText(3141.6), "3.14 us");
  EXPECT_EQ(TimeText(31416), "31.4 us");
  EXPECT_EQ(TimeText(314.16e6), "314 ms");
  EXPECT_EQ(TimeText(999.9), "1.00 us");
  EXPECT_EQ(TimeText(5e9), "5.00 s");
  EXPECT_EQ(BytesText(4), "4 B");
  EXPECT_EQ(BytesText(64 << 10), "64 KiB");
  EXPECT_EQ(BytesText(1500), "1500 B");
  EXPECT_EQ(BytesText(int64_t{8} << 30), "8 GiB");
}

TEST(ReportTest, ATableHasEachRowOnce) {
  Report report(Facts{{"commit", "abc"}});
  Case c;
  c.benchmark = "small";
  c.what = "all_reduce";
  c.ranks = 2;
  c.bytes = 4;
  report.Add(c, SomeRows());
  const std::string table = report.TakeTable();
  EXPECT_THAT(table, HasSubstr("1.50x"));
  EXPECT_THAT(table, HasSubstr("0.50x"));
  EXPECT_THAT(table, HasSubstr("3.00 us"));
  EXPECT_THAT(report.TakeTable(), IsEmpty());
  c.ranks = 4;
  report.Add(c, {Row("later", Role::kOurs, 1, 1)});
  const std::string rest = report.TakeTable();
  EXPECT_THAT(rest, HasSubstr("later"));
  EXPECT_THAT(rest, Not(HasSubstr("yield")));
  EXPECT_THAT(report.MachineText(), HasSubstr("commit: abc"));
}

TEST(ReportTest, AComparisonIsOneLineAndTwoCasesOfTheJson) {
  Report report(Facts{});
  Case c;
  c.what = "scatter";
  c.ranks = 2;
  c.bytes = 4;
  const std::vector<Measured> measured = {Row("chorus", Role::kOurs, 3000, 1),
                                          Row("MPI", Role::kPeer, 6000, 1),
                                          Row("Gloo", Role::kPeer, 30000, 1)};
  const std::vector<Measured> read = {Row("chorus", Role::kOurs, 5000, 1),
                                      Row("MPI", Role::kPeer, 8000, 1)};
  EXPECT_EQ(RatioToNamed(measured, "Gloo"), 0.1);
  EXPECT_EQ(RatioToNamed(measured, "nobody"), 0);
  report.AddComparison(c, measured, read);
  c.ranks = 4;
  report.AddComparison(c, measured, read);
  EXPECT_EQ(
      report.TakeTable(),
      "what     ranks  size   chorus   + read      MPI   + read     Gloo  to MPI  + read  to Gloo\n"
      "scatter      2   4 B  3.00 us  5.00 us  6.00 us  8.00 us  30.0 us   0.50x   0.62x  0.10x\n"
      "scatter      4   4 B  3.00 us  5.00 us  6.00 us  8.00 us  30.0 us   0.50x   0.62x  0.10x\n");
  EXPECT_THAT(report.TakeTable(), IsEmpty());
  // Without a peer: other columns, so another heading.
  report.AddComparison(c, {measured[0], measured[2]}, {});
  report.AddComparison(c, {measured[0]}, {});
  EXPECT_EQ(report.TakeTable(),
            "what     ranks  size   chorus     Gloo  to Gloo\n"
            "scatter      4   4 B  3.00 us  30.0 us  0.10x\n"
            "what     ranks  size  chorus\n"
            "scatter      4   4 B  3.00 us\n");
  const auto json = nlohmann::json::parse(report.Json());
  EXPECT_EQ(json["results"][1]["what"], "scatter, all then read it");
  const auto& ours = json["results"][0]["contenders"][0];
  EXPECT_EQ(ours["ratios_to_peers"]["MPI"], 0.5);
  EXPECT_EQ(ours["ratios_to_peers"]["Gloo"], 0.1);
}

TEST(ReportTest, JsonHasEveryRoundAndTheMachine) {
  Report report(Facts{{"commit", "abc"}, {"cores", "2"}});
  Case c;
  c.benchmark = "small";
  c.what = "all_reduce";
  c.ranks = 2;
  c.bytes = 4;
  std::vector<Measured> rows = SomeRows();
  rows[3].tried = {{"spin", 9000}, {"yield", 6000}};
  report.Add(c, rows);
  report.AddNote("no peer");
  report.AddNote("no peer");
  const auto json = nlohmann::json::parse(report.Json());
  EXPECT_EQ(json["machine"]["commit"], "abc");
  EXPECT_EQ(json["notes"].size(), 1u);
  const auto& result = json["results"][0];
  EXPECT_EQ(result["benchmark"], "small");
  EXPECT_EQ(result["bytes"], 4);
  const auto& ours = result["contenders"][0];
  EXPECT_EQ(ours["p50_ns"], 3000);
  EXPECT_EQ(ours["ratio_to_floor"], 1.5);
  EXPECT_EQ(ours["rounds"].size(), 2u);
  EXPECT_EQ(ours["rounds"][0]["samples"], 10);
  EXPECT_EQ(result["contenders"][3]["settings_tried_p50_ns"]["spin"], 9000);
}

TEST(ReportTest, GoalsSayWhetherTheyAreMet) {
  Report report(Facts{});
  Goal goal;
  goal.what = "p50";
  goal.limit = 4;
  goal.unit = " us";
  goal.value = 3.5;
  report.AddGoal(goal);
  goal.value = 4.5;
  report.AddGoal(goal);
  goal.at_least = true;
  report.AddGoal(goal);
  EXPECT_EQ(report.GoalsText(),
            "met     p50 <= 4 us: 3.5 us\n"
            "MISSED  p50 <= 4 us: 4.5 us\n"
            "met     p50 >= 4 us: 4.5 us\n");
}

}  // namespace
}  // namespace bench
}  // namespace chorus
