#include "core/runtime/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "core/base/error.h"
#include "core/runtime/size_class.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// What must fail on a descriptor, and how.
bool CanMapForWriting(int fd, int64_t bytes) {
  void* const data =
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return false;
  munmap(data, static_cast<size_t>(bytes));
  return true;
}
bool CanWrite(int fd) { return pwrite(fd, "x", 1, 0) == 1; }
bool CanResize(int fd, int64_t bytes) { return ftruncate(fd, bytes) == 0; }
bool CanPunch(int fd) {
  return fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == 0;
}
bool CanAddSeal(int fd) { return fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0; }
// A reader's mapping must not become a writer's.
bool CanUpgradeMapping(int fd, int64_t bytes) {
  void* const data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return false;
  const bool can = mprotect(data, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE) == 0;
  munmap(data, static_cast<size_t>(bytes));
  return can;
}
// By another name of the file, with another mode.
bool CanReopenForWriting(int fd, int64_t bytes) {
  const int again = open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDWR);
  if (again < 0) return false;
  const bool can = CanWrite(again) || CanMapForWriting(again, bytes);
  close(again);
  return can;
}

// Runs `body` in another process; true when it returned true there.
template <typename F>
bool InAnotherProcess(const F& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    _exit(body() ? 0 : 1);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int OpenDescriptors() {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) count += fcntl(fd, F_GETFD) >= 0;
  return count;
}

int MappedArenas() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += absl::StrContains(line, "memfd:chorus");
  }
  return count;
}

// --- Arenas ---

TEST(ArenaIdsTest, AreUsedAgainWhenAllHaveBeen) {
  ArenaIds ids(4);
  EXPECT_EQ(ids.Take(), ArenaId(1));
  EXPECT_EQ(ids.Take(), ArenaId(2));
  ids.Free(ArenaId(2));
  EXPECT_EQ(ids.Take(), ArenaId(3)) << "not at once: a late message may mean the former one";
  EXPECT_EQ(ids.Take(), ArenaId(4));
  EXPECT_EQ(ids.Take(), ArenaId(2)) << "1 is in use";
}

TEST(ArenaTest, ResultArenaCannotBeWrittenResizedOrResealedByItsDescriptor) {
  const BudgetRef budget = Budget::OfNode(kMiB);
  auto arena = Arena::CreateResult(budget, 8192);
  ASSERT_TRUE(arena.ok()) << arena.status();
  const int fd = *(*arena)->ClientFd();
  memcpy((*arena)->data(), "result", 7);
  EXPECT_TRUE(InAnotherProcess([&] {
    return !CanMapForWriting(fd, 8192) && !CanUpgradeMapping(fd, 8192) && !CanWrite(fd) &&
           !CanResize(fd, 4096) && !CanResize(fd, 16384) && !CanPunch(fd) && !CanAddSeal(fd) &&
           !CanReopenForWriting(fd, 8192);
  }));
  EXPECT_STREQ((*arena)->data(), "result");
}

TEST(ArenaTest, AnotherProcessSeesResultsThroughItsReadOnlyMapping) {
  const BudgetRef budget = Budget::OfNode(kMiB);
  auto arena = Arena::CreateResult(budget, 4096);
  ASSERT_TRUE(arena.ok()) << arena.status();
  int ready[2];
  int written[2];
  ASSERT_EQ(pipe(ready), 0);
  ASSERT_EQ(pipe(written), 0);
  const int fd = *(*arena)->ClientFd();
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    const auto* const data =
        static_cast<const char*>(mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0));
    char byte = data == MAP_FAILED ? 'n' : 'y';
    bool good = write(ready[1], &byte, 1) == 1;
    good = good && read(written[0], &byte, 1) == 1;
    _exit(good && memcmp(data, "written later", 14) == 0 ? 0 : 1);
  }
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  EXPECT_EQ(byte, 'y');
  memcpy((*arena)->data(), "written later", 14);  // after the child has mapped it
  ASSERT_EQ(write(written[1], &byte, 1), 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  for (const int end : {ready[0], ready[1], written[0], written[1]}) close(end);
}

TEST(ArenaTest, StagingArenaIsWritableByWhoMappedItBeforeItWasConfirmed) {
  const BudgetRef budget = Budget::OfNode(kMiB);
  auto arena = Arena::CreateStaging(budget, 8192);
  ASSERT_TRUE(arena.ok()) << arena.status();
  const int fd = *(*arena)->ClientFd();
  EXPECT_FALSE(CanResize(fd, 4096));
  EXPECT_FALSE(CanResize(fd, 16384));
  auto* const client =
      static_cast<char*>(mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  ASSERT_NE(client, MAP_FAILED);
  ASSERT_TRUE((*arena)->ConfirmMapped().ok());
  EXPECT_TRUE((*arena)->ConfirmMapped().ok()) << "a second time";
  memcpy(client + 4096, "still writable", 15);
  EXPECT_STREQ((*arena)->data() + 4096, "still writable");
  EXPECT_FALSE(CanMapForWriting(fd, 8192));
  EXPECT_FALSE(CanUpgradeMapping(fd, 8192));
  EXPECT_FALSE(CanWrite(fd));
  EXPECT_FALSE(CanPunch(fd));
  EXPECT_FALSE(CanAddSeal(fd));
  EXPECT_FALSE(CanReopenForWriting(fd, 8192));
  munmap(client, 8192);
}

// Whoever has them, and however: by a descriptor, by one made of it, by a mapping alone.
TEST(ArenaTest, PagesThatClientsHoldStayChargedUntilNobodyDoes) {
  const int descriptors = OpenDescriptors();
  const BudgetRef budget = Budget::OfNode(kMiB);
  int added = 0;
  HeldArenas held([&added] { ++added; });
  const auto drop = [&](bool staging) {
    ArenaHelpers helpers;
    helpers.held = &held;
    auto arena = staging ? Arena::CreateStaging(budget, 8192, helpers)
                         : Arena::CreateResult(budget, 8192, helpers);
    EXPECT_TRUE(arena.ok()) << arena.status();
    return dup(*(*arena)->ClientFd());
  };
  for (const bool staging : {false, true}) {
    SCOPED_TRACE(staging ? "staging" : "result");
    added = 0;
    int fd = drop(staging);
    EXPECT_EQ(added, 1);
    EXPECT_EQ(budget->used(), 8192);
    held.Look(10);
    EXPECT_EQ(held.size(), 1u);
    EXPECT_EQ(held.bytes(), 8192);
    void* const mapping = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0);
    ASSERT_NE(mapping, MAP_FAILED);
    close(fd);
    held.Look(10);
    EXPECT_EQ(budget->used(), 8192) << "it is mapped";
    munmap(mapping, 4096);
    EXPECT_EQ(budget->used(), 8192) << "nobody has looked";
    held.Look(10);
    EXPECT_EQ(held.size(), 0u);
    EXPECT_EQ(held.bytes(), 0);
    EXPECT_EQ(budget->used(), 0);
    EXPECT_EQ(budget->held(Resource::kDescriptors), 0);
    // Of those that nobody holds only the budget is left.
    fd = drop(staging);
    const int other = drop(staging);
    close(fd);
    held.Look(1);
    EXPECT_EQ(budget->used(), 8192);
    close(other);
    held.Look(1);
    EXPECT_EQ(held.size(), 0u);
  }
  EXPECT_EQ(OpenDescriptors(), descriptors);
}

TEST(ArenaTest, AnArenaThatNobodyHoldsGoesAtOnce) {
  const BudgetRef budget = Budget::OfNode(kMiB);
  HeldArenas held;
  ArenaHelpers helpers;
  helpers.held = &held;
  auto arena = Arena::CreateResult(budget, 8192, helpers);
  ASSERT_TRUE(arena.ok()) << arena.status();
  ASSERT_TRUE((*arena)->ClientFd().ok());
  arena->reset();
  EXPECT_EQ(held.size(), 0u);
  EXPECT_EQ(budget->used(), 0);
}

TEST(ArenaTest, DaemonCannotWriteToStagingByMistake) {
  const BudgetRef budget = Budget::OfNode(kMiB);
  auto arena = Arena::CreateStaging(budget, 4096);
  ASSERT_TRUE(arena.ok()) << arena.status();
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGSEGV, SIG_DFL);
    (*arena)->data()[0] = 'x';
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_FALSE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(ArenaTest, StagingArenaSealedByItsClientIsRefused) {
  const BudgetRef budget = Budget::OfNode(kMiB);
  auto arena = Arena::CreateStaging(budget, 4096);
  ASSERT_TRUE(arena.ok()) << arena.status();
  ASSERT_EQ(fcntl(*(*arena)->ClientFd(), F_ADD_SEALS, F_SEAL_SEAL), 0);
  EXPECT_EQ((*arena)->ConfirmMapped().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ArenaTest, NonsenseSizesAndFullBudgetsLeaveNothingBehind) {
  const int descriptors = OpenDescriptors();
  const BudgetRef budget = Budget::OfNode(kMiB);
  for (const int64_t bytes : {int64_t{0}, int64_t{-1}, INT64_MIN, INT64_MAX}) {
    EXPECT_EQ(Arena::CreateStaging(budget, bytes).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(Arena::CreateResult(budget, kMiB + 1).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(budget->used(), 0);
  EXPECT_EQ(OpenDescriptors(), descriptors);
  {
    auto arena = Arena::CreateResult(budget, kMiB - 1);
    ASSERT_TRUE(arena.ok());
    EXPECT_EQ((*arena)->bytes(), kMiB);
    EXPECT_EQ(budget->used(), kMiB);
  }
  EXPECT_EQ(budget->used(), 0);
  EXPECT_EQ(OpenDescriptors(), descriptors);
}

// --- Staging buffers ---

TEST(BufferTest, StagingRangesAreCheckedAndKeepTheirArena) {
  const BudgetRef budget = Budget::OfNode(kMiB);
  auto created = Arena::CreateStaging(budget, 4096);
  ASSERT_TRUE(created.ok());
  std::shared_ptr<Arena> arena = *std::move(created);
  for (const auto& [offset, bytes] : std::vector<std::pair<int64_t, int64_t>>{
           {-1, 1}, {0, -1}, {0, 4097}, {4096, 1}, {INT64_MAX, 1}, {1, INT64_MAX}, {4097, 0}}) {
    const auto buffer = Buffer::OfStaging(arena, offset, bytes);
    EXPECT_EQ(buffer.status().code(), absl::StatusCode::kInvalidArgument) << offset << " " << bytes;
  }
  EXPECT_TRUE(Buffer::OfStaging(arena, 4096, 0).ok());
  auto buffer = Buffer::OfStaging(arena, 64, 128);
  ASSERT_TRUE(buffer.ok());
  EXPECT_EQ((*buffer)->host(), arena->data() + 64);
  EXPECT_EQ((*buffer)->arena(), arena->id());
  EXPECT_EQ((*buffer)->offset(), 64);
  EXPECT_EQ((*buffer)->state(), Buffer::State::kStaging);
  arena.reset();
  EXPECT_EQ(budget->used(), 4096) << "the buffer keeps it";
  buffer->reset();
  EXPECT_EQ(budget->used(), 0);
  auto result = Arena::CreateResult(budget, 4096);
  ASSERT_TRUE(result.ok());
  EXPECT_FALSE(Buffer::OfStaging(*result, 0, 1).ok());
}

// --- Sets ---

TEST(SizeClassTest, EveryClassHoldsWhatItIsForAndWastesLittle) {
  int last = -1;
  int64_t last_bytes = 0;
  for (int64_t bytes = 0; bytes < 70000; ++bytes) {
    const SizeClass c = SizeClass::Of(bytes);
    ASSERT_GE(c.bytes, bytes);
    ASSERT_EQ(c.bytes % 64, 0);
    if (bytes > 512) {
      ASSERT_LE(c.bytes * 8, bytes * 9 + 8);
    }
    if (c.index == last) {
      ASSERT_EQ(c.bytes, last_bytes);
    } else {
      ASSERT_EQ(c.index, last + 1);
      ASSERT_GT(c.bytes, last_bytes);
    }
    last = c.index;
    last_bytes = c.bytes;
  }
  for (int power = 6; power <= 40; ++power) {
    EXPECT_EQ(SizeClass::Of(int64_t{1} << power).bytes, int64_t{1} << power);
  }
  EXPECT_LT(SizeClass::Of(SizeClass::kLargestBytes).index, SizeClass::kCount);
}

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

// --- The thread ---

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

// --- Device memory ---

class FakeDevice : public Device {
 public:
  absl::StatusOr<DeviceAddress> Allocate(int64_t bytes) override {
    if (fail) return MakeError(Reason::kOutOfMemory, "full");
    ++live;
    return DeviceAddress{1} << 40 | static_cast<DeviceAddress>(bytes);
  }
  void Free(DeviceAddress) override { --live; }
  std::unique_ptr<Stream> CreateStream() override { return nullptr; }
  std::unique_ptr<Event> CreateEvent() override { return nullptr; }
  absl::StatusOr<std::unique_ptr<Kernel>> MakeKernel(const NodeView&,
                                                     absl::Span<const TensorType>) override {
    return absl::UnimplementedError("no kernels");
  }

  bool fail = false;
  int live = 0;
};

TEST(DeviceSetTest, ChargesTheBudgetAndFreesOnTheLastReference) {
  const BudgetRef budget = Budget::OfNode(kMiB);
  FakeDevice device;
  DeviceSet set(&device);
  BufferRef buffer = *set.Allocate(budget, 1000);
  EXPECT_EQ(buffer->host(), nullptr);
  EXPECT_EQ(buffer->arena(), ArenaId(0));
  EXPECT_NE(buffer->address(), 0u);
  EXPECT_EQ(budget->used(), 1000);
  BufferRef empty = *set.Allocate(budget, 0);
  EXPECT_EQ(empty->address(), 0u);
  EXPECT_EQ(device.live, 1);
  EXPECT_EQ(set.Allocate(budget, kMiB).status().code(), absl::StatusCode::kResourceExhausted);
  device.fail = true;
  EXPECT_EQ(ErrorOf(set.Allocate(budget, 10).status()).message, "full");
  EXPECT_EQ(budget->used(), 1000);

  const ArenaSet::Ptr mirrors = ArenaSet::Create(budget, {64 << 10, int64_t{32} << 20, {}});
  buffer->set_mirror(*mirrors->Allocate(1000));
  EXPECT_EQ(mirrors->live_buffers(), 1);
  buffer.reset();
  EXPECT_EQ(mirrors->live_buffers(), 0) << "a mirror goes with its buffer";
  EXPECT_EQ(device.live, 0);
  empty.reset();
  EXPECT_EQ(set.live_buffers(), 0);
}

}  // namespace
}  // namespace chorus
