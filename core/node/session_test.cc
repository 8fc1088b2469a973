#include "core/node/session.h"

#include "absl/strings/match.h"
#include "core/base/error.h"
#include "core/node/completions.h"
#include "core/node/records.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

// Their names would be others' from there on.
TEST(SessionTableTest, RefusesSessionsBeyondThoseThatItHasNamesFor) {
  const NodeOptions options;
  TimerQueue timers;
  ErrorStore errors(16);
  News news;
  CommandLog::Shared logs;
  logs.timers = &timers;
  logs.errors = &errors;
  const BudgetRef budget = Budget::OfNode(int64_t{1} << 30);
  SessionTable table(
      &options, /*device_count=*/1, &timers,
      [](const std::shared_ptr<Session>&, const std::string&, absl::Time) {}, kMaxSessionId - 1);
  const auto open = [&] {
    return table.Open(
        OpenSessionRequest(),
        [&](const std::string& name) {
          auto tenant = std::make_shared<Tenant>();
          tenant->name = name;
          tenant->budget = budget;
          return tenant;
        },
        logs, &news, absl::UnixEpoch());
  };
  const auto last = open();
  ASSERT_TRUE(last.ok()) << last.status();
  EXPECT_EQ((*last)->id.value(), kMaxSessionId);
  for (int i = 0; i < 2; ++i) {
    const Error error = ErrorOf(open().status());
    EXPECT_EQ(error.reason, Reason::kQuota);
    EXPECT_TRUE(absl::StrContains(error.message, "started again")) << error.message;
  }
}

}  // namespace
}  // namespace chorus::node
