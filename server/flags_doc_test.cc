// docs/flags.md has a row for each flag of chorusd, with its default and its words as --help has
// them; and what other documents say of flags is so.
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace chorus::server {
namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

struct Flag {
  std::string help;
  std::string value;  // its default
};

// By their names.
std::map<std::string, Flag> FlagsOfChorusd() {
  FILE* const pipe = popen("server/chorusd --help", "r");
  std::string text;
  char part[4096];
  size_t size = 0;
  while ((size = fread(part, 1, sizeof(part), pipe)) > 0) text.append(part, size);
  pclose(pipe);
  std::map<std::string, Flag> flags;
  // A flag begins with four spaces, its other lines with six.
  std::vector<std::string> blocks = absl::StrSplit(text, "\n    --");
  blocks.erase(blocks.begin());
  const std::regex form(R"((\w+) \((.*)\); default: (.*);)");
  for (const std::string& block : blocks) {
    const std::string line =
        absl::StrJoin(absl::StrSplit(block.substr(0, block.find("\n\n")), absl::ByAnyChar(" \n"),
                                     absl::SkipWhitespace()),
                      " ");
    std::smatch flag;
    if (!std::regex_match(line, flag, form)) {
      ADD_FAILURE() << "not understood: " << line;
      continue;
    }
    flags[flag[1]] = {flag[2], flag[3]};
  }
  return flags;
}

TEST(FlagsDocTest, HasARowForEachFlagWithItsDefault) {
  std::vector<std::string> expected;
  for (const auto& [name, flag] : FlagsOfChorusd()) {
    const std::string value = flag.value.empty() ? "" : absl::StrCat("`", flag.value, "` ");
    expected.push_back(absl::StrCat("| `--", name, "` | ", value, "| ", flag.help, " |"));
  }
  std::vector<std::string> rows;
  for (const absl::string_view line : absl::StrSplit(ReadFile("docs/flags.md"), '\n')) {
    if (absl::StartsWith(line, "| `--")) rows.emplace_back(line);
  }
  EXPECT_EQ(rows, expected) << "expected:\n" << absl::StrJoin(expected, "\n");
}

// "10 s", "10 minutes", "2^20", "256" and so on, as flags have them.
std::string AsFlag(const std::string& said) {
  std::smatch part;
  if (std::regex_match(said, part, std::regex(R"((\d+) (s|min|minutes))"))) {
    absl::Duration duration;
    EXPECT_TRUE(
        absl::ParseDuration(absl::StrCat(part[1].str(), part[2] == "s" ? "s" : "m"), &duration));
    return absl::FormatDuration(duration);
  }
  int32_t power = 0;
  if (absl::StartsWith(said, "2^") && absl::SimpleAtoi(said.substr(2), &power)) {
    return absl::StrCat(int64_t{1} << power);
  }
  return absl::StrReplaceAll(said, {{",", ""}});
}

TEST(FlagsDocTest, WhatIsSaidOfFlagsIsSo) {
  const std::map<std::string, Flag> flags = FlagsOfChorusd();
  int defaults = 0;
  for (const char* path : {"docs/errors.md", "docs/protocol.md"}) {
    SCOPED_TRACE(path);
    const std::string text = absl::StrReplaceAll(ReadFile(path), {{"\n", " "}});
    const std::regex mention(R"(`--(\w+)`(?: \((\d[\d^,]*(?: (?:s|min|minutes)\b)?))?)");
    for (std::sregex_iterator it(text.begin(), text.end(), mention), end; it != end; ++it) {
      const auto flag = flags.find((*it)[1]);
      ASSERT_NE(flag, flags.end()) << it->str();
      if (!(*it)[2].matched) continue;
      ++defaults;
      EXPECT_EQ(AsFlag((*it)[2]), flag->second.value) << it->str();
    }
  }
  EXPECT_GT(defaults, 10);
}

}  // namespace
}  // namespace chorus::server
