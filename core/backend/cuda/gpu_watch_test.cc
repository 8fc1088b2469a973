#include "core/backend/cuda/gpu_watch.h"

#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/backend/cuda/testing/fake_gpu.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using cuda::Result;
using ::testing::ElementsAre;

class GpuWatchTest : public ::testing::Test {
 protected:
  GpuWatchTest() : streams_{gpu_.NewStream(), gpu_.NewStream()} {
    GpuWatch::Listener listener;
    listener.woken = [this] { woken_.set_value(); };
    listener.overdue = [this](cuda::Stream stream) {
      if (!std::exchange(told_, true)) overdue_.set_value(stream);
    };
    watch_ = *GpuWatch::Create(gpu_.get(), streams_, std::move(listener));
  }
  ~GpuWatchTest() override {
    watch_->Stop();
    for (const cuda::Stream stream : streams_) gpu_.api().StreamSynchronize(stream);
  }

  // What `done` is told, where the driver does as it is asked.
  absl::Status Reach(int stream, absl::Status status) {
    std::promise<absl::Status> reached;
    const Result result = watch_->Await(
        stream, [&](absl::Status told) { reached.set_value(std::move(told)); }, std::move(status));
    EXPECT_EQ(result, Result::kSuccess);
    return reached.get_future().get();
  }

  testing::FakeGpu gpu_;
  const std::vector<cuda::Stream> streams_;
  std::promise<void> woken_;
  std::promise<cuda::Stream> overdue_;
  bool told_ = false;  // the watch's thread's
  std::unique_ptr<GpuWatch> watch_;
};

TEST_F(GpuWatchTest, CallsInTheOrderOfAStreamWithWhatItWasGiven) {
  std::vector<std::string> told;  // by the watch's thread, read behind it
  for (const char* const text : {"a", "b", "c"}) {
    EXPECT_EQ(watch_->Await(
                  0, [&told](const absl::Status& status) { told.emplace_back(status.message()); },
                  absl::InternalError(text)),
              Result::kSuccess);
  }
  EXPECT_TRUE(Reach(0, absl::OkStatus()).ok());
  EXPECT_THAT(told, ElementsAre("a", "b", "c"));
}

TEST_F(GpuWatchTest, ALossEndsWhatTheDriverRefusedAndWhatComesLater) {
  gpu_.driver().FailNext("cuStreamWriteValue32", Result::kUnknown);
  std::promise<absl::Status> refused;
  EXPECT_EQ(
      watch_->Await(
          1, [&](absl::Status status) { refused.set_value(std::move(status)); }, absl::OkStatus()),
      Result::kUnknown);
  watch_->Lose(absl::DataLossError("gone"));
  EXPECT_EQ(refused.get_future().get().message(), "gone");
  // The driver is not asked any more.
  gpu_.driver().FailNext("cuStreamWriteValue32", Result::kUnknown);
  EXPECT_EQ(Reach(0, absl::OkStatus()).message(), "gone");
  EXPECT_EQ(Reach(1, absl::InternalError("its own")).message(), "its own");
  EXPECT_EQ(gpu_.driver().faults_left(), 1);
  // The first loss is the one that counts.
  watch_->Lose(absl::DataLossError("gone again"));
  EXPECT_EQ(Reach(0, absl::OkStatus()).message(), "gone");
}

TEST_F(GpuWatchTest, AsksAboutAStreamThatDoesNotCome) {
  gpu_.driver().FailNext("cuStreamWriteValue32", Result::kUnknown);
  watch_->Await(
      1, [](const absl::Status&) {}, absl::OkStatus());
  EXPECT_EQ(overdue_.get_future().get(), streams_[1]);
}

TEST_F(GpuWatchTest, WakesOnItsThread) {
  watch_->Wake();
  woken_.get_future().get();
}

TEST_F(GpuWatchTest, WhatIsAwaitedAsItStopsIsNeverCalled) {
  gpu_.driver().FailNext("cuStreamWriteValue32", Result::kUnknown);
  bool called = false;
  watch_->Await(
      0, [&](const absl::Status&) { called = true; }, absl::OkStatus());
  watch_->Stop();
  watch_->Lose(absl::DataLossError("gone"));
  watch_ = nullptr;
  EXPECT_FALSE(called);
  watch_ = *GpuWatch::Create(gpu_.get(), streams_, {});
}

}  // namespace
}  // namespace chorus
