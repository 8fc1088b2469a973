#include "core/runtime/memory.h"

#include <string.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "core/base/error.h"
#include "core/base/work.h"
#include "core/runtime/memory_thread.h"
#include "core/runtime/size_class.h"
#include "core/runtime/testing/process_resources.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::MappedArenas;
using testing::OpenDescriptors;

constexpr int64_t kMiB = int64_t{1} << 20;

TEST(ArenaSetTest, BuffersAreAlignedApartAndRecycled) {
  const BudgetRef budget = Budget::OfNode(64 * kMiB);
  const ArenaSet::Ptr set = ArenaSet::Create(budget);
  std::vector<BufferRef> buffers;
  for (const int64_t bytes : {0, 1, 64, 65, 4096, 32768, 100000, 3000000}) {
    auto buffer = set->Allocate(bytes);
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_EQ((*buffer)->bytes(), bytes);
    EXPECT_EQ((*buffer)->address() % (bytes >= 32768 ? 4096 : 64), 0u) << bytes;
    EXPECT_EQ((*buffer)->state(), Buffer::State::kResult);
    EXPECT_EQ((*buffer)->references(), 1);
    memset((*buffer)->host(), static_cast<int>(buffers.size()), static_cast<size_t>(bytes));
    buffers.push_back(*std::move(buffer));
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    const char* const data = buffers[i]->host();
    EXPECT_TRUE(std::all_of(data, data + buffers[i]->bytes(),
                            [&](char c) { return c == static_cast<char>(i); }));
    const Arena* const arena = set->Find(buffers[i]->arena());
    ASSERT_NE(arena, nullptr);
    EXPECT_EQ(arena->data() + buffers[i]->offset(), data);
  }
  const DeviceAddress address = buffers[4]->address();
  buffers[4]->set_state(Buffer::State::kFrozen);
  buffers[4].reset();
  auto again = set->Allocate(4090);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ((*again)->address(), address);
  EXPECT_EQ((*again)->bytes(), 4090);
  EXPECT_EQ((*again)->state(), Buffer::State::kResult);
  EXPECT_EQ(set->Find(ArenaId(12345)), nullptr);
}

TEST(ArenaSetTest, ReferencesAreCounted) {
  const BudgetRef budget = Budget::OfNode(kMiB);
  const ArenaSet::Ptr set = ArenaSet::Create(budget);
  BufferRef a = *set->Allocate(8);
  EXPECT_EQ(set->live_buffers(), 1);
  {
    BufferRef b = a;
    EXPECT_EQ(a->references(), 2);
    BufferRef c = std::move(b);
    EXPECT_FALSE(b);  // NOLINT(bugprone-use-after-move): what is left of it is part of its contract
    EXPECT_EQ(a->references(), 2);
    c = *&c;
    EXPECT_EQ(a->references(), 2);
    b = a;
    EXPECT_EQ(a->references(), 3);
    EXPECT_TRUE(b == c);
  }
  EXPECT_EQ(a->references(), 1);
  a.reset();
  EXPECT_EQ(set->live_buffers(), 0);
}

TEST(ArenaSetTest, SetsNeverShareArenasAndGiveTheirMemoryBack) {
  const int descriptors = OpenDescriptors();
  const int arenas = MappedArenas();
  const BudgetRef budget = Budget::OfNode(64 * kMiB);
  {
    ArenaSet::Ptr one = ArenaSet::Create(budget);
    ArenaSet::Ptr two = ArenaSet::Create(budget);
    BufferRef a = *one->Allocate(100);
    BufferRef b = *two->Allocate(100);
    EXPECT_NE(a->arena(), b->arena());
    const ArenaId first = a->arena();
    a.reset();
    one.reset();
    EXPECT_EQ(budget->used(), two->arena_bytes());
    BufferRef c = *two->Allocate(100);
    EXPECT_NE(c->arena(), first);
    EXPECT_EQ(MappedArenas(), arenas + 1);
  }
  EXPECT_EQ(budget->used(), 0);
  EXPECT_EQ(MappedArenas(), arenas);
  EXPECT_EQ(OpenDescriptors(), descriptors);
}

TEST(ArenaSetTest, BuffersOutliveTheirSet) {
  const BudgetRef budget = Budget::OfNode(64 * kMiB);
  ArenaSet::Ptr set = ArenaSet::Create(budget);
  BufferRef small = *set->Allocate(10);
  BufferRef other = *set->Allocate(10);
  BufferRef large = *set->Allocate(8 * kMiB);
  memcpy(large->host(), "kept", 5);
  set.reset();
  EXPECT_EQ(budget->used(), 9 * kMiB);
  small.reset();
  other.reset();
  EXPECT_EQ(budget->used(), 8 * kMiB) << "an arena goes with its last buffer";
  EXPECT_STREQ(large->host(), "kept");
  large.reset();
  EXPECT_EQ(budget->used(), 0);
}

TEST(ArenaSetTest, FullMemoryIsRefusedAndRefusalsLeakNothing) {
  const BudgetRef budget = Budget::OfNode(2 * kMiB);
  const ArenaSet::Ptr set = ArenaSet::Create(budget);
  std::vector<BufferRef> buffers;
  absl::Status status;
  while (status.ok()) {
    auto buffer = set->Allocate(65536);
    status = buffer.status();
    if (buffer.ok()) buffers.push_back(*std::move(buffer));
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorOf(status).reason, Reason::kOutOfMemory);
  EXPECT_EQ(buffers.size(), 32u);
  buffers.pop_back();
  auto again = set->Allocate(65536);
  EXPECT_TRUE(again.ok()) << again.status();
  EXPECT_FALSE(set->Allocate(-1).ok());
  EXPECT_FALSE(set->Allocate(INT64_MAX).ok());
}

TEST(ArenaSetTest, MemoryKeptForReuseGoesToWhoNeedsIt) {
  const BudgetRef budget = Budget::OfNode(16 * kMiB);
  const ArenaSet::Ptr one = ArenaSet::Create(budget);
  const ArenaSet::Ptr two = ArenaSet::Create(budget);
  one->Allocate(12 * kMiB).value().reset();
  BufferRef kept = *one->Allocate(100);
  memcpy(kept->host(), "kept", 5);
  EXPECT_GE(budget->used(), 12 * kMiB);
  // Of its own set, in another size; then of another.
  BufferRef larger = *one->Allocate(14 * kMiB);
  larger.reset();
  auto other = two->Allocate(10 * kMiB);
  EXPECT_TRUE(other.ok()) << other.status();
  EXPECT_STREQ(kept->host(), "kept");
}

// The next arena is asked for while the first one has a single buffer, which has just been cut, and
// somebody else has the memory: what is given back then is not the arena of that buffer.
TEST(ArenaSetTest, ABufferIsInUseWhenTheNextArenaIsAskedFor) {
  constexpr int64_t kArena = 256 << 10;
  const BudgetRef node = Budget::OfNode(kMiB);
  const BudgetRef tenant = Budget::Within(node, "tenant", node->limits());
  MemoryThread thread;
  ArenaSetOptions options;
  options.first_arena_bytes = kArena;
  options.helpers.thread = &thread;
  const ArenaSet::Ptr set = ArenaSet::Create(tenant, options);
  const auto others = node->Charge(Domain::kHost, Resource::kResultBytes, kMiB - kArena - 4096);
  ASSERT_TRUE(others.ok()) << others.status();
  {
    const auto first = set->Allocate(kArena / 4);
    const auto second = set->Allocate(kArena / 4);
    ASSERT_TRUE(first.ok() && second.ok());
  }
  const auto third = set->Allocate(kArena / 8);  // of another class: none waits for it
  ASSERT_TRUE(third.ok()) << third.status();
  EXPECT_EQ(set->live_buffers(), 1);
  EXPECT_EQ(set->arena_bytes(), kArena);
  ASSERT_NE(set->Find((*third)->arena()), nullptr);
  thread.Drain();
  memset((*third)->host(), 1, static_cast<size_t>((*third)->bytes()));
}

TEST(ArenaSetTest, TrimKeepsWhatIsInUse) {
  const BudgetRef budget = Budget::OfNode(64 * kMiB);
  const ArenaSet::Ptr set = ArenaSet::Create(budget);
  std::vector<BufferRef> buffers;
  for (int i = 0; i < 100; ++i) buffers.push_back(*set->Allocate(100000));
  BufferRef kept = buffers[70];
  memcpy(kept->host(), "kept", 5);
  buffers.clear();
  const int64_t before = set->arena_bytes();
  const int64_t trimmed = set->Trim();
  EXPECT_GT(trimmed, 0);
  EXPECT_EQ(set->arena_bytes(), before - trimmed);
  EXPECT_EQ(budget->used(), set->arena_bytes());
  EXPECT_STREQ(kept->host(), "kept");
  EXPECT_EQ(set->Trim(), 0);
  // No list still leads into what was given back.
  for (int i = 0; i < 200; ++i) {
    buffers.push_back(*set->Allocate(100000));
    memset(buffers.back()->host(), 1, 100000);
  }
  EXPECT_STREQ(kept->host(), "kept");
}

TEST(ArenaSetTest, WhatIsKeptForTheNextBuffersIsIdle) {
  constexpr int64_t kMany = 20 * ArenaSet::kFreeRows;
  const BudgetRef budget = Budget::OfNode(64 * kMiB);
  const ArenaSet::Ptr set = ArenaSet::Create(budget);
  EXPECT_EQ(set->idle_bytes(), 0);
  const BufferRef kept = *set->Allocate(1000);
  const int64_t in_use = SizeClass::Of(1000).bytes;
  EXPECT_EQ(set->idle_bytes(), kMiB - in_use);
  std::vector<BufferRef> buffers;
  buffers.push_back(*set->Allocate(8 * kMiB));
  for (int64_t i = 0; i < kMany; ++i) buffers.push_back(*set->Allocate(1));
  const int64_t rows = kMany * static_cast<int64_t>(sizeof(Buffer));
  EXPECT_EQ(budget->used() - set->idle_bytes(), in_use + 8 * kMiB + 64 * kMany + rows);
  buffers.clear();
  EXPECT_EQ(budget->used() - set->idle_bytes(), in_use + static_cast<int64_t>(sizeof(Buffer)));
  set->Trim();
  EXPECT_GT(set->idle_bytes(), 0) << "beside the one that is in use";
  EXPECT_EQ(budget->used() - set->idle_bytes(), in_use + static_cast<int64_t>(sizeof(Buffer)));
}

// Rows of buffers that were returned stay beside the memory that they stand for.
TEST(ArenaSetTest, RowsOfBuffersAreChargedAsLongAsTheirArenas) {
  constexpr auto kRow = static_cast<int64_t>(sizeof(Buffer));
  constexpr int64_t kBuffers = 20 * ArenaSet::kFreeRows;
  const BudgetRef budget = Budget::OfNode(64 * kMiB);
  const ArenaSet::Ptr set = ArenaSet::Create(budget);
  std::vector<BufferRef> buffers;
  for (int64_t i = 0; i < ArenaSet::kFreeRows - 1; ++i) buffers.push_back(*set->Allocate(1));
  EXPECT_EQ(budget->used(), set->arena_bytes());
  while (static_cast<int64_t>(buffers.size()) < kBuffers) buffers.push_back(*set->Allocate(1));
  EXPECT_EQ(budget->used(), set->arena_bytes() + kBuffers * kRow);
  BufferRef kept = buffers.back();
  buffers.clear();
  for (int64_t i = 0; i < kBuffers - 1; ++i) buffers.push_back(*set->Allocate(1));
  EXPECT_EQ(budget->used(), set->arena_bytes() + kBuffers * kRow) << "they are used again";
  buffers.clear();
  set->Trim();
  EXPECT_EQ(budget->used(), set->arena_bytes() + kBuffers * kRow);
  kept.reset();
  set->Trim();
  EXPECT_EQ(budget->used(), 0);
  // Where there is no memory for a row there is none for its buffer.
  const BudgetRef little = Budget::OfNode(2 * kMiB);
  const ArenaSet::Ptr small = ArenaSet::Create(little);
  int64_t made = 0;
  for (auto buffer = small->Allocate(1); buffer.ok(); buffer = small->Allocate(1)) {
    buffers.push_back(*std::move(buffer));
    ++made;
  }
  EXPECT_GE(made, kMiB / kRow);
  EXPECT_LE(made, 2 * kMiB / kRow);
}

TEST(ArenaSetTest, TrimGivesBackSoManyAtATime) {
  const BudgetRef budget = Budget::OfNode(64 * kMiB);
  const ArenaSet::Ptr set = ArenaSet::Create(budget);
  std::vector<BufferRef> large;
  for (int i = 0; i < 4; ++i) large.push_back(*set->Allocate(2 * kMiB));
  // Of several classes, in an arena that stays.
  std::vector<BufferRef> small;
  for (int i = 0; i < 300; ++i) small.push_back(*set->Allocate(64 + i));
  const BufferRef kept = small[150];
  small.clear();
  EXPECT_EQ(set->Trim(3), 0) << "all are in use";
  large.clear();
  const int64_t all = set->arena_bytes();
  EXPECT_EQ(set->Trim(3), 6 * kMiB);
  EXPECT_EQ(set->Trim(3), 2 * kMiB);
  EXPECT_EQ(set->Trim(3), 0);
  EXPECT_EQ(set->arena_bytes(), all - 8 * kMiB);
  // What is free in the arena that stays is used again.
  for (int i = 0; i < 300; ++i) {
    small.push_back(*set->Allocate(64 + i));
    EXPECT_EQ(small.back()->arena(), kept->arena());
    memset(small.back()->host(), 1, static_cast<size_t>(64 + i));
  }
  EXPECT_EQ(set->arena_bytes(), all - 8 * kMiB);
}

// What a tenant leaves behind may be thousands of arenas.
TEST(LeftSetsTest, ArenasOfASetThatWasLeftGoInSlicesAndStayChargedUntilThen) {
  constexpr int kArenas = 700;
  constexpr int64_t kBytes = 64 << 10;
  const BudgetRef node = Budget::OfNode(256 * kMiB);
  LeftSets left;
  ArenaSetOptions options;
  options.first_arena_bytes = options.largest_arena_bytes = kBytes;  // each buffer has its own
  options.left = &left;
  const auto filled = [&](std::vector<BufferRef>* buffers) {
    const BudgetRef tenant = Budget::Within(node, "tenant", node->limits());
    ArenaSet::Ptr set = ArenaSet::Create(tenant, options);
    for (int i = 0; i < kArenas; ++i) buffers->push_back(*set->Allocate(kBytes));
    return set;
  };
  const auto slices = [&] {
    int count = 0;
    for (bool more = true; more; ++count) {
      const WorkSlice slice;
      more = left.Continue();
      EXPECT_LT(SliceWork(), 2 * kTurnWork);
    }
    return count;
  };
  for (const bool buffers_stay : {false, true}) {
    SCOPED_TRACE(buffers_stay);
    std::vector<BufferRef> buffers;
    ArenaSet::Ptr set = filled(&buffers);
    const int64_t all = node->used();
    {
      // Its buffers go before it is left, or after.
      const WorkSlice slice;
      if (buffers_stay) {
        set.reset();
        EXPECT_EQ(node->used(), all);
      }
      buffers.resize(1);
      if (!buffers_stay) {
        EXPECT_EQ(node->used(), all);
        set.reset();
      }
      EXPECT_LT(SliceWork(), 2 * kTurnWork);
      EXPECT_LT(node->used(), all);
    }
    EXPECT_GT(node->used(), all / 2);
    bool is_back = false;
    left.After([&] {
      is_back = true;
      EXPECT_EQ(node->used(), kBytes) << "the last buffer";
    });
    // A tenant that needs the memory does not wait for the others' turns.
    const int64_t before = node->used();
    EXPECT_TRUE(
        node->Charge(Domain::kHost, Resource::kResultBytes, node->limit() - before + 1).ok());
    EXPECT_LT(node->used(), before);
    EXPECT_GT(slices(), 3);
    EXPECT_TRUE(is_back);
    buffers.clear();
    EXPECT_EQ(node->used(), 0);
    left.After([&] { is_back = false; });
    EXPECT_FALSE(is_back) << "there is nothing to wait for";
  }
  // The end does not wait for turns.
  std::vector<BufferRef> buffers;
  ArenaSet::Ptr set = filled(&buffers);
  buffers.clear();
  const WorkSlice slice;
  set.reset();
  EXPECT_GT(node->used(), 0);
}

TEST(ArenaSetTest, SurvivesRandomUse) {
  const auto seed = static_cast<uint64_t>(absl::GetCurrentTimeNanos());
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  const BudgetRef budget = Budget::OfNode(32 * kMiB);
  MemoryThread thread;
  ArenaSetOptions options;
  options.first_arena_bytes = 64 << 10;
  options.helpers.thread = &thread;
  {
    ArenaSet::Ptr sets[2] = {ArenaSet::Create(budget, options), ArenaSet::Create(budget, options)};
    struct Held {
      BufferRef buffer;
      char mark;
    };
    std::vector<Held> held;
    int refused = 0;
    for (int i = 0; i < 6000; ++i) {
      if (held.size() > 60 || (!held.empty() && random() % 2 == 0)) {
        const size_t at = random() % held.size();
        const Held& h = held[at];
        if (h.buffer->bytes() > 0) {
          EXPECT_EQ(h.buffer->host()[0], h.mark);
          EXPECT_EQ(h.buffer->host()[h.buffer->bytes() - 1], h.mark);
        }
        std::swap(held[at], held.back());
        held.pop_back();
        continue;
      }
      const int64_t bytes = static_cast<int64_t>(random() % (uint64_t{1} << (random() % 23)));
      auto buffer = sets[random() % 2]->Allocate(bytes);
      if (!buffer.ok()) {
        EXPECT_EQ(buffer.status().code(), absl::StatusCode::kResourceExhausted);
        ++refused;
        continue;
      }
      const char mark = static_cast<char>(random());
      if (bytes > 0) (*buffer)->host()[0] = (*buffer)->host()[bytes - 1] = mark;
      held.push_back({*std::move(buffer), mark});
      if (random() % 2000 == 0) sets[random() % 2]->Trim();
    }
    EXPECT_GT(refused, 0) << "the budget was never full: the test is too tame";
    sets[0].reset();
    EXPECT_LE(budget->used(), budget->limit());
    held.clear();
  }
  EXPECT_EQ(budget->used(), 0);
}

class FakeDevices : public Devices {
 public:
  const DevicesInfo& info() const override { return info_; }
  absl::StatusOr<int64_t> WorkspaceBytes(const NodeView&,
                                         absl::Span<const TensorType>) const override {
    return 0;
  }
  absl::StatusOr<DeviceAddress> Allocate(int device, int64_t bytes) override {
    if (fail) return MakeError(Reason::kOutOfMemory, "full");
    ++live[device];
    return DeviceAddress{1} << 40 | static_cast<DeviceAddress>(bytes);
  }
  int64_t Free(int device, DeviceAddress) override {
    --live[device];
    return tells_later ? ++last_free : 0;
  }
  int64_t freed() const override { return told; }
  std::unique_ptr<Executor> OpenExecutor(int, Executor::OnEvent, DeviceExecutorOptions) override {
    return nullptr;
  }

  bool fail = false;
  int live[2] = {};
  bool tells_later = false;
  int64_t last_free = 0;
  int64_t told = 0;

 private:
  DevicesInfo info_;
};

TEST(DeviceSetTest, ChargesTheBudgetAndFreesOnTheLastReference) {
  constexpr int64_t kRow = DeviceSet::kBytesPerBuffer;
  const BudgetRef budget = Budget::OfNode(kMiB);
  FakeDevices devices;
  DeviceSet set(&devices, 1);
  BufferRef buffer = *set.Allocate(budget, 1000);
  EXPECT_EQ(buffer->host(), nullptr);
  EXPECT_EQ(buffer->arena(), ArenaId(0));
  EXPECT_NE(buffer->address(), 0u);
  EXPECT_EQ(budget->used(), 1000 + kRow);
  BufferRef empty = *set.Allocate(budget, 0);
  EXPECT_EQ(empty->address(), 0u);
  EXPECT_EQ(devices.live[1], 1);
  EXPECT_EQ(set.Allocate(budget, kMiB).status().code(), absl::StatusCode::kResourceExhausted);
  devices.fail = true;
  EXPECT_EQ(ErrorOf(set.Allocate(budget, 10).status()).message, "full");
  EXPECT_EQ(budget->used(), 1000 + 2 * kRow);

  const ArenaSet::Ptr mirrors = ArenaSet::Create(budget, {64 << 10, int64_t{32} << 20, {}});
  EXPECT_EQ(buffer->mirror(0, 1000), nullptr);
  BufferRef first = *mirrors->Allocate(1000);
  buffer->AddMirror(0, first);
  buffer->AddMirror(0, *mirrors->Allocate(1000));
  buffer->AddMirror(0, *mirrors->Allocate(8));
  buffer->AddMirror(8, *mirrors->Allocate(8));
  EXPECT_EQ(mirrors->live_buffers(), 3);
  EXPECT_EQ(buffer->mirror(0, 1000), first.get()) << "readers may have been told of it";
  EXPECT_NE(buffer->mirror(0, 8), buffer->mirror(8, 8));
  EXPECT_EQ(buffer->mirror(8, 9), nullptr);
  first.reset();
  buffer.reset();
  EXPECT_EQ(mirrors->live_buffers(), 0) << "a mirror goes with its buffer";
  EXPECT_EQ(devices.live[1], 0);
  empty.reset();
  EXPECT_EQ(set.live_buffers(), 0);
  EXPECT_FALSE(set.Settle()) << "nothing is left of them";
}

TEST(DeviceSetTest, ARowIsChargedUntilTheDevicesHaveBeenToldThatItHasGone) {
  constexpr int64_t kRow = DeviceSet::kBytesPerBuffer;
  const BudgetRef budget = Budget::OfNode(kMiB);
  FakeDevices devices;
  devices.tells_later = true;
  {
    DeviceSet set(&devices, 0);
    std::deque<BufferRef> buffers;
    for (int64_t i = 0; i < 5; ++i) buffers.push_back(*set.Allocate(budget, 1 + i));
    const auto drop = [&buffers] { buffers.pop_front(); };
    drop();
    drop();
    EXPECT_EQ(budget->used(), 3 * kRow + 3 + 4 + 5);
    EXPECT_EQ(budget->leaving(), 2 * kRow);
    EXPECT_FALSE(set.Settle());
    // Who asks for what takes the place of these asks again.
    const int64_t free_bytes = kMiB - budget->used() - kRow;
    EXPECT_TRUE(IsForNow(set.Allocate(budget, free_bytes).status()));
    devices.told = 1;
    EXPECT_TRUE(set.Settle());
    EXPECT_EQ(budget->leaving(), kRow);
    // The next one that goes finds those that have been told of.
    devices.told = 2;
    drop();
    EXPECT_EQ(budget->leaving(), kRow);
    devices.told = 3;
    EXPECT_TRUE(set.Settle());
    EXPECT_EQ(budget->leaving(), 0);
    // What is free at once is gone at once.
    devices.tells_later = false;
    EXPECT_TRUE(set.Allocate(budget, free_bytes).ok());
    drop();
    EXPECT_EQ(budget->charged_in_all(), kRow + 5);
    devices.tells_later = true;
    drop();
    EXPECT_EQ(budget->used(), 0);
    EXPECT_EQ(budget->leaving(), kRow);
  }
  EXPECT_EQ(budget->charged_in_all(), 0);
}

}  // namespace
}  // namespace chorus
