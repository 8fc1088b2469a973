#include "core/node/records.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

Error Make(const std::string& message) {
  Error error;
  error.code = absl::StatusCode::kAborted;
  error.message = message;
  return error;
}

TEST(FlightRecordTest, EachTenantHasItsNewestWhateverOthersDo) {
  FlightRecord record(8);
  const auto add = [&record](const std::string& tenant, int64_t ticket) {
    FlightEvent event;
    event.ticket = Ticket(ticket);
    record.Add(event, tenant);
  };
  const auto tickets = [](const std::vector<FlightEvent>& events) {
    std::vector<int64_t> result;
    for (const FlightEvent& event : events) result.push_back(event.ticket.value());
    return result;
  };
  EXPECT_THAT(tickets(record.Latest(3)), testing::IsEmpty());
  EXPECT_THAT(tickets(record.LatestOf("uid:1", 3)), testing::IsEmpty());
  for (const int64_t ticket : {1, 2, 3}) add("uid:1", ticket);
  for (const int64_t ticket : {4, 5, 6, 7}) add("uid:2", ticket);
  add("", 8);
  EXPECT_THAT(tickets(record.LatestOf("uid:1", 2)), testing::ElementsAre(2, 3));
  EXPECT_THAT(tickets(record.LatestOf("uid:1", 9)), testing::ElementsAre(1, 2, 3));
  EXPECT_THAT(tickets(record.LatestOf("uid:2", 9)), testing::ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(tickets(record.Latest(2)), testing::ElementsAre(7, 8));
  // The oldest have made room.
  add("uid:2", 9);
  add("uid:1", 10);
  EXPECT_THAT(tickets(record.Latest(99)), testing::ElementsAre(3, 4, 5, 6, 7, 8, 9, 10));
  EXPECT_THAT(tickets(record.LatestOf("uid:1", 9)), testing::ElementsAre(3, 10));
  // Tenants without number, and one that comes again when its events are gone.
  for (int64_t i = 0; i < 5000; ++i) add("uid:" + std::to_string(100 + i), i);
  EXPECT_THAT(tickets(record.LatestOf("uid:1", 9)), testing::IsEmpty());
  add("uid:1", 11);
  EXPECT_THAT(tickets(record.LatestOf("uid:1", 9)), testing::ElementsAre(11));
}

TEST(ErrorStoreTest, OneCauseHasOneRecord) {
  ErrorStore store(10);
  Error a = Make("rank 1 died");
  Error again = Make("rank 1 died");
  Error other = Make("rank 2 died");
  EXPECT_TRUE(store.Record("uid:1", &a));
  EXPECT_FALSE(store.Record("uid:1", &again));
  EXPECT_EQ(a.id, again.id);
  EXPECT_TRUE(store.Record("uid:1", &other));
  EXPECT_NE(a.id, other.id);
  EXPECT_EQ(store.Find(a.id, "uid:1")->message, "rank 1 died");
}

TEST(ErrorStoreTest, WhatLooksTheSameHasNotBeenToldOf) {
  ErrorStore store(2);
  Error error = Make("rank 1 died");
  store.Record("uid:1", &error);
  EXPECT_FALSE(store.HasTold(error.id, WorldId(1)));
  for (const int64_t world : {1, 2, 1}) store.NoteTold(error.id, WorldId(world));
  EXPECT_TRUE(store.HasTold(error.id, WorldId(1)));
  EXPECT_TRUE(store.HasTold(error.id, WorldId(2)));
  EXPECT_FALSE(store.HasTold(error.id, WorldId(3)));
  Error other = Make("rank 2 died");
  store.Record("uid:1", &other);
  EXPECT_FALSE(store.HasTold(other.id, WorldId(1)));
  EXPECT_TRUE(store.HasTold(error.id, WorldId(1)));
  Error again = Make("rank 1 died");
  store.Record("uid:1", &again);
  EXPECT_FALSE(store.HasTold(error.id, WorldId(1)));
  // The oldest worlds are forgotten first, and all with the error.
  constexpr auto kMost = static_cast<int64_t>(ErrorStore::kMostWorldsTold);
  for (int64_t world = 0; world <= kMost; ++world) store.NoteTold(error.id, WorldId(world));
  EXPECT_FALSE(store.HasTold(error.id, WorldId(0)));
  EXPECT_TRUE(store.HasTold(error.id, WorldId(1)));
  EXPECT_TRUE(store.HasTold(error.id, WorldId(kMost)));
  Error third = Make("rank 3 died");
  store.Record("uid:1", &third);
  ASSERT_FALSE(store.Has(error.id, "uid:1"));
  EXPECT_FALSE(store.HasTold(error.id, WorldId(1)));
}

// It is recorded for each run that fails with it, one of which may have been used by then.
TEST(ErrorStoreTest, TheEndOfAnEpochIsOneFailure) {
  ErrorStore store(10);
  Error error = Make("rank 1 died");
  error.ended.push_back({WorldId(1), Epoch(2)});
  Error of_another_run = error;
  store.Record("uid:1", &error);
  store.NoteTold(error.id, WorldId(2));
  EXPECT_FALSE(store.Record("uid:1", &of_another_run));
  EXPECT_TRUE(store.HasTold(error.id, WorldId(2)));
}

TEST(ErrorStoreTest, ALongTextIsCut) {
  ErrorStore store(10);
  Error error = Make(std::string(1 << 20, 'x'));
  store.Record("uid:1", &error);
  const absl::optional<Error> kept = store.Find(error.id, "uid:1");
  ASSERT_TRUE(kept.has_value());
  EXPECT_EQ(kept->id, error.id);
  EXPECT_GE(kept->message.size(), Error::kMaxBytes / 2);
  EXPECT_LE(kept->message.size(), Error::kMaxBytes);
}

TEST(ErrorStoreTest, TenantsSeeTheirOwn) {
  ErrorStore store(10);
  Error a = Make("x");
  Error b = Make("x");
  store.Record("uid:1", &a);
  store.Record("uid:2", &b);
  EXPECT_NE(a.id, b.id);
  EXPECT_FALSE(store.Find(a.id, "uid:2").has_value());
  EXPECT_TRUE(store.Find(a.id, "").has_value());
}

TEST(ErrorStoreTest, ForgetsTheOldest) {
  ErrorStore store(2);
  Error errors[3] = {Make("0"), Make("1"), Make("2")};
  for (Error& error : errors) store.Record("t", &error);
  EXPECT_FALSE(store.Find(errors[0].id, "t").has_value());
  EXPECT_EQ(store.Find(errors[1].id, "t")->message, "1");
  EXPECT_EQ(store.Find(errors[2].id, "t")->message, "2");
  EXPECT_FALSE(store.Find(ErrorId(99), "t").has_value());
}

TEST(ErrorStoreTest, WhoFailsMostForgetsItsOwn) {
  ErrorStore store(10);
  Error first[3] = {Make("0"), Make("1"), Make("2")};
  for (Error& error : first) store.Record("uid:1", &error);
  std::vector<Error> many;
  for (int i = 0; i < 100; ++i) {
    many.push_back(Make(std::to_string(i)));
    EXPECT_TRUE(store.Record("uid:2", &many.back()));
  }
  for (const Error& error : first) {
    EXPECT_EQ(store.Find(error.id, "uid:1")->message, error.message);
    EXPECT_EQ(store.Find(error.id, "")->message, error.message);
  }
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(store.Find(many[i].id, "uid:2").has_value(), i >= 93) << i;
  }
}

TEST(FailureLineTest, IsOneLineWithEverythingInItsPlace) {
  Error error = Make("rank 3 is late:\nnothing\tcame");
  error.reason = Reason::kAgreeTimeout;
  error.id = ErrorId(17);
  EXPECT_EQ(FailureLine({"my \"job\"\n", 3, 4711}, error),
            "failure: job=\"my \\\"job\\\"\\n\" rank=3 pid=4711 reason=AGREE_TIMEOUT error_id=17: "
            "rank 3 is late:\\x0anothing\\x09came");
  EXPECT_EQ(FailureLine({}, error),
            "failure: job=- rank=- pid=- reason=AGREE_TIMEOUT error_id=17: "
            "rank 3 is late:\\x0anothing\\x09came");
}

TEST(FailureLineTest, TellsNoTerminalAnything) {
  const Error error = Make("no \x9b\x31m, \xc2\x9b or \xe2\x80\xa8 \u00fc");
  EXPECT_THAT(
      FailureLine({"job \x9b \u00fc"}, error),
      testing::AllOf(testing::HasSubstr("job=\"job \\x9b \u00fc\""),
                     testing::EndsWith("no \\x9b1m, \\xc2\\x9b or \\xe2\\x80\\xa8 \u00fc")));
}

TEST(FlightRecordTest, KeepsTheLatestInOrder) {
  FlightRecord record(3);
  for (int i = 1; i <= 5; ++i) {
    FlightEvent event;
    event.sequence = Sequence(i);
    record.Add(event, "uid:1");
  }
  const std::vector<FlightEvent> all = record.Latest(10);
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all.front().sequence, Sequence(3));
  EXPECT_EQ(all.back().sequence, Sequence(5));
  EXPECT_EQ(record.Latest(1).front().sequence, Sequence(5));
}

}  // namespace
}  // namespace chorus::node
