#include "core/runtime/memory_thread.h"

#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/runtime/arena.h"
#include "core/runtime/budget.h"
#include "core/runtime/memory.h"
#include "core/runtime/testing/process_resources.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::MappedArenas;

constexpr int64_t kMiB = int64_t{1} << 20;

int64_t ResidentPages(const Arena& arena) {
  std::vector<unsigned char> pages(static_cast<size_t>(arena.bytes() / 4096));
  EXPECT_EQ(mincore(arena.data(), static_cast<size_t>(arena.bytes()), pages.data()), 0);
  return std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return (p & 1) != 0; });
}

// Something whose going is done by the thread, whatever it is.
std::shared_ptr<const void> WhichGoesBy(std::function<void()> going) {
  return {nullptr, [going = std::move(going)](const void*) { going(); }};
}

// What the thread is to dispose of after this waits until it is opened.
class Gate {
 public:
  explicit Gate(MemoryThread* thread) {
    thread->Dispose(
        *Budget::OfNode(1),
        WhichGoesBy([opened = std::make_shared<std::future<void>>(opened_.get_future())] {
          EXPECT_EQ(opened->wait_for(std::chrono::minutes(1)), std::future_status::ready);
        }));
  }
  void Open() { opened_.set_value(); }

 private:
  std::promise<void> opened_;
};

TEST(MemoryThreadTest, NewArenasAreTouchedBehindTheScenes) {
  const BudgetRef budget = Budget::OfNode(64 * kMiB);
  MemoryThread thread;
  ArenaSetOptions options;
  options.helpers.thread = &thread;
  const ArenaSet::Ptr set = ArenaSet::Create(budget, options);
  BufferRef buffer = *set->Allocate(10);
  memcpy(buffer->host(), "meanwhile", 10);
  BufferRef large = *set->Allocate(8 * kMiB);
  thread.Drain();
  EXPECT_EQ(ResidentPages(*set->Find(buffer->arena())), kMiB / 4096);
  EXPECT_EQ(ResidentPages(*set->Find(large->arena())), 8 * kMiB / 4096);
  EXPECT_STREQ(buffer->host(), "meanwhile");
}

TEST(MemoryThreadTest, TheNextArenaIsReadyBeforeItIsNeeded) {
  const BudgetRef budget = Budget::OfNode(64 * kMiB);
  MemoryThread thread;
  ArenaSetOptions options;
  options.helpers.thread = &thread;
  const ArenaSet::Ptr set = ArenaSet::Create(budget, options);
  std::vector<BufferRef> buffers;
  while (set->arena_bytes() <= kMiB) buffers.push_back(*set->Allocate(4096));
  // Its first arena is about half used.
  EXPECT_LT(buffers.size(), 160u);
  thread.Drain();
  const ArenaId first = buffers[0]->arena();
  while (buffers.back()->arena() == first) buffers.push_back(*set->Allocate(4096));
  EXPECT_EQ(set->arena_bytes(), 2 * kMiB) << "no third one was made for it";
  EXPECT_EQ(ResidentPages(*set->Find(buffers.back()->arena())), kMiB / 4096);
}

TEST(MemoryThreadTest, UnmapsWhatIsGivenBack) {
  const int arenas = MappedArenas();
  const BudgetRef budget = Budget::OfNode(64 * kMiB);
  MemoryThread thread;
  ArenaSetOptions options;
  options.helpers.thread = &thread;
  ArenaSet::Ptr set = ArenaSet::Create(budget, options);
  set->Allocate(8 * kMiB).value().reset();
  set.reset();
  EXPECT_EQ(budget->used(), 0);
  thread.Drain();
  EXPECT_EQ(MappedArenas(), arenas);
}

TEST(MemoryThreadTest, WhatIsGivenBackLeavesUntilItIsUnmapped) {
  const BudgetRef budget = Budget::OfNode(64 * kMiB);
  MemoryThread thread;
  budget->Reclaim(&thread, [&](const Budget&) { return thread.Settle(); });
  ArenaSetOptions options;
  options.helpers.thread = &thread;
  const ArenaSet::Ptr set = ArenaSet::Create(budget, options);
  BufferRef buffer = *set->Allocate(48 * kMiB);
  Gate gate(&thread);
  buffer.reset();
  // It cannot be used again for this one.
  const absl::Status refused = set->Allocate(49 * kMiB).status();
  EXPECT_TRUE(IsForNow(refused)) << refused;
  EXPECT_EQ(budget->used(), 0);
  EXPECT_EQ(budget->leaving(), 48 * kMiB);
  EXPECT_TRUE(set->Allocate(8 * kMiB).ok()) << "there is room beside it";
  const std::function<bool()> gone = thread.WhetherGone(*budget);
  EXPECT_FALSE(gone());
  gate.Open();
  thread.Drain();
  EXPECT_TRUE(gone());
  EXPECT_TRUE(set->Allocate(49 * kMiB).ok());
  EXPECT_EQ(budget->leaving(), 0);
  budget->Forget(&thread);
}

// A tenant that gives much back does not keep others from what they have given back themselves.
TEST(MemoryThreadTest, TenantsTakeTurns) {
  const BudgetRef node = Budget::OfNode(64 * kMiB);
  const BudgetRef much = Budget::Within(node, "much", node->limits());
  const BudgetRef little = Budget::Within(node, "little", node->limits());
  const BudgetRef session = Budget::Within(little, "session", node->limits());
  MemoryThread thread;
  std::vector<char> went;  // on the thread, read behind it
  const auto dispose = [&](const BudgetRef& of, char name) {
    thread.Dispose(*of, WhichGoesBy([&went, name] { went.push_back(name); }));
  };
  Gate gate(&thread);
  for (int i = 0; i < 3; ++i) dispose(much, 'm');
  const std::function<bool()> all_gone = thread.WhetherGone(*little);
  dispose(session, 'l');
  dispose(little, 'l');
  gate.Open();
  thread.Drain();
  EXPECT_EQ(std::string(went.begin(), went.end()), "mlmlm");
  EXPECT_TRUE(all_gone()) << "it had nothing there, so it was told of all";
}

TEST(MemoryThreadTest, WhatIsGivenBackGoesBeforeNewMemoryIsTouched) {
  const BudgetRef budget = Budget::OfNode(64 * kMiB);
  MemoryThread thread;
  Gate gate(&thread);
  const auto arena = *Arena::CreateResult(budget, 8 * kMiB);
  int64_t touched = -1;
  thread.Touch(arena->memory());
  thread.Dispose(*budget, WhichGoesBy([&] { touched = ResidentPages(*arena); }));
  EXPECT_EQ(thread.untouched_bytes(), 8 * kMiB);
  gate.Open();
  thread.Drain();
  EXPECT_EQ(thread.untouched_bytes(), 0);
  EXPECT_EQ(touched, 0);
  EXPECT_EQ(ResidentPages(*arena), 8 * kMiB / 4096);
}

TEST(MemoryThreadTest, WhatIsGivenBackGoesBetweenThePartsOfWhatIsTouched) {
  constexpr int64_t kBytes = 64 * kMiB;
  const BudgetRef budget = Budget::OfNode(kBytes);
  MemoryThread thread;
  // This thread may be kept from asking in time; where all is touched in one piece it never is.
  bool went_between = false;
  for (int tries = 0; tries < 20 && !went_between; ++tries) {
    const auto arena = *Arena::CreateResult(budget, kBytes);
    thread.Touch(arena->memory());
    while (ResidentPages(*arena) == 0) {
    }
    thread.Dispose(*budget, WhichGoesBy([&] {
      went_between = ResidentPages(*arena) < arena->bytes() / 4096;
    }));
    thread.Drain();
    EXPECT_EQ(ResidentPages(*arena), arena->bytes() / 4096);
  }
  EXPECT_TRUE(went_between);
}

TEST(MemoryThreadTest, WhatIsGivenBackIsGoneThoughItWasToBeTouched) {
  const int arenas = MappedArenas();
  const BudgetRef budget = Budget::OfNode(64 * kMiB);
  MemoryThread thread;
  Gate gate(&thread);
  ArenaHelpers helpers;
  helpers.thread = &thread;
  auto arena = *Arena::CreateResult(budget, 8 * kMiB, helpers);
  thread.Touch(arena->memory());
  arena.reset();
  int left = -1;
  thread.Dispose(*budget, WhichGoesBy([&] { left = MappedArenas(); }));
  gate.Open();
  thread.Drain();
  EXPECT_EQ(left, arenas);
  EXPECT_EQ(thread.untouched_bytes(), 0) << "there is nothing of it to be touched";
}

}  // namespace
}  // namespace chorus
