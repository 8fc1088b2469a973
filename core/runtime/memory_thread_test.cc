#include "core/runtime/memory_thread.h"

#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <vector>

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

}  // namespace
}  // namespace chorus
