#include "core/node/failures.h"

#include <memory>
#include <string>

#include "core/base/error.h"
#include "core/node/records.h"
#include "core/node/timers.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

TEST(FailuresTest, WhoIsToldOfOneCauseSharesIt) {
  const Clock clock;
  ErrorStore errors(10);
  Failures failures(&clock, &errors, nullptr);
  const auto told = [&](Error error) {
    failures.Record("uid:1", FailureOrigin(), &error);
    return failures.Share(error);
  };
  Error cause(Reason::kPeerDied, "rank 1 is dead");
  const std::shared_ptr<const Error> first = told(cause);
  EXPECT_EQ(told(cause), first);
  // What is said in another world, or of another cause, is another error.
  Error elsewhere = *first;
  elsewhere.ended.push_back({WorldId(1), Epoch(2)});
  EXPECT_NE(failures.Share(elsewhere), first);
  EXPECT_EQ(failures.Share(elsewhere)->ended.size(), 1u);
  EXPECT_EQ(told(Error(Reason::kPeerDied, "rank 2 is dead"))->message, "rank 2 is dead");
  EXPECT_EQ(first->message, "rank 1 is dead");
}

}  // namespace
}  // namespace chorus::node
