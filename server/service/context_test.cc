#include "server/service/context.h"

#include "core/base/error.h"
#include "core/node/info.h"
#include "gtest/gtest.h"

namespace chorus::server {
namespace {

TEST(WireSessionTest, EachSessionThatThereMayBeHasANameOfItsStartAlone) {
  for (const int64_t incarnation : {int64_t{1}, int64_t{12345}, kMaxIncarnation}) {
    for (const int64_t id : {int64_t{1}, (int64_t{1} << 32) - 1, int64_t{1} << 32,
                             (int64_t{1} << 32) + 1, node::kMaxSessionId}) {
      const int64_t name = WireSession(incarnation, SessionId(id));
      EXPECT_GT(name, 0);
      const absl::StatusOr<SessionId> parsed = ParseSession(incarnation, name);
      ASSERT_TRUE(parsed.ok()) << id << ": " << parsed.status();
      EXPECT_EQ(parsed->value(), id);
      const int64_t other = incarnation == 1 ? 2 : incarnation - 1;
      EXPECT_EQ(ErrorOf(ParseSession(other, name).status()).reason, Reason::kSessionLost);
    }
  }
}

TEST(WireSessionTest, NoSessionHasNoName) {
  EXPECT_EQ(WireSessionOrZero(7, SessionId()), 0);
  EXPECT_EQ(ErrorOf(ParseSession(7, 0).status()).reason, Reason::kMalformed);
  EXPECT_EQ(ErrorOf(ParseSession(7, -1).status()).reason, Reason::kMalformed);
}

}  // namespace
}  // namespace chorus::server
