#include "core/node/session.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/node/completions.h"
#include "core/node/records.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

class SessionTableTest : public ::testing::Test {
 protected:
  explicit SessionTableTest(int64_t last_session = 0)
      : table_(
            &options_, /*device_count=*/1, &timers_,
            [](const std::shared_ptr<Session>&, const std::string&, absl::Time) {}, last_session) {
    logs_.timers = &timers_;
    logs_.errors = &errors_;
  }

  absl::StatusOr<std::shared_ptr<Session>> Open(const std::string& tenant = "") {
    OpenSessionRequest request;
    request.tenant = tenant;
    return table_.Open(
        request,
        [&](const std::string& name) {
          auto made = std::make_shared<Tenant>();
          made->name = name;
          made->budget = budget_;
          return made;
        },
        logs_, &news_, absl::UnixEpoch());
  }

  const NodeOptions options_;
  TimerQueue timers_;
  ErrorStore errors_{16};
  News news_;
  CommandLog::Shared logs_;
  const BudgetRef budget_ = Budget::OfNode(int64_t{1} << 30);
  SessionTable table_;
};

// It is not known any more where somebody else's sessions die.
TEST_F(SessionTableTest, WhyASessionDiedIsForgottenOfWhoeverHasMost) {
  constexpr int kKept = 1024;
  const auto die = [&](const std::string& tenant) {
    const std::shared_ptr<Session> session = *Open(tenant);
    table_.Remove(session.get(), tenant + " has been killed");
    return session->id;
  };
  const auto why = [&](SessionId id) { return std::string(table_.Find(id).status().message()); };
  const SessionId seldom = die("uid:1");
  std::vector<SessionId> often;
  for (int i = 0; i < kKept + 1; ++i) often.push_back(die("uid:2"));
  EXPECT_TRUE(absl::StrContains(why(seldom), "uid:1 has been killed")) << why(seldom);
  EXPECT_EQ(*table_.TenantOf(seldom), "uid:1");
  for (int i : {0, 1}) EXPECT_FALSE(absl::StrContains(why(often[i]), "killed")) << why(often[i]);
  for (int i : {2, kKept}) EXPECT_TRUE(absl::StrContains(why(often[i]), "killed")) << i;
  // Those that have as many lose the oldest of all.
  std::vector<SessionId> of_each;
  for (int i = 0; i < 2 * kKept; ++i) of_each.push_back(die(absl::StrCat("uid:", 3 + i)));
  EXPECT_FALSE(absl::StrContains(why(seldom), "killed")) << why(seldom);
  EXPECT_FALSE(absl::StrContains(why(of_each[kKept - 1]), "killed"));
  for (const int i : {kKept, 2 * kKept - 1}) {
    EXPECT_TRUE(absl::StrContains(why(of_each[i]), "killed")) << i;
  }
}

// Their names would be others' from there on.
class LastSessionTest : public SessionTableTest {
 protected:
  LastSessionTest() : SessionTableTest(kMaxSessionId - 1) {}
};

TEST_F(LastSessionTest, RefusesSessionsBeyondThoseThatItHasNamesFor) {
  const auto last = Open();
  ASSERT_TRUE(last.ok()) << last.status();
  EXPECT_EQ((*last)->id.value(), kMaxSessionId);
  for (int i = 0; i < 2; ++i) {
    const Error error = ErrorOf(Open().status());
    EXPECT_EQ(error.reason, Reason::kQuota);
    EXPECT_TRUE(absl::StrContains(error.message, "started again")) << error.message;
  }
}

}  // namespace
}  // namespace chorus::node
