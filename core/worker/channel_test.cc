#include "core/worker/channel.h"

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "core/base/error.h"
#include "gtest/gtest.h"

namespace chorus::worker {
namespace {

constexpr size_t kLongest = 4 << 20;
constexpr absl::Duration kPatience = absl::Seconds(60);

absl::Status GoOn() { return absl::OkStatus(); }

class ChannelTest : public ::testing::Test {
 protected:
  ChannelTest() {
    Channel::Descriptors descriptors;
    near_ = *Channel::Create(kLongest, &descriptors);
    far_ = *Channel::Open(std::move(descriptors), kLongest);
  }

  static std::string Next(Channel* channel) {
    std::string message;
    for (;;) {
      const auto received = channel->Receive(&message);
      EXPECT_TRUE(received.ok()) << received.status();
      if (!received.ok() || *received) return message;
      EXPECT_TRUE(channel->Wait(kPatience).ok());
    }
  }

  std::unique_ptr<Channel> near_;
  std::unique_ptr<Channel> far_;
  std::atomic<bool> ended_{false};
};

TEST_F(ChannelTest, MessagesGoBothWaysInOrder) {
  EXPECT_TRUE(*near_->TrySend("one"));
  EXPECT_TRUE(*near_->TrySend(""));
  EXPECT_TRUE(*far_->TrySend("three"));
  EXPECT_EQ(Next(far_.get()), "one");
  EXPECT_EQ(Next(far_.get()), "");
  EXPECT_EQ(Next(near_.get()), "three");
  std::string none;
  EXPECT_FALSE(*far_->Receive(&none));
}

TEST_F(ChannelTest, LongMessagesGoInPieces) {
  const std::string longest(kLongest, 'x');
  EXPECT_FALSE(*near_->TrySend(longest));
  std::thread sender([&] { EXPECT_TRUE(near_->Send(longest, GoOn).ok()); });
  EXPECT_EQ(Next(far_.get()), longest);
  sender.join();
}

TEST_F(ChannelTest, TheReceiverSaysHowLongMessagesMayBe) {
  const std::string too_long(kLongest + 1, 'x');
  std::thread sender([&] {
    near_
        ->Send(too_long,
               [this] {
                 return ended_ ? absl::CancelledError("the receiver has given up")
                               : absl::OkStatus();
               })
        .IgnoreError();
  });
  std::string message;
  absl::StatusOr<bool> received = false;
  while (received.ok()) {
    received = far_->Receive(&message);
    if (received.ok()) {
      ASSERT_TRUE(far_->Wait(kPatience).ok());
    }
  }
  EXPECT_EQ(ErrorOf(received.status()).reason, Reason::kDeviceLost) << received.status();
  ended_ = true;
  sender.join();
}

TEST_F(ChannelTest, ASenderWaitsForRoom) {
  const std::string half(30000, 'y');
  int sent = 0;
  while (*near_->TrySend(half)) ++sent;
  EXPECT_GT(sent, 1);
  std::thread sender([&] { EXPECT_TRUE(near_->Send("last", GoOn).ok()); });
  for (int i = 0; i < sent; ++i) ASSERT_EQ(Next(far_.get()), half);
  EXPECT_EQ(Next(far_.get()), "last");
  sender.join();
}

TEST_F(ChannelTest, AWaitEndsWithAWake) {
  std::thread waker([&] { near_->Wake(); });
  EXPECT_TRUE(near_->Wait(absl::InfiniteDuration()).ok());
  waker.join();
}

TEST_F(ChannelTest, WhatWasSentBeforeTheEndIsReceived) {
  EXPECT_TRUE(*far_->TrySend("farewell"));
  far_.reset();
  EXPECT_EQ(Next(near_.get()), "farewell");
  absl::Status there;
  while (there.ok()) there = near_->Wait(kPatience);
  EXPECT_EQ(ErrorOf(there).reason, Reason::kDeviceLost);
}

TEST_F(ChannelTest, ASenderIsNotHeldByAReceiverThatHasGone) {
  const std::string half(30000, 'y');
  while (*near_->TrySend(half)) {
  }
  far_.reset();
  EXPECT_EQ(ErrorOf(near_->Send(half, GoOn)).reason, Reason::kDeviceLost);
}

TEST_F(ChannelTest, EverythingArrivesUnderLoad) {
  constexpr int kMessages = 20000;
  std::thread echo([&] {
    for (int i = 0; i < kMessages; ++i) {
      const std::string message = Next(far_.get());
      EXPECT_TRUE(far_->Send(message, GoOn).ok());
    }
  });
  std::thread sender([&] {
    for (int i = 0; i < kMessages; ++i) {
      EXPECT_TRUE(near_->Send(std::string(static_cast<size_t>(i % 700), 'z'), GoOn).ok());
    }
  });
  for (int i = 0; i < kMessages; ++i) {
    ASSERT_EQ(Next(near_.get()).size(), static_cast<size_t>(i % 700));
  }
  sender.join();
  echo.join();
}

}  // namespace
}  // namespace chorus::worker
