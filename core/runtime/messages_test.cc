#include "core/runtime/messages.h"

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "core/base/bytes.h"
#include "core/base/error.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

TEST(MessageTest, LaunchesComeBackAsTheyWere) {
  LaunchMessage message;
  message.launch = LaunchId(300);
  message.lane = kMaxLanes - 1;
  message.plan = PlanId(70000);
  message.buffers = {0, ~uint64_t{0}, 4096};
  message.collectives.resize(2);
  message.collectives[0].communicator = CommunicatorId(5);
  message.collectives[1].present = {0, 2, 7};
  message.after = {LaunchId(1), LaunchId(299)};
  message.uploads = {TransferId(8), TransferId(9)};
  message.left_out = {0, 3, 4};
  message.hold_back = true;
  message.commit = CommunicatorId(77);
  message.inlines = {{2, {'a', 'b', 'c'}}, {0, {}}};
  ByteWriter out;
  EncodeLaunch(message, &out);
  const absl::StatusOr<LaunchMessage> back = DecodeLaunch(out.bytes());
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->launch, LaunchId(300));
  EXPECT_EQ(back->lane, kMaxLanes - 1);
  EXPECT_EQ(back->plan, PlanId(70000));
  EXPECT_EQ(back->buffers, message.buffers);
  ASSERT_EQ(back->collectives.size(), 2u);
  EXPECT_EQ(back->collectives[0].communicator, CommunicatorId(5));
  EXPECT_TRUE(back->collectives[0].present.empty());
  EXPECT_EQ(back->collectives[1].present, message.collectives[1].present);
  EXPECT_EQ(back->after, message.after);
  EXPECT_EQ(back->uploads, message.uploads);
  EXPECT_EQ(back->left_out, message.left_out);
  EXPECT_TRUE(back->hold_back);
  EXPECT_EQ(back->commit, CommunicatorId(77));
  ASSERT_EQ(back->inlines.size(), 2u);
  EXPECT_EQ(back->inlines[0].buffer, 2);
  EXPECT_EQ(back->inlines[0].bytes, message.inlines[0].bytes);
  EXPECT_EQ(back->inlines[1].buffer, 0);
  EXPECT_TRUE(back->inlines[1].bytes.empty());
  for (size_t size = 0; size < out.size(); ++size) {
    EXPECT_FALSE(DecodeLaunch(absl::string_view(out.bytes()).substr(0, size)).ok()) << size;
  }
  EXPECT_FALSE(DecodeLaunch(out.bytes() + "x").ok());
  // Every count in it, made too large: refused, and nothing is allocated for it.
  for (size_t at = 0; at + sizeof(uint32_t) <= out.size(); at += sizeof(uint32_t)) {
    std::string changed = out.bytes();
    changed.replace(at, sizeof(uint32_t), "\xff\xff\xff\x7f");
    const absl::StatusOr<LaunchMessage> large = DecodeLaunch(changed);
    if (!large.ok()) continue;
    EXPECT_EQ(large->buffers.size(), 3u) << at;
    EXPECT_EQ(large->collectives.size(), 2u) << at;
    EXPECT_EQ(large->after.size(), 2u) << at;
    EXPECT_EQ(large->left_out.size(), 3u) << at;
    EXPECT_EQ(large->inlines.size(), 2u) << at;
    EXPECT_EQ(large->inlines[0].bytes.size(), 3u) << at;
  }
  // Whether it holds back is neither 0 nor 1.
  std::string neither = out.bytes();
  neither[32] = 2;
  EXPECT_FALSE(DecodeLaunch(neither).ok());
  neither[32] = 1;
  EXPECT_TRUE(DecodeLaunch(neither)->hold_back);
}

absl::StatusOr<EventMessage> Sent(const EventMessage& message) {
  ByteWriter out;
  EncodeEvent(message, &out);
  return DecodeEvent(out.bytes());
}

TEST(MessageTest, EventsSayWhatTheyAreOf) {
  const absl::Status ok;
  const auto completed = Sent(CompletionMessage{LaunchId(9), ok});
  ASSERT_TRUE(completed.ok());
  EXPECT_EQ(absl::get<CompletionMessage>(*completed).launch, LaunchId(9));
  EXPECT_TRUE(absl::get<CompletionMessage>(*completed).status.ok());
  const absl::Status refused = MakeError(Reason::kUnsupported, "not here");
  for (const absl::Status& status : {ok, refused}) {
    const auto loaded = Sent(LoadedMessage{PlanId(300), status});
    ASSERT_TRUE(loaded.ok());
    EXPECT_EQ(absl::get<LoadedMessage>(*loaded).plan, PlanId(300));
    EXPECT_EQ(absl::get<LoadedMessage>(*loaded).status.code(), status.code());
    const auto opened = Sent(OpenedMessage{CommunicatorId(4), status});
    ASSERT_TRUE(opened.ok());
    EXPECT_EQ(absl::get<OpenedMessage>(*opened).communicator, CommunicatorId(4));
    EXPECT_EQ(absl::get<OpenedMessage>(*opened).status.code(), status.code());
    const auto transferred = Sent(TransferredMessage{TransferId(5), status});
    ASSERT_TRUE(transferred.ok());
    EXPECT_EQ(absl::get<TransferredMessage>(*transferred).transfer, TransferId(5));
    EXPECT_EQ(absl::get<TransferredMessage>(*transferred).status.code(), status.code());
  }
}

TEST(MessageTest, ALossHasAReasonAndNoName) {
  const auto lost = Sent(LostMessage{MakeError(Reason::kDeviceLost, "its worker ended")});
  ASSERT_TRUE(lost.ok());
  EXPECT_EQ(ErrorOf(absl::get<LostMessage>(*lost).status).reason, Reason::kDeviceLost);
  EXPECT_FALSE(Sent(LostMessage{absl::OkStatus()}).ok());
}

TEST(MessageTest, TheNameAndLaneOfALaunchAreReadAlone) {
  LaunchMessage launch;
  launch.launch = LaunchId(77);
  launch.lane = 3;
  launch.buffers = {1, 2, 3};
  ByteWriter out;
  EncodeLaunch(launch, &out);
  EXPECT_EQ(LaunchOf(out.bytes()), LaunchId(77));
  EXPECT_EQ(LaneOf(out.bytes()), 3);
  EXPECT_EQ(LaunchOf("short"), LaunchId());
  EXPECT_EQ(LaneOf("short"), 0);
}

TEST(MessageTest, ALaneThatThereIsNotIsRefused) {
  for (const int32_t lane : {-1, kMaxLanes}) {
    LaunchMessage launch;
    launch.lane = lane;
    ByteWriter out;
    EncodeLaunch(launch, &out);
    EXPECT_FALSE(DecodeLaunch(out.bytes()).ok()) << lane;
    EXPECT_EQ(LaneOf(out.bytes()), 0) << lane;
  }
}

TEST(MessageTest, EventsCarryTheWholeError) {
  Error error(Reason::kPeerDied);
  error.message = "rank 2 died";
  error.culprit.rank = 2;
  for (const bool held_back : {false, true}) {
    for (const bool is_origin : {false, true}) {
      const auto back =
          Sent(CompletionMessage{LaunchId(10), ToStatus(error), held_back, is_origin});
      ASSERT_TRUE(back.ok());
      const auto& completion = absl::get<CompletionMessage>(*back);
      EXPECT_EQ(completion.launch, LaunchId(10));
      EXPECT_EQ(completion.status.code(), absl::StatusCode::kAborted);
      EXPECT_EQ(ErrorOf(completion.status).reason, Reason::kPeerDied);
      EXPECT_EQ(ErrorOf(completion.status).culprit.rank, 2);
      EXPECT_EQ(completion.held_back, held_back);
      EXPECT_EQ(completion.is_origin, is_origin);
    }
  }
}

TEST(MessageTest, WhatIsNoEventIsRefused) {
  const absl::Status failed = MakeError(Reason::kPeerDied, "rank 2 died");
  ByteWriter out;
  EncodeEvent(CompletionMessage{LaunchId(10), failed, true, true}, &out);
  const std::string bytes = out.bytes();
  ASSERT_TRUE(DecodeEvent(bytes).ok());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(DecodeEvent(absl::string_view(bytes).substr(0, size)).ok()) << size;
  }
  EXPECT_FALSE(DecodeEvent(bytes + "x").ok());
  for (int first = 0; first < 256; ++first) {
    std::string other = bytes;
    other[0] = static_cast<char>(first);
    const int kind = first >> 4;
    const int flags = first & 15;
    // Flags of a failure without one, or that only launches have.
    const bool is_event = kind == 0 ? flags < 8 && flags % 2 == 1 : kind < 4 && flags == 1;
    EXPECT_EQ(DecodeEvent(other).ok(), is_event) << first;
  }
}

}  // namespace
}  // namespace chorus
