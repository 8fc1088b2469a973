#include "core/transport/completion.h"

#include <linux/futex.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/failpoint.h"
#include "core/base/futex.h"
#include "core/transport/doorbell.h"
#include "core/transport/rendezvous.h"
#include "core/transport/test_frame.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using ::testing::HasSubstr;
using Until = CompletionWaiter::Until;

absl::Time Soon() { return SteadyNow() + absl::Seconds(60); }

std::unique_ptr<SessionMemory> NewMemory() {
  SessionMemoryOptions options;
  options.ring_bytes = SessionMemoryOptions::kMinRingBytes;
  options.tensor_slots = 16;
  auto memory = CreateSessionMemory(options);
  EXPECT_TRUE(memory.ok()) << memory.status();
  return *std::move(memory);
}

// No spinning and no looking around: what is not woken stays asleep until its deadline.
WaitOptions SleepOnly() {
  WaitOptions options;
  options.look_around = absl::InfiniteDuration();
  options.spin.min_bound_ns = 0;
  options.spin.max_bound_ns = 0;
  return options;
}

TensorRecord Ready(int32_t arena, int64_t offset, int64_t bytes) {
  TensorRecord record;
  record.state = TensorState::kReady;
  record.arena = ArenaId(arena);
  record.offset = offset;
  record.bytes = bytes;
  return record;
}

TensorRecord Failed(absl::StatusCode code, int64_t error) {
  TensorRecord record;
  record.state = TensorState::kFailed;
  record.code = code;
  record.error = ErrorId(error);
  return record;
}

TensorRecord State(TensorState state) {
  TensorRecord record;
  record.state = state;
  return record;
}

class CompletionTest : public ::testing::Test {
 protected:
  const std::unique_ptr<SessionMemory> memory_ = NewMemory();
  CompletionWriter writer_{memory_.get()};
  CompletionWaiter waiter_{memory_.get()};
};

TEST_F(CompletionTest, ATensorsRecordGoesThroughItsStates) {
  const TensorId id{3, 1};
  EXPECT_EQ(waiter_.Tensor(id)->state, TensorState::kEmpty);
  EXPECT_TRUE(writer_.PublishTensor(id, State(TensorState::kPending)));
  EXPECT_EQ(waiter_.Tensor(id)->state, TensorState::kPending);
  EXPECT_TRUE(writer_.PublishTensor(id, State(TensorState::kOnDevice)));
  EXPECT_EQ(waiter_.Tensor(id)->state, TensorState::kOnDevice);
  EXPECT_EQ(waiter_.WaitForTensor(id, Until::kDone, Soon())->state, TensorState::kOnDevice);
  EXPECT_EQ(waiter_.WaitForTensor(id, Until::kReadable, absl::InfinitePast()).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(writer_.PublishTensor(id, Ready(5, int64_t{1} << 40, 4096)));
  const auto ready = waiter_.WaitForTensor(id, Until::kReadable, Soon());
  ASSERT_TRUE(ready.ok()) << ready.status();
  EXPECT_EQ(ready->state, TensorState::kReady);
  EXPECT_EQ(ready->arena, ArenaId(5));
  EXPECT_EQ(ready->offset, int64_t{1} << 40);
  EXPECT_EQ(ready->bytes, 4096);
  EXPECT_EQ(ready->error, ErrorId(0));
  // Neighbours are not touched.
  EXPECT_EQ(waiter_.Tensor(TensorId{2, 1})->state, TensorState::kEmpty);
  EXPECT_EQ(waiter_.Tensor(TensorId{4, 1})->state, TensorState::kEmpty);
}

TEST_F(CompletionTest, AFailedTensorIsAnAnswerWithItsError) {
  const TensorId id{0, 0xffffffff};
  EXPECT_TRUE(writer_.PublishTensor(id, Failed(absl::StatusCode::kAborted, 1234567890123)));
  const auto failed = waiter_.WaitForTensor(id, Until::kReadable, Soon());
  ASSERT_TRUE(failed.ok()) << failed.status();
  EXPECT_EQ(failed->state, TensorState::kFailed);
  EXPECT_EQ(failed->code, absl::StatusCode::kAborted);
  EXPECT_EQ(failed->error, ErrorId(1234567890123));
  EXPECT_EQ(failed->bytes, 0);
}

TEST_F(CompletionTest, GenerationsKeepNamesApart) {
  EXPECT_TRUE(writer_.PublishTensor(TensorId{7, 5}, Ready(0, 0, 8)));
  // The daemon has not come to the next generation yet: it will.
  EXPECT_EQ(waiter_.Tensor(TensorId{7, 6})->state, TensorState::kEmpty);
  const auto old = waiter_.WaitForTensor(TensorId{7, 4}, Until::kDone, Soon());
  EXPECT_EQ(ErrorOf(old.status()).reason, Reason::kUnknownName) << old.status();
  EXPECT_THAT(std::string(old.status().message()), HasSubstr("tensor 7.4"));
  // However far apart they are: generations do not begin anew.
  EXPECT_TRUE(writer_.PublishTensor(TensorId{8, 0xffffffff}, Ready(0, 0, 8)));
  EXPECT_TRUE(writer_.PublishTensor(TensorId{8, 1}, Ready(0, 0, 4)));
  EXPECT_EQ(waiter_.Tensor(TensorId{8, 0xffffffff})->bytes, 8);
  const auto oldest = waiter_.WaitForTensor(TensorId{8, 1}, Until::kDone, Soon());
  EXPECT_EQ(ErrorOf(oldest.status()).reason, Reason::kUnknownName) << oldest.status();
}

TEST_F(CompletionTest, WhatComesLateLeavesTheLaterRecordAlone) {
  EXPECT_TRUE(writer_.PublishTensor(TensorId{7, 6}, Failed(absl::StatusCode::kAborted, 9)));
  EXPECT_TRUE(writer_.PublishTensor(TensorId{7, 5}, Ready(0, 0, 8)));
  EXPECT_TRUE(writer_.PublishTensor(TensorId{7, 5}, State(TensorState::kOnDevice)));
  EXPECT_EQ(waiter_.WaitForTensor(TensorId{7, 6}, Until::kDone, Soon())->error, ErrorId(9));
  RunOutcome outcome;
  outcome.error = ErrorId(10);
  writer_.PublishRun(Sequence(3 + kRunSlots), outcome);
  writer_.PublishRun(Sequence(3), {});
  EXPECT_EQ(waiter_.WaitForRun(Sequence(3 + kRunSlots), Soon())->error, ErrorId(10));
}

TEST_F(CompletionTest, SlotsOutsideTheTableAreRefused) {
  for (int32_t slot : {-1, 16, 1 << 30}) {
    EXPECT_FALSE(writer_.PublishTensor(TensorId{slot, 1}, Ready(0, 0, 8)));
    EXPECT_EQ(waiter_.Tensor(TensorId{slot, 1}).status().code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(waiter_.WaitForTensor(TensorId{slot, 1}, Until::kDone, Soon()).status().code(),
              absl::StatusCode::kNotFound);
  }
}

TEST_F(CompletionTest, ARecordThatMakesNoSenseIsAnError) {
  memory_->tensors()[1].word.store(1 << 8 | 200);
  EXPECT_EQ(waiter_.Tensor(TensorId{1, 1}).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(waiter_.WaitForTensor(TensorId{1, 1}, Until::kDone, Soon()).status().code(),
            absl::StatusCode::kInternal);
}

TEST_F(CompletionTest, RunsAreKeptUntilTheirRecordGoesToALaterOne) {
  EXPECT_FALSE(waiter_.Run(Sequence(1))->has_value());
  for (int64_t run = 1; run <= kRunSlots + 1; ++run) {
    RunOutcome outcome;
    outcome.code = run % 2 == 0 ? absl::StatusCode::kOk : absl::StatusCode::kAborted;
    outcome.error = ErrorId(run * 10);
    writer_.PublishRun(Sequence(run), outcome);
  }
  EXPECT_EQ(ErrorOf(waiter_.Run(Sequence(1)).status()).reason, Reason::kOutcomeForgotten);
  EXPECT_EQ(ErrorOf(waiter_.WaitForRun(Sequence(1), Soon()).status()).reason,
            Reason::kOutcomeForgotten);
  for (int64_t run : {int64_t{2}, int64_t{3}, int64_t{kRunSlots}, int64_t{kRunSlots} + 1}) {
    const auto outcome = waiter_.WaitForRun(Sequence(run), Soon());
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->code, run % 2 == 0 ? absl::StatusCode::kOk : absl::StatusCode::kAborted);
    EXPECT_EQ(outcome->error, ErrorId(run * 10));
  }
  EXPECT_FALSE(waiter_.Run(Sequence(kRunSlots + 2))->has_value());
}

TEST_F(CompletionTest, ADeadlineNamesWhatWasWaitedFor) {
  const auto run = waiter_.WaitForRun(Sequence(9), SteadyNow() + absl::Milliseconds(2));
  EXPECT_EQ(run.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ErrorOf(run.status()).reason, Reason::kTransportTimeout);
  EXPECT_THAT(std::string(run.status().message()), HasSubstr("run 9"));
  const auto tensor = waiter_.WaitForTensor(TensorId{1, 2}, Until::kDone, absl::InfinitePast());
  EXPECT_THAT(std::string(tensor.status().message()), HasSubstr("tensor 1.2"));
  EXPECT_EQ(memory_->control().client.completion_waiters.load(), 0u);
}

TEST_F(CompletionTest, SignalChangesTheWordOncePerBatch) {
  const std::atomic<uint32_t>& completed = memory_->control().completion.completed;
  writer_.Signal();
  EXPECT_EQ(completed.load(), 0u);
  writer_.PublishRun(Sequence(1), {});
  writer_.PublishTensor(TensorId{1, 1}, Ready(0, 0, 0));
  EXPECT_EQ(completed.load(), 0u);
  writer_.Signal();
  EXPECT_EQ(completed.load(), 1u);
  writer_.Signal();
  EXPECT_EQ(completed.load(), 1u);
  // Whatever a client writes there, the daemon counts on from its own copy.
  memory_->control().completion.completed.store(12345);
  writer_.PublishRun(Sequence(2), {});
  writer_.Signal();
  EXPECT_EQ(completed.load(), 2u);
}

TEST_F(CompletionTest, AWaiterAsksForLivenessAfterEachSlice) {
  WaitOptions options = SleepOnly();
  options.look_around = absl::Milliseconds(1);
  int asked = 0;
  options.liveness = [&asked] {
    return ++asked < 3 ? absl::OkStatus() : MakeError(Reason::kDaemonLost, "gone");
  };
  CompletionWaiter waiter(memory_.get(), options);
  const auto run = waiter.WaitForRun(Sequence(1), absl::InfiniteFuture());
  EXPECT_EQ(ErrorOf(run.status()).reason, Reason::kDaemonLost) << run.status();
  EXPECT_EQ(asked, 3);
  EXPECT_EQ(memory_->control().client.completion_waiters.load(), 0u);
}

// What happens at the last moment before a waiter sleeps must keep it awake.
std::function<void()>* const before_sleep = new std::function<void()>;
void RunBeforeSleep(absl::string_view name) {
  if (name == "completion.waiting") (*before_sleep)();
}

TEST_F(CompletionTest, WakeAllJustBeforeTheSleep) {
  bool gone = false;
  WaitOptions options = SleepOnly();
  options.liveness = [&gone] {
    return gone ? MakeError(Reason::kDaemonLost, "gone") : absl::OkStatus();
  };
  CompletionWaiter waiter(memory_.get(), options);
  for (int round = 0; round < 3; ++round) {
    gone = false;
    int sleeps = 0;
    *before_sleep = [&] {
      ++sleeps;
      gone = true;
      waiter.WakeAll();
    };
    SetFailpointHook(&RunBeforeSleep);
    const absl::Time deadline = SteadyNow() + absl::Seconds(20);
    const auto run = waiter.WaitForRun(Sequence(1), deadline);
    SetFailpointHook(nullptr);
    EXPECT_LT(SteadyNow(), deadline) << "it slept";
    EXPECT_EQ(ErrorOf(run.status()).reason, Reason::kDaemonLost) << run.status();
    EXPECT_EQ(sleeps, 1);
    // The daemon's own next change clears the bit that WakeAll flips.
    writer_.PublishRun(Sequence(100 + round), {});
    writer_.Signal();
  }
}

TEST_F(CompletionTest, AnOutcomeJustBeforeTheSleep) {
  CompletionWaiter waiter(memory_.get(), SleepOnly());
  int sleeps = 0;
  *before_sleep = [&] {
    ++sleeps;
    writer_.PublishRun(Sequence(1), {});
    writer_.Signal();
  };
  SetFailpointHook(&RunBeforeSleep);
  const absl::Time deadline = SteadyNow() + absl::Seconds(20);
  const auto run = waiter.WaitForRun(Sequence(1), deadline);
  SetFailpointHook(nullptr);
  EXPECT_LT(SteadyNow(), deadline) << "it slept";
  EXPECT_TRUE(run.ok()) << run.status();
  EXPECT_EQ(sleeps, 1);
}

TEST_F(CompletionTest, WakeAllWakesEveryWaiter) {
  constexpr int kThreads = 3;
  std::atomic<bool> gone{false};
  WaitOptions options = SleepOnly();
  options.liveness = [&gone] {
    return gone ? MakeError(Reason::kDaemonLost, "gone") : absl::OkStatus();
  };
  CompletionWaiter waiter(memory_.get(), options);
  std::atomic<int> told{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      const auto run = waiter.WaitForRun(Sequence(i + 1), Soon());
      told += ErrorOf(run.status()).reason == Reason::kDaemonLost;
    });
  }
  while (memory_->control().client.completion_waiters.load() < kThreads) std::this_thread::yield();
  gone = true;
  waiter.WakeAll();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(told, kThreads);
}

// Waits until these threads of this process sleep.
void AwaitAsleep(const std::vector<std::atomic<pid_t>>& threads) {
  for (const std::atomic<pid_t>& thread : threads) {
    for (bool asleep = false; !asleep; std::this_thread::yield()) {
      std::ifstream stat("/proc/self/task/" + std::to_string(thread.load()) + "/stat");
      std::string text;
      std::getline(stat, text);
      const size_t name_end = text.rfind(')');
      asleep = thread != 0 && name_end != std::string::npos && text.substr(name_end + 2, 1) == "S";
    }
  }
}

constexpr int kManyWaiters = 100;

TEST_F(CompletionTest, ManyWhoWaitForOneOutcomeAllWake) {
  CompletionWaiter waiter(memory_.get(), SleepOnly());
  std::vector<std::atomic<pid_t>> ids(kManyWaiters);
  std::atomic<int> woken{0};
  std::vector<std::thread> threads;
  const absl::Time deadline = SteadyNow() + absl::Seconds(20);
  for (std::atomic<pid_t>& id : ids) {
    threads.emplace_back([&] {
      id = gettid();
      woken += waiter.WaitForRun(Sequence(1), deadline).ok() ? 1 : 0;
    });
  }
  const std::atomic<uint32_t>& waiters = memory_->control().client.completion_waiters;
  while (waiters.load() < kManyWaiters) std::this_thread::yield();
  AwaitAsleep(ids);
  // One change that is nobody's outcome, then the outcome, while some have not seen the first.
  writer_.PublishRun(Sequence(2), {});
  writer_.Signal();
  writer_.PublishRun(Sequence(1), {});
  writer_.Signal();
  for (std::thread& thread : threads) thread.join();
  EXPECT_LT(SteadyNow(), deadline) << "some slept on";
  EXPECT_EQ(woken, kManyWaiters);
}

// A client may have threads asleep that it never needs.
TEST_F(CompletionTest, TheDaemonWakesFewItself) {
  SessionControl& control = memory_->control();
  const uint32_t seen = control.completion.completed.load();
  std::vector<std::atomic<pid_t>> ids(kManyWaiters);
  std::vector<std::thread> threads;
  for (std::atomic<pid_t>& id : ids) {
    threads.emplace_back([&] {
      id = gettid();
      FutexWait(control.completion.completed, seen, absl::InfiniteDuration());
    });
  }
  control.client.completion_waiters += kManyWaiters;
  AwaitAsleep(ids);
  writer_.PublishRun(Sequence(1), {});
  writer_.Signal();
  const long rest = syscall(SYS_futex, &control.completion.completed, FUTEX_WAKE, INT_MAX);
  EXPECT_LT(rest, kManyWaiters);
  EXPECT_GE(rest, kManyWaiters / 2);
  for (std::thread& thread : threads) thread.join();
}

// An outcome and a waiter that goes to sleep, at the same moment. A processor that lets the
// daemon's look at the waiters pass its store would leave the client asleep.
TEST_F(CompletionTest, NoWakeIsLostWhenSleepMeetsAnOutcome) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  constexpr int64_t kRounds = 30000;
  CompletionWaiter waiter(memory_.get(), SleepOnly());
  Rendezvous rendezvous;
  bool waited = false;
  *before_sleep = [&waited] { waited = true; };
  SetFailpointHook(&RunBeforeSleep);
  std::atomic<bool> lost{false};
  std::thread daemon([&] {
    const Pinned pinned(0);
    std::mt19937_64 random(seed);
    for (int64_t i = 1; i <= kRounds && !lost; ++i) {
      rendezvous.Race(0, random());
      writer_.PublishRun(Sequence(i), {});
      writer_.Signal();
      rendezvous.Meet(0);
    }
  });
  const Pinned pinned(1);
  std::mt19937_64 random(seed + 1);
  for (int64_t i = 1; i <= kRounds && !lost; ++i) {
    rendezvous.Race(1, random());
    waited = false;
    if (!waiter.WaitForRun(Sequence(i), SteadyNow() + absl::Seconds(10)).ok()) lost = true;
    rendezvous.First(waited ? 1 : 0);
    rendezvous.Meet(1);
  }
  daemon.join();
  SetFailpointHook(nullptr);
  EXPECT_FALSE(lost);
}

// A record is read whole or not at all while the daemon reuses it.
TEST_F(CompletionTest, RecordsAreNeverMixed) {
  constexpr int64_t kRounds = 2000000;
  std::atomic<int64_t> newest{0};
  std::thread daemon([&] {
    for (int64_t i = 1; i <= kRounds; ++i) {
      RunOutcome outcome;
      outcome.code = static_cast<absl::StatusCode>(i % 16);
      outcome.error = ErrorId(i);
      writer_.PublishRun(Sequence(1 + i * kRunSlots), outcome);
      writer_.PublishTensor(TensorId{1, static_cast<uint32_t>(i)},
                            i % 2 == 0 ? Ready(static_cast<int32_t>(i), i * 3, i * 5)
                                       : Failed(static_cast<absl::StatusCode>(i % 16), i));
      newest.store(i, std::memory_order_relaxed);
    }
  });
  int64_t seen = 0;
  for (int64_t i = 0; i < kRounds;) {
    i = newest.load(std::memory_order_relaxed);
    // The one that was just written, and the one that may be being written.
    for (int64_t j : {i, i + 1}) {
      const auto run = waiter_.Run(Sequence(1 + j * kRunSlots));
      if (run.ok() && run->has_value()) {
        ++seen;
        ASSERT_EQ((*run)->error, ErrorId(j));
        ASSERT_EQ(static_cast<int64_t>((*run)->code), j % 16);
      }
      const auto tensor = waiter_.Tensor(TensorId{1, static_cast<uint32_t>(j)});
      if (tensor.ok() && tensor->state == TensorState::kReady) {
        ++seen;
        ASSERT_EQ(tensor->arena, ArenaId(static_cast<int32_t>(j)));
        ASSERT_EQ(tensor->offset, j * 3);
        ASSERT_EQ(tensor->bytes, j * 5);
      } else if (tensor.ok() && tensor->state == TensorState::kFailed) {
        ++seen;
        ASSERT_EQ(tensor->error, ErrorId(j));
        ASSERT_EQ(static_cast<int64_t>(tensor->code), j % 16);
      }
    }
  }
  daemon.join();
  EXPECT_GT(seen, 0);
}

// A record may be told twice, between two looks of a waiter.
TEST_F(CompletionTest, ARecordToldTwiceIsSeen) {
  constexpr uint32_t kRounds = 300000;
  std::atomic<uint32_t> asked{0};
  std::atomic<bool> lost{false};
  std::thread daemon([&] {
    for (uint32_t i = 1; i <= kRounds && !lost; ++i) {
      while (asked.load(std::memory_order_acquire) < i && !lost) {
      }
      for (int n = 0; n < 4; ++n) writer_.PublishTensor(TensorId{1, i}, Ready(0, 0, 8));
      writer_.Signal();
    }
  });
  for (uint32_t i = 1; i <= kRounds && !lost; ++i) {
    asked.store(i, std::memory_order_release);
    const auto record =
        waiter_.WaitForTensor(TensorId{1, i}, Until::kDone, SteadyNow() + absl::Seconds(10));
    if (!record.ok()) lost = true;
  }
  daemon.join();
  EXPECT_FALSE(lost);
}

// Client and daemon as threads, both asleep whenever they can be: every frame must wake the daemon
// and every outcome the client. A lost wake shows as a deadline.
TEST_F(CompletionTest, NoWakeIsLostEitherWay) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  constexpr int64_t kRounds = 20000;
  auto doorbell = Doorbell::Create();
  ASSERT_TRUE(doorbell.ok()) << doorbell.status();
  auto view = DoorbellView::Map((*doorbell)->fd());
  ASSERT_TRUE(view.ok()) << view.status();
  auto event = CreateWakeEvent();
  ASSERT_TRUE(event.ok()) << event.status();
  UniqueFd epoll(epoll_create1(EPOLL_CLOEXEC));
  epoll_event interest{};
  interest.events = EPOLLIN | EPOLLET;
  ASSERT_EQ(epoll_ctl(epoll.get(), EPOLL_CTL_ADD, event->get(), &interest), 0);

  std::atomic<int> daemon_timeouts{0};
  std::thread daemon([&] {
    std::mt19937_64 random(seed);
    SubmissionRingReader reader(memory_.get());
    FrameBuffer buffer;
    for (int64_t done = 0; done < kRounds && daemon_timeouts == 0;) {
      absl::string_view frame;
      const SubmissionRingReader::Result result = reader.Poll(&buffer, &frame);
      ASSERT_NE(result, SubmissionRingReader::Result::kMalformed) << reader.status();
      if (result == SubmissionRingReader::Result::kFrame) {
        ASSERT_TRUE(IsWholeTestFrame(frame));
        done = TestFrameSequence(frame);
        writer_.PublishTensor(
            TensorId{static_cast<int32_t>(done % 16), static_cast<uint32_t>(done)},
            Ready(0, done, 8));
        writer_.PublishRun(Sequence(done), {});
        writer_.Signal();
        continue;
      }
      // A little later or earlier each time, to meet every interleaving with the client.
      Dither(random() % 64);
      (*doorbell)->SleepUnless([&] { return reader.HasFrame(); },
                               [&] {
                                 epoll_event ready;
                                 if (epoll_wait(epoll.get(), &ready, 1, 60000) == 0)
                                   ++daemon_timeouts;
                               });
    }
  });
  Submitter submitter(memory_.get(), view->get(), *std::move(event), SleepOnly());
  CompletionWaiter waiter(memory_.get(), SleepOnly());
  std::mt19937_64 random(seed + 1);
  for (int64_t i = 1; i <= kRounds; ++i) {
    ASSERT_TRUE(submitter.Submit(MakeTestFrame(i, 16 + random() % 100), absl::Seconds(60)).ok());
    Dither(random() % 64);
    const auto run = waiter.WaitForRun(Sequence(i), Soon());
    ASSERT_TRUE(run.ok()) << run.status();
    const auto tensor =
        waiter.Tensor(TensorId{static_cast<int32_t>(i % 16), static_cast<uint32_t>(i)});
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    ASSERT_EQ(tensor->offset, i);
  }
  daemon.join();
  EXPECT_EQ(daemon_timeouts, 0);
}

}  // namespace
}  // namespace chorus
