// All reachable states of three ranks, two groups and three runs a rank, in several programs.
//
// With CHORUS_LONG=1 in the environment all of them; else gangs of two programs finish at once.
#include "tests/model/enumeration.h"

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

constexpr absl::string_view kBusy = "_busy";
constexpr absl::string_view kUnfinished = "_unfinished";

// `all`: also those that take minutes.
std::vector<ModelConfig> Programs(bool all) {
  std::vector<ModelConfig> programs = ModelConfigs();
  for (ModelConfig busy : ModelConfigs()) {
    if (busy.faults == 0 && !all) continue;
    busy.busy = true;
    absl::StrAppend(&busy.name, kBusy);
    programs.push_back(std::move(busy));
  }
  if (all) return programs;
  // These are about what is not launched; in which order other gangs finish makes most of their
  // states.
  for (ModelConfig& program : programs) {
    if (program.name != "inner_circle" && program.name != "mismatch") continue;
    program.finish = false;
    absl::StrAppend(&program.name, kUnfinished);
  }
  return programs;
}

std::vector<ModelConfig> Programs() { return Programs(std::getenv("CHORUS_LONG") != nullptr); }

const ModelResult& ResultOf(const ModelConfig& config) {
  static auto* results = new std::map<std::string, ModelResult>;
  const auto found = results->find(config.name);
  if (found != results->end()) return found->second;
  return results->emplace(config.name, Enumerate(config)).first->second;
}

class EnumerationTest : public ::testing::TestWithParam<ModelConfig> {};

TEST_P(EnumerationTest, EveryReachableStateKeepsThePromises) {
  const ModelResult& result = ResultOf(GetParam());
  std::cout << GetParam().name << ": " << result.states << " states, " << result.transitions
            << " transitions, " << result.failed_alone << " runs failed alone\n";
  ASSERT_EQ(result.fault, "");
  // Far fewer would mean that the program was cut short.
  EXPECT_GT(result.states, 1000);
  if (GetParam().faults > 0) {
    EXPECT_GT(result.failed_alone, 0);
  }
  RecordProperty("states", std::to_string(result.states));
}

INSTANTIATE_TEST_SUITE_P(Programs, EnumerationTest, ::testing::ValuesIn(Programs()),
                         [](const auto& info) { return info.param.name; });

TEST(ProgramsTest, ThoseWithoutAFaultOfTheirOwnCanPublishEverything) {
  // Otherwise the enumeration would never have seen the good end of a program.
  const std::set<std::string> faulty = {"nested",       "circle",   "inner_circle",
                                        "mismatch",     "given_up", "given_up_compiled",
                                        "unequal_parts"};
  for (const ModelConfig& config : Programs()) {
    absl::string_view program = config.name;
    for (const absl::string_view form : {kBusy, kUnfinished}) absl::ConsumeSuffix(&program, form);
    const bool is_faulty = faulty.count(std::string(program)) > 0;
    EXPECT_EQ(ResultOf(config).all_published > 0, !is_faulty) << config.name;
  }
}

// Where a run can stand when something happens to it. Fault tests read the committed table: each of
// its places is a failpoint, each line a thing that can happen there. It is that of the short form:
// what can happen between the slices of a program without faults no failpoint stops at.
TEST(FailpointsTest, TheCommittedTableIsComplete) {
  std::set<std::pair<std::string, std::string>> points;
  for (const ModelConfig& config : Programs(/*all=*/false)) {
    const ModelResult& result = ResultOf(config);
    points.insert(result.points.begin(), result.points.end());
  }
  std::ostringstream table;
  table << "# Place of a rank in its run, and what can happen to it there. Made by\n"
           "# bazel run //tests/model:enumeration_test (set CHORUS_WRITE_FAILPOINTS to this file's "
           "path).\n";
  for (const auto& point : points) table << point.first << " " << point.second << "\n";
  if (const char* path = std::getenv("CHORUS_WRITE_FAILPOINTS")) {
    std::ofstream(path) << table.str();
  }
  std::ifstream file("tests/model/failpoints.txt");
  std::ostringstream committed;
  committed << file.rdbuf();
  EXPECT_EQ(committed.str(), table.str());
}

}  // namespace
}  // namespace chorus
