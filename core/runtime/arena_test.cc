#include "core/runtime/arena.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/shared_file.h"
#include "core/base/unique_fd.h"
#include "core/base/work.h"
#include "core/runtime/held_files.h"
#include "core/runtime/memory.h"
#include "core/runtime/testing/process_resources.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::MappedArenas;
using testing::OpenDescriptors;

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
  EXPECT_TRUE((*arena)->may_change()) << "a hole can be punched into it";
  EXPECT_FALSE((*arena)->ConfirmMapped().ok()) << "it is not sealed";
  ASSERT_TRUE(SealMapped(fd));
  ASSERT_TRUE((*arena)->ConfirmMapped().ok());
  EXPECT_TRUE((*arena)->ConfirmMapped().ok()) << "a second time";
  EXPECT_FALSE((*arena)->may_change());
  EXPECT_NE(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), 0);
  EXPECT_NE(madvise(client, 4096, MADV_REMOVE), 0);
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

// Whatever process has them, and however: by a descriptor, by one made of it, by a mapping alone.
TEST(ArenaTest, PagesThatClientsHoldStayChargedUntilNobodyDoes) {
  const int descriptors = OpenDescriptors();
  const BudgetRef budget = Budget::OfNode(kMiB);
  int added = 0;
  HeldFiles held(nullptr, [&added] { ++added; });
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

// Clients may hold thousands. A session that has too little memory does not look at all of them.
TEST(ArenaTest, AFullBudgetLooksAtSomeOfThoseThatAreHeldInTurns) {
  constexpr int kHeld = 200;
  const BudgetRef node = Budget::OfNode(2 * kMiB);
  const BudgetRef tenants[] = {Budget::Within(node, "tenant a", node->limits()),
                               Budget::Within(node, "tenant b", node->limits())};
  HeldFiles held;
  ArenaHelpers helpers;
  helpers.held = &held;
  node->Reclaim(&held, [&held](const Budget& full) { return held.LookWithin(full); });
  std::vector<UniqueFd> clients;
  for (int i = 0; i <= kHeld; ++i) {
    // The last one is another tenant's.
    const auto arena = Arena::CreateResult(tenants[i < kHeld ? 0 : 1], 4096, helpers);
    ASSERT_TRUE(arena.ok()) << arena.status();
    clients.emplace_back(dup(*(*arena)->ClientFd()));
  }
  ASSERT_EQ(held.size(), static_cast<size_t>(kHeld) + 1);
  const auto look = [&](const Budget& full) {
    const WorkSlice slice;
    const bool any = held.LookWithin(full);
    EXPECT_LE(SliceWork(), kTurnWork);
    return any;
  };
  EXPECT_FALSE(look(*tenants[0])) << "they are all held";
  // Wherever it stands, it is found in time.
  clients[kHeld / 2].Reset();
  int looks = 1;
  while (!look(*tenants[0])) ASSERT_LE(++looks, 14);
  EXPECT_EQ(tenants[0]->used(), (kHeld - 1) * 4096);
  EXPECT_FALSE(look(*tenants[1]));
  clients.back().Reset();
  EXPECT_TRUE(look(*tenants[1])) << "it does not wait for others'";
  EXPECT_EQ(tenants[1]->used(), 0);
  // A caller that asks again gets what there is.
  for (int i = 0; i < 100; ++i) clients[static_cast<size_t>(i)].Reset();
  const int64_t free = 2 * kMiB - node->used();
  int asked = 0;
  while (!node->Charge(Domain::kHost, Resource::kResultBytes, free + 100 * 4096).ok()) {
    ASSERT_LE(++asked, 14);
  }
}

// Unmapping it would wait for a client that takes pages out.
TEST(ArenaTest, StagingThatWasNeverConfirmedStaysMappedWhileAClientHasIt) {
  const BudgetRef budget = Budget::OfNode(kMiB);
  HeldFiles held;
  ArenaHelpers helpers;
  helpers.held = &held;
  for (const bool confirmed : {false, true}) {
    const int before = MappedArenas();
    auto arena = Arena::CreateStaging(budget, 8192, helpers);
    ASSERT_TRUE(arena.ok()) << arena.status();
    UniqueFd client(dup(*(*arena)->ClientFd()));
    if (confirmed) {
      ASSERT_TRUE(SealMapped(client.get()));
      ASSERT_TRUE((*arena)->ConfirmMapped().ok());
    }
    arena->reset();
    held.Look(1);
    EXPECT_EQ(MappedArenas(), confirmed ? before : before + 2);
    client.Reset();
    held.Look(1);
    EXPECT_EQ(MappedArenas(), before);
    EXPECT_EQ(budget->used(), 0);
  }
}

TEST(ArenaTest, AnArenaThatNobodyHoldsGoesAtOnce) {
  const BudgetRef budget = Budget::OfNode(kMiB);
  HeldFiles held;
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

}  // namespace
}  // namespace chorus
