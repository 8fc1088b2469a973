#include "core/transport/ring.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/failpoint.h"
#include "core/transport/rendezvous.h"
#include "core/transport/test_frame.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using Result = SubmissionRingReader::Result;

constexpr uint32_t kSmallRing = SessionMemoryOptions::kMinRingBytes;

std::unique_ptr<SessionMemory> NewMemory(uint32_t ring_bytes = kSmallRing) {
  SessionMemoryOptions options;
  options.ring_bytes = ring_bytes;
  options.tensor_slots = 16;
  auto memory = CreateSessionMemory(options);
  EXPECT_TRUE(memory.ok()) << memory.status();
  return *std::move(memory);
}

absl::Time Soon() { return SteadyNow() + absl::Seconds(60); }

// No spinning and no looking around: what is not woken stays asleep until its deadline.
WaitOptions SleepOnly() {
  WaitOptions options;
  options.look_around = absl::InfiniteDuration();
  options.spin.min_bound_ns = 0;
  options.spin.max_bound_ns = 0;
  return options;
}

void Write(SubmissionRingWriter* writer, const std::string& frame) {
  const absl::StatusOr<bool> written = writer->TryWrite(frame);
  ASSERT_TRUE(written.ok()) << written.status();
  ASSERT_TRUE(*written);
}

// The next frame, or "" when there is none.
std::string Read(SubmissionRingReader* reader) {
  static FrameBuffer buffer;
  absl::string_view frame;
  switch (reader->Poll(&buffer, &frame)) {
    case Result::kEmpty:
      return "";
    case Result::kFrame:
      return std::string(frame);
    case Result::kMalformed:
      return std::string(reader->status().message());
  }
  return "?";
}

TEST(RingTest, FramesComeOutAsTheyWentIn) {
  const auto memory = NewMemory();
  SubmissionRingWriter writer(memory.get());
  SubmissionRingReader reader(memory.get());
  EXPECT_FALSE(reader.HasFrame());
  EXPECT_EQ(Read(&reader), "");
  for (int64_t i = 1; i <= 3; ++i)
    Write(&writer, MakeTestFrame(i, 16 + 5 * static_cast<size_t>(i)));
  EXPECT_TRUE(reader.HasFrame());
  for (int64_t i = 1; i <= 3; ++i) {
    EXPECT_EQ(Read(&reader), MakeTestFrame(i, 16 + 5 * static_cast<size_t>(i)));
  }
  EXPECT_FALSE(reader.HasFrame());
  EXPECT_EQ(Read(&reader), "");
}

// For every distance to the end of the ring, frames that just fit, just do not, and others.
TEST(RingTest, EverySizeAroundTheEnd) {
  for (size_t to_end = 8; to_end <= 512; to_end += 8) {
    for (int64_t difference = -17; difference <= 17; ++difference) {
      const int64_t size = static_cast<int64_t>(to_end) + difference;
      if (size < 16) continue;
      const auto memory = NewMemory();
      SubmissionRingWriter writer(memory.get());
      SubmissionRingReader reader(memory.get());
      // Two frames bring both to `to_end` before the end.
      const size_t before = kSmallRing - to_end;
      for (size_t part : {size_t{2048}, before - 2048}) {
        Write(&writer, MakeTestFrame(1, part));
        ASSERT_EQ(Read(&reader), MakeTestFrame(1, part));
      }
      for (int64_t i = 2; i < 5; ++i) {
        Write(&writer, MakeTestFrame(i, static_cast<size_t>(size)));
      }
      for (int64_t i = 2; i < 5; ++i) {
        ASSERT_EQ(Read(&reader), MakeTestFrame(i, static_cast<size_t>(size)))
            << "size " << size << ", " << to_end << " bytes before the end";
      }
      ASSERT_EQ(Read(&reader), "");
    }
  }
}

TEST(RingTest, AFullRingTakesNothingMore) {
  const auto memory = NewMemory();
  SubmissionRingWriter writer(memory.get(), SleepOnly());
  SubmissionRingReader reader(memory.get());
  const std::string frame = MakeTestFrame(1, 1000);
  int written = 0;
  while (*writer.TryWrite(frame)) ++written;
  EXPECT_EQ(written, 4);
  const absl::Status status =
      writer.WaitForSpace(frame.size(), SteadyNow() + absl::Milliseconds(5));
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_EQ(ErrorOf(status).reason, Reason::kTransportTimeout);
  // The fifth needs the 96 bytes that are skipped before the end and the first frame's bytes.
  EXPECT_EQ(Read(&reader), frame);
  EXPECT_TRUE(writer.WaitForSpace(frame.size(), absl::InfinitePast()).ok());
  Write(&writer, MakeTestFrame(2, 1000));
  EXPECT_FALSE(*writer.TryWrite(frame));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Read(&reader), frame);
  EXPECT_EQ(Read(&reader), MakeTestFrame(2, 1000));
}

TEST(RingTest, TheLargestFrameFitsIntoAnEmptyRingWhereverItStands) {
  const auto memory = NewMemory();
  SubmissionRingWriter writer(memory.get());
  SubmissionRingReader reader(memory.get());
  for (int64_t i = 0; i < 1000; ++i) {
    Write(&writer, MakeTestFrame(i, writer.max_frame_bytes()));
    ASSERT_EQ(Read(&reader), MakeTestFrame(i, writer.max_frame_bytes()));
    Write(&writer, MakeTestFrame(i, 24));
    ASSERT_EQ(Read(&reader), MakeTestFrame(i, 24));
  }
}

TEST(RingTest, TheWriterRefusesWhatTheReaderWould) {
  const auto memory = NewMemory();
  SubmissionRingWriter writer(memory.get());
  std::string skip = MakeTestFrame(1, 32);
  std::memset(&skip[4], 0xff, 2);
  std::string wrong_size = MakeTestFrame(1, 32);
  wrong_size[0] = 31;
  for (const std::string& frame : {std::string(), std::string(15, '\0'), skip, wrong_size,
                                   MakeTestFrame(1, writer.max_frame_bytes() + 1)}) {
    const absl::StatusOr<bool> written = writer.TryWrite(frame);
    EXPECT_EQ(written.status().code(), absl::StatusCode::kInvalidArgument) << frame.size();
  }
  EXPECT_EQ(writer.WaitForSpace(writer.max_frame_bytes() + 1, Soon()).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(memory->control().client.tail.load(), 0u);
}

TEST(RingTest, AWriterWhoseDaemonWritesNonsenseFailsAndDoesNotCrash) {
  const auto memory = NewMemory();
  SubmissionRingWriter writer(memory.get());
  while (*writer.TryWrite(MakeTestFrame(1, 1000))) {
  }
  memory->control().daemon.head.store(1u << 30);
  EXPECT_EQ(writer.TryWrite(MakeTestFrame(1, 1000)).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(writer.WaitForSpace(1000, Soon()).code(), absl::StatusCode::kInternal);
}

// What a hostile client could write, and what the reader makes of it.
class HostileRingTest : public ::testing::Test {
 protected:
  void PutStart(uint64_t offset, uint32_t size, uint16_t kind) {
    const FrameStart start{size, kind, kFrameVersion};
    std::memcpy(memory_->ring() + offset, &start, sizeof(start));
  }
  void SetTail(uint64_t tail) { memory_->control().client.tail.store(tail); }
  void ExpectMalformed() {
    absl::string_view frame;
    EXPECT_EQ(reader_.Poll(&buffer_, &frame), Result::kMalformed);
    EXPECT_EQ(reader_.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ErrorOf(reader_.status()).reason, Reason::kMalformed);
    // It stays so, whatever the client repairs.
    SetTail(0);
    EXPECT_EQ(reader_.Poll(&buffer_, &frame), Result::kMalformed);
    EXPECT_TRUE(reader_.HasFrame());
  }
  // Brings both sides to `offset`.
  void MoveTo(uint64_t offset) {
    for (uint64_t at = 0; at < offset;) {
      const uint32_t step = static_cast<uint32_t>(std::min<uint64_t>(1024, offset - at));
      PutStart(at, step, 1);
      at += step;
      SetTail(at);
      absl::string_view frame;
      ASSERT_EQ(reader_.Poll(&buffer_, &frame), Result::kFrame) << reader_.status();
    }
  }

  const std::unique_ptr<SessionMemory> memory_ = NewMemory();
  SubmissionRingReader reader_{memory_.get()};
  FrameBuffer buffer_;
};

TEST_F(HostileRingTest, TailTooFarAhead) {
  PutStart(0, 16, 1);
  SetTail(kSmallRing + 8);
  ExpectMalformed();
}
TEST_F(HostileRingTest, TailFarAwayModuloTheRing) {
  PutStart(0, 16, 1);
  SetTail((uint64_t{1} << 40) + 16);
  ExpectMalformed();
}
TEST_F(HostileRingTest, TailGoesBack) {
  MoveTo(1024);
  SetTail(1008);
  ExpectMalformed();
}
TEST_F(HostileRingTest, TailOfOddBytes) {
  PutStart(0, 16, 1);
  SetTail(17);
  ExpectMalformed();
}
TEST_F(HostileRingTest, FrameSmallerThanItsHeader) {
  PutStart(0, 15, 1);
  SetTail(16);
  ExpectMalformed();
}
TEST_F(HostileRingTest, FrameOfNoBytes) {
  PutStart(0, 0, 1);
  SetTail(16);
  ExpectMalformed();
}
TEST_F(HostileRingTest, FrameLargerThanPublished) {
  PutStart(0, 17, 1);
  SetTail(16);
  ExpectMalformed();
}
TEST_F(HostileRingTest, FrameLargerThanAnyMayBe) {
  PutStart(0, kSmallRing / 2 + 8, 1);
  SetTail(kSmallRing);
  ExpectMalformed();
}
TEST_F(HostileRingTest, FrameSizeThatOverflowsWhenPadded) {
  PutStart(0, 0xffffffff, 1);
  SetTail(16);
  ExpectMalformed();
}
TEST_F(HostileRingTest, FrameAcrossTheEnd) {
  MoveTo(kSmallRing - 64);
  PutStart(kSmallRing - 64, 72, 1);
  SetTail(kSmallRing + 64);
  ExpectMalformed();
}
TEST_F(HostileRingTest, SkipThatDoesNotReachTheEnd) {
  MoveTo(kSmallRing - 64);
  PutStart(kSmallRing - 64, 48, kSkipKind);
  PutStart(kSmallRing - 16, 16, 1);
  PutStart(0, 64, 1);
  SetTail(kSmallRing + 64);
  ExpectMalformed();
}
TEST_F(HostileRingTest, SkipBeyondTheEnd) {
  MoveTo(kSmallRing - 64);
  PutStart(kSmallRing - 64, 128, kSkipKind);
  PutStart(64, 64, 1);
  SetTail(kSmallRing + 512);
  ExpectMalformed();
}
TEST_F(HostileRingTest, SkipWithNothingBehindIt) {
  MoveTo(kSmallRing - 64);
  PutStart(kSmallRing - 64, 64, kSkipKind);
  SetTail(kSmallRing);
  ExpectMalformed();
}
TEST_F(HostileRingTest, SkipOfTheWholeRing) {
  PutStart(0, kSmallRing, kSkipKind);
  SetTail(kSmallRing);
  ExpectMalformed();
}
TEST_F(HostileRingTest, SkipAfterSkip) {
  MoveTo(kSmallRing - 64);
  PutStart(kSmallRing - 64, 64, kSkipKind);
  PutStart(0, kSmallRing, kSkipKind);
  SetTail(2 * kSmallRing - 64);
  ExpectMalformed();
}

TEST_F(HostileRingTest, TheSharedHeadIsNeverReadBack) {
  SubmissionRingWriter writer(memory_.get());
  for (int64_t i = 1; i <= 3; ++i) Write(&writer, MakeTestFrame(i, 40));
  for (int64_t i = 1; i <= 3; ++i) {
    memory_->control().daemon.head.store(i == 2 ? 0 : ~uint64_t{0});
    EXPECT_EQ(Read(&reader_), MakeTestFrame(i, 40));
    EXPECT_EQ(memory_->control().daemon.head.load(), 40u * static_cast<uint64_t>(i));
  }
}

// The client changes a frame's size after it has been checked and before it is copied.
std::atomic<char*>* const size_to_change = new std::atomic<char*>(nullptr);
TEST_F(HostileRingTest, TheSizeThatWasCheckedIsTheSizeThatCounts) {
  PutStart(0, 40, 1);
  SetTail(40);
  *size_to_change = memory_->ring();
  SetFailpointHook([](absl::string_view name) {
    if (name != "ring_reader.before_copy") return;
    const FrameStart larger{60000, 1, kFrameVersion};
    std::memcpy(size_to_change->load(), &larger, sizeof(larger));
  });
  const std::string frame = Read(&reader_);
  SetFailpointHook(nullptr);
  EXPECT_EQ(frame.size(), 40u);
  EXPECT_EQ(frame[0], 40);
  uint32_t now = 0;
  std::memcpy(&now, memory_->ring(), sizeof(now));
  EXPECT_EQ(now, 60000u);
}

// Someone scribbles over everything that a client can write, through a mapping of its own as
// another process would have it, while the reader reads.
TEST(HostileRingStressTest, ScribblingNeverGetsPastTheChecks) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937_64 seeds(seed);
  FrameBuffer buffer;
  int64_t frames = 0;
  int64_t malformed = 0;
  const absl::Time deadline = Soon() + absl::Seconds(60);
  // Enough of both that every check has met its match, also where the threads share a processor.
  while (frames < 2000 || malformed < 50) {
    ASSERT_LT(SteadyNow(), deadline) << frames << " frames, " << malformed << " refused";
    const auto memory = NewMemory();
    auto theirs = MapSessionMemory(memory->fd());
    ASSERT_TRUE(theirs.ok());
    SubmissionRingReader reader(memory.get());
    std::atomic<bool> stop{false};
    std::thread scribbler([&stop, &theirs, seed = seeds()] {
      std::mt19937_64 random(seed);
      SessionMemory& memory = **theirs;
      SubmissionRingWriter writer(&memory);
      int64_t sequence = 0;
      while (!stop.load(std::memory_order_relaxed)) {
        // Mostly frames, so that the reader gets somewhere; then nonsense around them.
        for (int i = 0; i < 32; ++i) {
          // An error: the head is scribbled over as well.
          writer.TryWrite(MakeTestFrame(++sequence, 16 + random() % 200)).IgnoreError();
        }
        const uint64_t junk = random();
        switch (random() % 6) {
          case 0:
            memory.control().client.tail.fetch_add(8 * (junk % 1024));
            break;
          case 1:
            memory.control().daemon.head.store(junk);
            break;
          case 2:
            memory.control().client.space_waiter.store(static_cast<uint32_t>(junk));
            break;
          default: {
            const uint32_t start[2] = {static_cast<uint32_t>(junk % 300),
                                       junk % 7 == 0 ? 0xffffu : 0x00010001u};
            std::memcpy(memory.ring() + random() % (kSmallRing / 8) * 8, start, sizeof(start));
          }
        }
      }
    });
    while (reader.status().ok()) {
      absl::string_view frame;
      const Result result = reader.Poll(&buffer, &frame);
      if (result == Result::kEmpty) std::this_thread::yield();
      if (result == Result::kEmpty && SteadyNow() > deadline) break;
      if (result != Result::kFrame) continue;
      ++frames;
      uint32_t stated = 0;
      std::memcpy(&stated, frame.data(), sizeof(stated));
      ASSERT_EQ(frame.data(), buffer.data());
      ASSERT_EQ(frame.size(), stated);
      ASSERT_GE(frame.size(), kFrameHeaderBytes);
      ASSERT_LE(frame.size(), kSmallRing / 2);
    }
    ++malformed;
    stop = true;
    scribbler.join();
  }
}

// Both ends on the same mapping, so that ThreadSanitizer sees a missing release or acquire.
TEST(RingThreadsTest, ManyFramesOfManySizesInOrder) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  const auto memory = NewMemory();
  constexpr int64_t kFrames = 20000;
  std::thread client([&] {
    std::mt19937_64 random(seed);
    SubmissionRingWriter writer(memory.get());
    for (int64_t i = 1; i <= kFrames; ++i) {
      const std::string frame = MakeTestFrame(i, 16 + random() % (random() % 16 == 0 ? 2000 : 100));
      for (;;) {
        const absl::StatusOr<bool> written = writer.TryWrite(frame);
        ASSERT_TRUE(written.ok()) << written.status();
        if (*written) break;
        const absl::Status space = writer.WaitForSpace(frame.size(), Soon());
        ASSERT_TRUE(space.ok()) << space;
      }
    }
  });
  SubmissionRingReader reader(memory.get());
  FrameBuffer buffer;
  const absl::Time deadline = Soon();
  for (int64_t expected = 1; expected <= kFrames;) {
    absl::string_view frame;
    const Result result = reader.Poll(&buffer, &frame);
    ASSERT_NE(result, Result::kMalformed) << reader.status();
    if (result == Result::kFrame) {
      ASSERT_EQ(TestFrameSequence(frame), expected);
      ASSERT_TRUE(IsWholeTestFrame(frame)) << expected;
      ++expected;
    } else {
      std::this_thread::yield();
      ASSERT_LT(SteadyNow(), deadline);
    }
  }
  client.join();
}

// The writer sleeps each time the ring is full; only the reader wakes it.
TEST(RingThreadsTest, NoWakeOfAFullRingIsLost) {
  const auto memory = NewMemory();
  constexpr int64_t kFrames = 4000;
  absl::Status status;
  std::thread client([&] {
    SubmissionRingWriter writer(memory.get(), SleepOnly());
    for (int64_t i = 1; i <= kFrames && status.ok(); ++i) {
      const std::string frame = MakeTestFrame(i, 1000);
      while (status.ok() && !*writer.TryWrite(frame)) {
        status = writer.WaitForSpace(frame.size(), Soon());
      }
    }
  });
  SubmissionRingReader reader(memory.get());
  FrameBuffer buffer;
  const absl::Time deadline = Soon() + absl::Seconds(20);
  int64_t frames = 0;
  while (frames < kFrames && SteadyNow() < deadline) {
    absl::string_view frame;
    const Result result = reader.Poll(&buffer, &frame);
    ASSERT_NE(result, Result::kMalformed) << reader.status();
    if (result == Result::kFrame) ++frames;
  }
  client.join();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(frames, kFrames);
}

thread_local bool waited = false;

// A full ring, a writer that goes to sleep and a reader that makes room, at the same moment: either
// the writer sees the room or the reader the sleeper. A processor that lets the reader's look pass
// its store would leave the writer asleep.
TEST(RingThreadsTest, NoWakeIsLostWhenSleepMeetsRoom) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  constexpr int kRounds = 4000;
  const auto memory = NewMemory();
  SubmissionRingWriter writer(memory.get(), SleepOnly());
  SubmissionRingReader reader(memory.get());
  const std::string frame = MakeTestFrame(1, 1024);
  for (int i = 0; i < 4; ++i) Write(&writer, frame);
  Rendezvous rendezvous;
  // Set on the writer's thread, just before it sleeps.
  SetFailpointHook([](absl::string_view name) {
    if (name == "ring.waiting_for_space") waited = true;
  });
  std::atomic<bool> lost{false};
  std::thread client([&] {
    const Pinned pinned(0);
    std::mt19937_64 random(seed);
    for (int i = 0; i < kRounds && !lost; ++i) {
      rendezvous.Race(0, random());
      waited = false;
      if (!writer.WaitForSpace(frame.size(), SteadyNow() + absl::Seconds(10)).ok()) lost = true;
      rendezvous.First(waited ? 0 : 1);
      Write(&writer, frame);
      rendezvous.Meet(0);
    }
  });
  const Pinned pinned(1);
  std::mt19937_64 random(seed + 1);
  FrameBuffer buffer;
  for (int i = 0; i < kRounds && !lost; ++i) {
    rendezvous.Race(1, random());
    absl::string_view taken;
    EXPECT_EQ(reader.Poll(&buffer, &taken), Result::kFrame);
    rendezvous.Meet(1);
  }
  client.join();
  SetFailpointHook(nullptr);
  EXPECT_FALSE(lost);
}

// The same for a daemon that goes to sleep, or stops looking at one ring, and a client that
// submits.
class RingSleepTest : public testing::TestWithParam<bool> {};
TEST_P(RingSleepTest, NoWakeIsLostWhenSleepMeetsAFrame) {
  const bool one_ring = GetParam();
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  constexpr int kRounds = 10000;
  const auto memory = NewMemory();
  auto doorbell = Doorbell::Create();
  ASSERT_TRUE(doorbell.ok()) << doorbell.status();
  auto view = DoorbellView::Map((*doorbell)->fd());
  ASSERT_TRUE(view.ok()) << view.status();
  SubmissionRingWriter writer(memory.get());
  SubmissionRingReader reader(memory.get());
  const std::string frame = MakeTestFrame(1, 40);
  Rendezvous rendezvous;
  std::atomic<bool> rang{false};
  std::thread client([&] {
    const Pinned pinned(0);
    std::mt19937_64 random(seed);
    for (int i = 0; i < kRounds; ++i) {
      rendezvous.Race(0, random());
      writer.TryWrite(frame).IgnoreError();  // it always fits
      rang.store(one_ring ? writer.must_ring() : (*view)->daemon_asleep(),
                 std::memory_order_relaxed);
      rendezvous.Meet(0);
    }
  });
  const Pinned pinned(1);
  std::mt19937_64 random(seed + 1);
  FrameBuffer buffer;
  int lost = 0;
  for (int i = 0; i < kRounds; ++i) {
    rendezvous.Race(1, random());
    bool slept = false;
    if (one_ring) {
      slept = reader.StopLooking();
      rendezvous.Meet(1);
    } else {
      (*doorbell)->SleepUnless([&] { return reader.HasFrame(); },
                               [&] {
                                 slept = true;
                                 rendezvous.Meet(1);
                               });
      if (!slept) rendezvous.Meet(1);
    }
    rendezvous.First(slept ? 1 : 0);
    if (slept && !rang.load(std::memory_order_relaxed)) ++lost;
    absl::string_view taken;
    ASSERT_EQ(reader.Poll(&buffer, &taken), Result::kFrame);
    reader.LookAgain();
  }
  client.join();
  EXPECT_EQ(lost, 0);
}
INSTANTIATE_TEST_SUITE_P(Ways, RingSleepTest, testing::Bool(),
                         [](const testing::TestParamInfo<bool>& info) {
                           return std::string(info.param ? "OneRing" : "AllRings");
                         });

TEST(RingThreadsTest, AWaitForSpaceEndsWhenTheDaemonIsGone) {
  const auto memory = NewMemory();
  WaitOptions options = SleepOnly();
  options.look_around = absl::Milliseconds(1);
  int asked = 0;
  options.liveness = [&asked] {
    return ++asked < 3 ? absl::OkStatus() : MakeError(Reason::kDaemonLost, "gone");
  };
  SubmissionRingWriter writer(memory.get(), options);
  while (*writer.TryWrite(MakeTestFrame(1, 1000))) {
  }
  const absl::Status status = writer.WaitForSpace(1000, absl::InfiniteFuture());
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(asked, 3);
}

}  // namespace
}  // namespace chorus
