#include "core/transport/session_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/transport/doorbell.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using ::testing::HasSubstr;

SessionMemoryOptions Options(uint32_t ring_bytes, uint32_t tensor_slots) {
  SessionMemoryOptions options;
  options.ring_bytes = ring_bytes;
  options.tensor_slots = tensor_slots;
  return options;
}

// What is written through one mapping is read through the other.
TEST(SessionMemoryTest, BothSidesSeeTheSameLayout) {
  auto daemon = CreateSessionMemory(Options(8192, 100));
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  auto client = MapSessionMemory((*daemon)->fd());
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_EQ((*client)->ring_bytes(), 8192u);
  EXPECT_EQ((*client)->tensor_slots(), 100u);
  (*client)->control().client.tail.store(24);
  (*daemon)->control().daemon.head.store(16);
  (*client)->ring()[8191] = 'x';
  (*daemon)->runs()[kRunSlots - 1].sequence.store(77);
  (*daemon)->tensors()[99].word.store(88);
  EXPECT_EQ((*daemon)->control().client.tail.load(), 24u);
  EXPECT_EQ((*client)->control().daemon.head.load(), 16u);
  EXPECT_EQ((*daemon)->ring()[8191], 'x');
  EXPECT_EQ((*client)->runs()[kRunSlots - 1].sequence.load(), 77);
  EXPECT_EQ((*client)->tensors()[99].word.load(), 88u);
  EXPECT_EQ((*client)->tensors()[0].word.load(), 0u);
}

TEST(SessionMemoryTest, WhatNobodyTouchesCostsNothing) {
  auto memory = CreateSessionMemory({});
  ASSERT_TRUE(memory.ok()) << memory.status();
  auto client = MapSessionMemory((*memory)->fd());
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_GT((*memory)->total_bytes(), size_t{2} << 20);
  struct stat file;
  ASSERT_EQ(fstat((*memory)->fd(), &file), 0);
  EXPECT_LE(file.st_blocks * 512, 4096);
}

TEST(SessionMemoryTest, TheSizeIsSealed) {
  auto memory = CreateSessionMemory({});
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_NE(ftruncate((*memory)->fd(), 4096), 0);
  EXPECT_NE(ftruncate((*memory)->fd(), 64 << 20), 0);
  EXPECT_NE(fcntl((*memory)->fd(), F_ADD_SEALS, F_SEAL_WRITE), 0);
}

TEST(SessionMemoryTest, SizesOutOfBoundsAreRefused) {
  for (const SessionMemoryOptions& options :
       {Options(0, 1), Options(2048, 1), Options(5000, 1), Options(1u << 31, 1), Options(4096, 0),
        Options(4096, SessionMemoryOptions::kMaxTensorSlots + 1)}) {
    EXPECT_EQ(CreateSessionMemory(options).status().code(), absl::StatusCode::kInvalidArgument)
        << options.ring_bytes << " " << options.tensor_slots;
  }
}

TEST(SessionMemoryTest, AnotherVersionIsRefusedWithBothVersions) {
  auto memory = CreateSessionMemory({});
  ASSERT_TRUE(memory.ok()) << memory.status();
  (*memory)->control().header.version = 99;
  const absl::Status status = MapSessionMemory((*memory)->fd()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(ErrorOf(status).reason, Reason::kVersion);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(absl::StrCat("this client speaks layout version ", kSessionMemoryVersion)));
  EXPECT_THAT(std::string(status.message()), HasSubstr("the daemon version 99"));
}

TEST(SessionMemoryTest, AHeaderThatDoesNotFitTheFileIsRefused) {
  using Change = void (*)(SessionHeader*);
  for (Change change : {Change([](SessionHeader* h) { h->magic ^= 1; }),
                        Change([](SessionHeader* h) { h->ring_bytes *= 2; }),
                        Change([](SessionHeader* h) { h->ring_bytes = 0; }),
                        Change([](SessionHeader* h) { h->tensor_slots += 1024; }),
                        Change([](SessionHeader* h) { h->tensor_slots = 0xffffffff; }),
                        Change([](SessionHeader* h) { h->run_slots = 1; }),
                        Change([](SessionHeader* h) { h->total_bytes = 0; })}) {
    auto memory = CreateSessionMemory({});
    ASSERT_TRUE(memory.ok()) << memory.status();
    change(&(*memory)->control().header);
    const absl::Status status = MapSessionMemory((*memory)->fd()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  }
}

TEST(SessionMemoryTest, OtherDescriptorsAreRefused) {
  EXPECT_EQ(MapSessionMemory(-1).status().code(), absl::StatusCode::kInvalidArgument);
  UniqueFd small(memfd_create("small", MFD_CLOEXEC));
  EXPECT_EQ(MapSessionMemory(small.get()).status().code(), absl::StatusCode::kInvalidArgument);
  // Right in size, but it may shrink: reading it could kill the process.
  ASSERT_EQ(ftruncate(small.get(), 1 << 20), 0);
  const absl::Status status = MapSessionMemory(small.get()).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("sealed"));
}

// How many mappings of files with this name the process has.
int CountMappings(const std::string& name) {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:" + name) != std::string::npos;
  }
  return count;
}

TEST(SessionMemoryTest, AForkedChildHasNoMapping) {
  auto daemon = CreateSessionMemory({});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  auto client = MapSessionMemory((*daemon)->fd());
  ASSERT_TRUE(client.ok()) << client.status();
  auto doorbell = Doorbell::Create();
  ASSERT_TRUE(doorbell.ok()) << doorbell.status();
  auto view = DoorbellView::Map((*doorbell)->fd());
  ASSERT_TRUE(view.ok()) << view.status();
  ASSERT_EQ(CountMappings("chorus-session"), 2);
  ASSERT_EQ(CountMappings("chorus-doorbell"), 2);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // The daemon's own page is no secret: clients can read it.
    _exit(CountMappings("chorus-session") * 10 + (CountMappings("chorus-doorbell") > 1));
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(DoorbellTest, ClientsCanReadItAndNothingElse) {
  auto doorbell = Doorbell::Create();
  ASSERT_TRUE(doorbell.ok()) << doorbell.status();
  auto view = DoorbellView::Map((*doorbell)->fd());
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_FALSE((*view)->daemon_asleep());
  bool looked = false;
  const auto work = [&] { return looked = true; };
  EXPECT_FALSE((*doorbell)->SleepUnless(work, [] { ADD_FAILURE() << "there was work"; }));
  EXPECT_TRUE(looked);
  EXPECT_FALSE((*view)->daemon_asleep());
  bool seen_asleep = false;
  EXPECT_TRUE((*doorbell)->SleepUnless([] { return false; },
                                       [&] { seen_asleep = (*view)->daemon_asleep(); }));
  EXPECT_TRUE(seen_asleep);
  EXPECT_FALSE((*view)->daemon_asleep());
  // No writable mapping, by no way.
  EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, (*doorbell)->fd(), 0),
            MAP_FAILED);
  void* readable = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, (*doorbell)->fd(), 0);
  ASSERT_NE(readable, MAP_FAILED);
  EXPECT_NE(mprotect(readable, 4096, PROT_READ | PROT_WRITE), 0);
  munmap(readable, 4096);
  const char byte = 0;
  EXPECT_LT(pwrite((*doorbell)->fd(), &byte, 1, 0), 0);
  EXPECT_NE(ftruncate((*doorbell)->fd(), 0), 0);
}

TEST(DoorbellTest, OtherDescriptorsAreRefused) {
  UniqueFd other(memfd_create("other", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(DoorbellView::Map(other.get()).status().code(), absl::StatusCode::kInvalidArgument);
  ASSERT_EQ(ftruncate(other.get(), 4096), 0);
  EXPECT_EQ(DoorbellView::Map(other.get()).status().code(), absl::StatusCode::kInvalidArgument);
  DoorbellPage page{};
  page.magic = kDoorbellMagic;
  page.version = 7;
  ASSERT_EQ(pwrite(other.get(), &page, sizeof(page), 0), static_cast<ssize_t>(sizeof(page)));
  ASSERT_EQ(fcntl(other.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  const absl::Status status = DoorbellView::Map(other.get()).status();
  EXPECT_EQ(ErrorOf(status).reason, Reason::kVersion);
  EXPECT_THAT(std::string(status.message()), HasSubstr("the daemon version 7"));
}

}  // namespace
}  // namespace chorus
