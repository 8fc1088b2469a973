#include "server/tenant_log.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/counting_heap.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/line_budget.h"

namespace chorus::server {
namespace {

using testing::Contains;
using testing::HasSubstr;

TEST(TenantLogTest, OneTenantTakesNoLineFromAnother) {
  std::vector<std::string> lines;
  TenantLog log([&](google::LogSeverity, absl::string_view tenant, absl::string_view line) {
    lines.push_back(absl::StrCat(tenant, " ", line));
  });
  for (int i = 0; i < 1000000 && lines.size() < 10000; ++i) {
    log.Say(google::GLOG_INFO, "uid:1", "again");
  }
  const size_t loud = lines.size();
  EXPECT_LT(loud, 10000u) << "it may cause a hundred a second";
  log.Say(google::GLOG_INFO, "uid:2", "once");
  EXPECT_EQ(lines.back(), "uid:2 once");
  // When it may speak again it is told how much was left out.
  for (int64_t i = 0; i < 1000000000 && lines.size() == loud + 1; ++i) {
    log.Say(google::GLOG_INFO, "uid:1", "later");
  }
  EXPECT_THAT(lines, Contains(HasSubstr("more lines of uid:1 were too many for the log")));
  EXPECT_EQ(lines.back(), "uid:1 later");
}

// The rows of a table stay where it has been large; what they had does not.
TEST(TenantLogTest, WhoeverHasSaidNothingLatelyIsForgottenAndWhatWasTooMuchIsSaid) {
  std::vector<std::string> lines;
  absl::Time now = absl::UnixEpoch();
  TenantLog log([&](google::LogSeverity, absl::string_view tenant,
                    absl::string_view line) { lines.push_back(absl::StrCat(tenant, " ", line)); },
                [&now] { return now; });
  for (int i = 0; i < LineBudget::kLinesPerSecond + 7; ++i) log.Say(google::GLOG_INFO, "loud", "x");
  lines.clear();
  const std::string long_name(200, 'u');  // not in its row
  int told = 0;
  const HeapUse heap;
  for (int i = 0; i < 20000; ++i) {
    if (i % 50 == 0) now += absl::Seconds(1);
    log.Say(google::GLOG_INFO, absl::StrCat(long_name, i), "once");
    for (const std::string& line : std::exchange(lines, {})) {
      if (!absl::StartsWith(line, "loud")) continue;
      EXPECT_THAT(line, HasSubstr("7 more lines of loud were too many for the log"));
      ++told;
    }
    ASSERT_LT(heap.bytes(), 100 << 10) << i;
  }
  EXPECT_EQ(told, 1);
  // A tenant that is not idle is not forgotten.
  for (int i = 0; i < LineBudget::kLinesPerSecond; ++i) log.Say(google::GLOG_INFO, "loud", "x");
  for (int i = 0; i < 1000; ++i) log.Say(google::GLOG_INFO, absl::StrCat(i), "once");
  lines.clear();
  log.Say(google::GLOG_INFO, "loud", "x");
  EXPECT_TRUE(lines.empty());
}

}  // namespace
}  // namespace chorus::server
