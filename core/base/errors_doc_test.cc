// docs/errors.md has a row for each reason, in the order of their numbers, with the code and the
// remedy of the table.
#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "core/base/error.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

TEST(ErrorsDocTest, HasARowForEachReasonWithItsCodeAndRemedy) {
  std::ifstream file("docs/errors.md");
  std::stringstream text;
  text << file.rdbuf();
  std::vector<std::vector<std::string>> rows;
  for (const absl::string_view line : absl::StrSplit(text.str(), '\n')) {
    if (absl::StartsWith(line, "| `")) {
      rows.push_back(absl::StrSplit(absl::StripSuffix(absl::StripPrefix(line, "| "), " |"), " | "));
    }
  }
  for (size_t i = 0; i < std::min(rows.size(), Reasons().size()); ++i) {
    const ReasonInfo& info = Reasons()[i];
    SCOPED_TRACE(info.name);
    ASSERT_EQ(rows[i].size(), 4u);
    EXPECT_EQ(rows[i][0], "`" + std::string(info.name) + "`");
    EXPECT_EQ(rows[i][1], absl::StatusCodeToString(info.code));
    const std::string remedy = absl::StrReplaceAll(rows[i][3], {{"`", ""}});
    EXPECT_TRUE(absl::StartsWith(remedy, info.remedy)) << remedy << "\nexpected: " << info.remedy;
  }
  EXPECT_EQ(rows.size(), Reasons().size());
}

}  // namespace
}  // namespace chorus
