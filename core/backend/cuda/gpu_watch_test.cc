#include "core/backend/cuda/gpu_watch.h"

#include <signal.h>
#include <sys/mman.h>

#include <atomic>
#include <future>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/backend/cuda/testing/fake_gpu.h"
#include "core/base/device.h"
#include "core/cuda/gpu.h"
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
    listener.on_wake = [this] { woken_.set_value(); };
    listener.on_overdue = [this](cuda::Stream stream) {
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

// A GPU that writes words in the order in which it was asked to, whatever their streams, and does
// so while the watching thread stands between two reads: these trap. There is one at a time.
class TrappingWords {
 public:
  static constexpr size_t kPageBytes = 4096;
  static constexpr int kPages = 4;
  static constexpr int kStreamsOfPage = 64;  // a word of the watch has a cache line

  TrappingWords() {
    the_ = this;
    struct sigaction action {};
    action.sa_sigaction = [](int, siginfo_t* info, void*) { the_->OnTrap(info->si_addr); };
    action.sa_flags = SA_SIGINFO;
    EXPECT_EQ(sigaction(SIGSEGV, &action, &old_), 0);
  }
  ~TrappingWords() { sigaction(SIGSEGV, &old_, nullptr); }

  // In the place of the driver's cuStreamWriteValue32. The first word is to be asked for first.
  static Result Ask(cuda::Stream, cuda::DevicePtr word, uint32_t value, unsigned int) {
    the_->asked_.push_back({word, value});
    return Result::kSuccess;
  }
  // From here on it writes.
  void Go(uint64_t seed) {
    random_.seed(seed);
    written_ = 0;
    number_asked_.store(asked_.size(), std::memory_order_release);
    Protect(begin(), kPages, PROT_NONE);
  }
  void Clear() { asked_.clear(); }

 private:
  char* begin() const { return reinterpret_cast<char*>(asked_.front().first); }
  static void Protect(char* from, int pages, int protection) {
    mprotect(from, kPageBytes * static_cast<size_t>(pages), protection);
  }
  // As a GPU writes: ThreadSanitizer sees nothing of it. It takes a lock for a store that it sees,
  // and holds the same lock for a load that the handler may have come between.
  __attribute__((no_sanitize("thread"))) static void Write(volatile uint32_t* word,
                                                           uint32_t value) {
    *word = value;
  }
  // On the watching thread, which reads again when this returns: only what a handler may call.
  void OnTrap(const void* at) {
    const size_t number_asked = number_asked_.load(std::memory_order_acquire);
    if (at < begin() || at >= begin() + kPages * kPageBytes) {
      sigaction(SIGSEGV, &old_, nullptr);
      return;
    }
    Protect(begin(), kPages, PROT_READ | PROT_WRITE);
    for (uint64_t steps = random_() % 3; steps > 0 && written_ < number_asked; --steps) {
      const auto& [word, value] = asked_[written_++];
      Write(reinterpret_cast<volatile uint32_t*>(word), value);
    }
    if (written_ == number_asked) return;
    // One that will be read: it has a word that is not written.
    const cuda::DevicePtr word = asked_[written_ + random_() % (number_asked - written_)].first;
    Protect(reinterpret_cast<char*>(word / kPageBytes * kPageBytes), 1, PROT_NONE);
  }

  static inline TrappingWords* the_ = nullptr;
  struct sigaction old_ {};
  std::vector<std::pair<cuda::DevicePtr, uint32_t>> asked_;
  std::atomic<size_t> number_asked_{0};
  // The watching thread's, from Go() until all is told.
  size_t written_ = 0;
  std::mt19937_64 random_;
};

// What the GPU has in one order, through all of its streams, is told in that order, wherever the
// words move between the reads.
TEST_F(GpuWatchTest, TellsInTheOrderOfTheGpuWhateverMovesBetweenReads) {
  TrappingWords words;
  cuda::Api api = gpu_.api();
  api.StreamWriteValue32 = &TrappingWords::Ask;
  static constexpr char kImage[] = "of a stand-in";
  const auto gpu = *CudaGpu::Open(&api, 0, {{kImage, sizeof(kImage)}}, {});
  constexpr int kStreams = TrappingWords::kPages * TrappingWords::kStreamsOfPage;
  GpuWatch::Listener listener;
  listener.on_overdue = [](cuda::Stream) {};
  const auto watch =
      *GpuWatch::Create(gpu.get(), std::vector<cuda::Stream>(kStreams), std::move(listener));
  constexpr int kAwaited = 24;
  std::vector<int> in_order(kAwaited);
  std::iota(in_order.begin(), in_order.end(), 0);
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    std::vector<int> told;  // by the watch's thread, read behind it
    std::promise<void> all_told;
    for (int i = 0; i < kAwaited; ++i) {
      const auto page = i == 0 ? 0 : static_cast<int>(random() % TrappingWords::kPages);
      const auto done = [&told, &all_told, i](const absl::Status&) {
        told.push_back(i);
        if (told.size() == kAwaited) all_told.set_value();
      };
      ASSERT_EQ(watch->Await(page * TrappingWords::kStreamsOfPage, done, absl::OkStatus()),
                Result::kSuccess);
    }
    words.Go(seed);
    all_told.get_future().get();
    ASSERT_EQ(told, in_order);
    words.Clear();
  }
}

}  // namespace
}  // namespace chorus
