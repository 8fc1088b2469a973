#include "server/tenant_log.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

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

}  // namespace
}  // namespace chorus::server
