#include "core/node/requests.h"

#include <string>

#include "core/base/error.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

Reason ReasonOf(const absl::Status& status) {
  return status.ok() ? Reason::kUnspecified : ErrorOf(status).reason;
}

TEST(RequestsTest, ASessionHasAShortLabelAndDevicesThatCount) {
  OpenSessionRequest open;
  EXPECT_TRUE(open.Check().ok());
  open.label = std::string(256, 'a');
  EXPECT_TRUE(open.Check().ok());
  open.label += 'a';
  EXPECT_EQ(ReasonOf(open.Check()), Reason::kMalformed);
  open.label.clear();
  open.devices = {DeviceIndex(0), DeviceIndex(-1)};
  EXPECT_EQ(ReasonOf(open.Check()), Reason::kMalformed);
  open.devices.clear();
  open.device_count = -1;
  EXPECT_EQ(ReasonOf(open.Check()), Reason::kMalformed);
}

TEST(RequestsTest, WhoMayOnlyReadOpensNothingWithoutHavingAttached) {
  OpenSessionRequest open;
  open.tenant = "uid:7";
  open.may_open = false;
  EXPECT_EQ(ReasonOf(open.Check()), Reason::kNotAttached);
  EXPECT_NE(open.Check().message().find("uid:7"), absl::string_view::npos);
  open.attached = true;
  EXPECT_TRUE(open.Check().ok());
}

TEST(RequestsTest, AWorldHasANameRanksAndPerhapsADevice) {
  JoinRequest join;
  join.name = std::string(256, 'a');
  join.size = 1024;
  join.rank = Rank(1023);
  EXPECT_TRUE(join.Check().ok());
  join.device = DeviceIndex(-1);
  EXPECT_EQ(ReasonOf(join.Check()), Reason::kMalformed);
  join.device.reset();
  join.not_understood = "exec_timeout: expected more";
  EXPECT_EQ(ReasonOf(join.Check()), Reason::kMalformed);
  join.not_understood.clear();
  join.rank = Rank(1024);
  EXPECT_EQ(ReasonOf(join.Check()), Reason::kMalformed);
  join.rank = Rank(-1);
  EXPECT_EQ(ReasonOf(join.Check()), Reason::kMalformed);
  join.rank = Rank(0);
  for (const int size : {0, 1025}) {
    join.size = size;
    EXPECT_EQ(ReasonOf(join.Check()), Reason::kMalformed) << size;
  }
  join.size = 1;
  for (const size_t length : {0, 257}) {
    join.name = std::string(length, 'a');
    EXPECT_EQ(ReasonOf(join.Check()), Reason::kMalformed) << length;
  }
}

TEST(RequestsTest, AGroupIsCountedByTheCallerOrByTheNode) {
  CreateGroupRequest group;
  EXPECT_TRUE(group.Check().ok());
  group.step = kMaxCallNumber - 1;
  EXPECT_EQ(ReasonOf(group.Check()), Reason::kMalformed) << "the number is missing";
  group.number = 0;
  EXPECT_TRUE(group.Check().ok());
  group.step = kMaxCallNumber;
  EXPECT_EQ(ReasonOf(group.Check()), Reason::kMalformed);
  group.step = 0;
  group.number = -1;
  EXPECT_EQ(ReasonOf(group.Check()), Reason::kMalformed);
}

TEST(RequestsTest, WorldsEndAnEpochWithFewWordsAndDoNotGrow) {
  AbortWorldRequest abort;
  abort.message = std::string(1024, 'a');
  EXPECT_TRUE(abort.Check().ok());
  abort.message += 'a';
  EXPECT_EQ(ReasonOf(abort.Check()), Reason::kMalformed);
  abort.message.clear();
  abort.epoch = Epoch(-1);
  EXPECT_EQ(ReasonOf(abort.Check()), Reason::kMalformed);
  ReformWorldRequest reform;
  EXPECT_TRUE(reform.Check().ok());
  reform.grow_to = 3;
  EXPECT_EQ(ReasonOf(reform.Check()), Reason::kUnsupported);
}

TEST(RequestsTest, BytesGoInPartsAndComeOutOfTheTensor) {
  WriteStagingRequest write;
  write.bytes = std::string(kMaxChunkBytes, 'a');
  EXPECT_TRUE(write.Check().ok());
  write.offset = -1;
  EXPECT_EQ(ReasonOf(write.Check()), Reason::kMalformed);
  write.offset = 0;
  write.bytes += 'a';
  EXPECT_EQ(ReasonOf(write.Check()), Reason::kMalformed);
  DownloadRequest read;
  EXPECT_EQ(*read.EndIn(10), 10);
  read.offset = 10;
  EXPECT_EQ(*read.EndIn(10), 10);
  EXPECT_EQ(ReasonOf(read.EndIn(9).status()), Reason::kMalformed);
  read.offset = 3;
  read.size = 4;
  EXPECT_EQ(*read.EndIn(10), 7);
  read.size = INT64_MAX;
  EXPECT_EQ(*read.EndIn(10), 10);
  EXPECT_TRUE(read.Check().ok());
  read.size = -1;
  EXPECT_EQ(ReasonOf(read.Check()), Reason::kMalformed);
}

TEST(RequestsTest, TheFlightRecordIsShownInPart) {
  EXPECT_EQ(*FlightEventLimit(0), 100);
  EXPECT_EQ(*FlightEventLimit(1), 1);
  EXPECT_EQ(*FlightEventLimit(10000), 10000);
  EXPECT_EQ(ReasonOf(FlightEventLimit(10001).status()), Reason::kMalformed);
  EXPECT_EQ(ReasonOf(FlightEventLimit(-1).status()), Reason::kMalformed);
  EXPECT_TRUE(CheckSequence(Sequence(1)).ok());
  EXPECT_EQ(ReasonOf(CheckSequence(Sequence(0))), Reason::kMalformed);
}

}  // namespace
}  // namespace chorus::node
