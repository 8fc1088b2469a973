#include "server/service/call_turns.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus::server {
namespace {

using ::testing::ElementsAre;

class CallTurnsTest : public ::testing::Test {
 protected:
  void TearDown() override {
    while (!held_.empty()) EndAll();
  }
  // `who`'s turn is kept when it comes.
  int64_t Enter(const std::string& tenant, int connection, const std::string& who) {
    return turns_.Enter({tenant, connection}, [this, who](CallTurns::Turn turn) {
      came_.push_back(who);
      held_[who] = std::move(turn);
    });
  }
  // Others come meanwhile.
  void End(const std::string& who) { held_.extract(who); }
  void EndAll() { std::exchange(held_, {}); }

  CallTurns turns_{2, 16};  // of one connection; in all, 14 of them one tenant's
  std::vector<std::string> came_;
  std::map<std::string, CallTurns::Turn> held_;
};

TEST_F(CallTurnsTest, WhoComesFirstIsFirst) {
  for (const char* who : {"1", "2", "3", "4"}) Enter("a", 1, who);
  EXPECT_THAT(came_, ElementsAre("1", "2"));
  End("2");
  EXPECT_THAT(came_, ElementsAre("1", "2", "3"));
  End("1");
  EXPECT_THAT(came_, ElementsAre("1", "2", "3", "4"));
}

TEST_F(CallTurnsTest, OneConnectionLeavesOthersTheirs) {
  for (const char* who : {"1", "2", "3"}) Enter("a", 1, who);
  Enter("a", 2, "other");
  EXPECT_THAT(came_, ElementsAre("1", "2", "other"));
}

TEST_F(CallTurnsTest, OneTenantLeavesOthersTheirs) {
  for (int i = 0; i < 20; ++i) Enter("a", i / 2, absl::StrCat("a", i));
  EXPECT_EQ(came_.back(), "a13");
  Enter("b", 100, "b1");
  EXPECT_EQ(came_.back(), "b1");
  Enter("c", 101, "c1");
  EXPECT_EQ(came_.back(), "c1");
  Enter("c", 101, "c2");
  Enter("a", 0, "late");
  EXPECT_EQ(came_.back(), "c1");
  End("a0");  // of connections that hold none the one that has waited for longest
  EXPECT_EQ(came_.back(), "a14");
  End("b1");  // one of "a" has no share any more
  EXPECT_EQ(came_.back(), "c2");
}

TEST_F(CallTurnsTest, WhoIsForgottenDoesNotCome) {
  for (const char* who : {"1", "2"}) Enter("a", 1, who);
  const int64_t gone = Enter("a", 1, "gone");
  Enter("a", 1, "3");
  turns_.Forget({"a", 1}, gone);
  turns_.Forget({"a", 1}, gone);
  turns_.Forget({"nobody", 1}, 1);
  End("1");
  EXPECT_EQ(came_.back(), "3");
}

TEST_F(CallTurnsTest, ATurnThatIsNotTakenGoesOn) {
  for (const char* who : {"1", "2"}) Enter("a", 1, who);
  turns_.Enter({"a", 1}, [](const CallTurns::Turn&) {});  // ends when it has been called
  Enter("a", 1, "3");
  EndAll();
  EXPECT_EQ(came_.back(), "3");
  EndAll();
  for (const char* who : {"4", "5"}) Enter("a", 1, who);
  EXPECT_EQ(came_.back(), "5");
}

TEST_F(CallTurnsTest, ACrowdThatHasGoneTakesNoTurns) {
  for (const char* who : {"1", "2"}) Enter("a", 1, who);
  int called = 0;
  for (int i = 0; i < 200000; ++i) {
    turns_.Enter({"a", 1}, [&called](const CallTurns::Turn&) { ++called; });
  }
  Enter("a", 1, "3");
  End("1");
  EXPECT_EQ(called, 200000);
  EXPECT_THAT(came_, ElementsAre("1", "2", "3"));
}

}  // namespace
}  // namespace chorus::server
