// docs/ops.md names each local op, where its table or its list of gradients' ops has it;
// docs/collectives.md names the SDK's
// function of each collective.
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "core/ops/op.h"
#include "core/ops/registry.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

std::vector<std::string> LinesOf(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return absl::StrSplit(text.str(), '\n');
}

void AddNames(absl::string_view text, std::set<std::string>* names) {
  for (const absl::string_view name : absl::StrSplit(text, absl::ByAnyChar(" ,.;:()[]`*\n"))) {
    names->emplace(name);
  }
}

TEST(OpsDocTest, NamesEachLocalOp) {
  std::set<std::string> names;
  bool in_list = false;
  for (const std::string& line : LinesOf("docs/ops.md")) {
    if (absl::StartsWith(line, "| ")) {
      const std::vector<std::string> columns = absl::StrSplit(line, " | ");
      ASSERT_GE(columns.size(), 2u) << line;
      AddNames(columns[1], &names);
    }
    in_list = !line.empty() && (in_list || absl::StartsWith(line, "Gradients use some more ops"));
    if (in_list) AddNames(line, &names);
  }
  for (const OpDef* op : AllOps()) {
    if (op->effect == Effect::kCollective) continue;
    EXPECT_EQ(names.count(std::string(op->name)), 1u) << op->name;
  }
}

TEST(OpsDocTest, NamesEachCollective) {
  std::set<std::string> names;
  for (const std::string& line : LinesOf("docs/collectives.md")) AddNames(line, &names);
  for (const OpDef* op : AllOps()) {
    if (op->effect != Effect::kCollective) continue;
    // As the SDK's function: AllGather for all_gather.
    std::string function;
    for (absl::string_view word : absl::StrSplit(op->name, '_')) {
      function += absl::AsciiStrToUpper(word.substr(0, 1));
      function.append(word.data() + 1, word.size() - 1);
    }
    EXPECT_EQ(names.count(function), 1u) << function;
  }
}

}  // namespace
}  // namespace chorus
