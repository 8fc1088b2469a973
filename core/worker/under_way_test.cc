#include "core/worker/under_way.h"

#include <vector>

#include "core/base/counting_heap.h"
#include "core/base/error.h"
#include "gtest/gtest.h"

namespace chorus::worker {
namespace {

absl::Status Lost() { return MakeError(Reason::kDeviceLost, "lost"); }

UnderWay::Transfer Download(char* to, int64_t bytes) {
  UnderWay::Transfer transfer;
  transfer.to = to;
  transfer.bytes = bytes;
  return transfer;
}

TEST(UnderWayTest, EachIsAnsweredOnce) {
  UnderWay all;
  EXPECT_TRUE(all.empty());
  all.Add(LaunchId(1));
  all.Add(PlanId(1));
  all.Add(CommunicatorId(1));
  const char from = 0;
  UnderWay::Transfer upload;
  upload.from = &from;
  upload.bytes = 1;
  all.Add(TransferId(1), upload);
  // Its memory is read until all of it has been taken.
  EXPECT_FALSE(all.End(TransferredMessage{TransferId(1), absl::OkStatus()}));
  EXPECT_FALSE(all.End(TransferredMessage{TransferId(1), Lost()}));
  all.Find(TransferId(1))->bytes_done = 1;
  const std::vector<EventMessage> answers = {CompletionMessage{LaunchId(1), absl::OkStatus()},
                                             LoadedMessage{PlanId(1), Lost()},
                                             OpenedMessage{CommunicatorId(1), absl::OkStatus()},
                                             TransferredMessage{TransferId(1), absl::OkStatus()}};
  for (const EventMessage& answer : answers) {
    EXPECT_FALSE(all.empty());
    EXPECT_TRUE(all.End(answer)) << answer.index();
    EXPECT_FALSE(all.End(answer)) << answer.index();
  }
  EXPECT_TRUE(all.empty());
  EXPECT_FALSE(all.End(LostMessage{Lost()})) << "nobody asks for that";
}

TEST(UnderWayTest, ADownloadEndsWellOnlyWithAllItsBytes) {
  UnderWay all;
  char to[8];
  all.Add(TransferId(1), Download(to, 8));
  all.Find(TransferId(1))->bytes_done = 7;
  EXPECT_FALSE(all.End(TransferredMessage{TransferId(1), absl::OkStatus()}));
  EXPECT_TRUE(all.End(TransferredMessage{TransferId(1), Lost()})) << "without them it may fail";
  EXPECT_EQ(all.Find(TransferId(1)), nullptr);
}

TEST(UnderWayTest, AllEndsButWhatIsKept) {
  UnderWay all;
  char to[8];
  for (const uint64_t id : {3, 1, 2}) {
    all.Add(LaunchId(id));
    all.Add(TransferId(id), Download(to, 8));
  }
  all.Add(PlanId(7));
  const std::vector<EventMessage> events = all.EndAll(Lost(), TransferId(2));
  ASSERT_EQ(events.size(), 6u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(absl::get<CompletionMessage>(events[i]).launch, LaunchId(i + 1));
  }
  EXPECT_EQ(absl::get<LoadedMessage>(events[3]).plan, PlanId(7));
  EXPECT_EQ(absl::get<TransferredMessage>(events[4]).transfer, TransferId(1));
  EXPECT_EQ(absl::get<TransferredMessage>(events[5]).transfer, TransferId(3));
  EXPECT_EQ(ErrorOf(absl::get<TransferredMessage>(events[5]).status).reason, Reason::kDeviceLost);
  EXPECT_FALSE(all.empty());
  all.End(TransferId(2));
  EXPECT_TRUE(all.empty());
}

// Clients say how many there are at a time: what they are charged for that they get back.
TEST(UnderWayTest, OfTransfersThatHaveEndedNothingIsKept) {
  constexpr uint64_t kTransfers = 10000;
  char to[8];
  UnderWay all;
  const HeapUse heap;
  for (uint64_t id = 1; id <= kTransfers; ++id) all.Add(TransferId(id), Download(to, 8));
  EXPECT_GT(heap.bytes(), 0);
  for (uint64_t id = 1; id < kTransfers / 2; ++id) all.End(TransferId(id));
  all.EndAll(Lost(), TransferId(kTransfers));
  all.End(TransferId(kTransfers));
  EXPECT_EQ(heap.bytes(), 0);
}

}  // namespace
}  // namespace chorus::worker
