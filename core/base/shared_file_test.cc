#include "core/base/shared_file.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <unistd.h>

#include <numeric>
#include <vector>

namespace chorus {
namespace {

TEST(SharedFileTest, IsHeldByWhoeverHasADescriptorOrAMappingOfAnotherOpener) {
  const UniqueFd made(memfd_create("test", MFD_CLOEXEC));
  ASSERT_TRUE(made.valid());
  ASSERT_EQ(ftruncate(made.get(), 4096), 0);
  const UniqueFd own = OpenAgain(made.get(), O_RDWR);
  ASSERT_TRUE(own.valid());
  EXPECT_FALSE(IsHeldByOthers(own.get()));
  void* const mapped = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, own.get(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  EXPECT_FALSE(IsHeldByOthers(own.get())) << "by itself";
  munmap(mapped, 4096);
  for (const int flags : {O_RDONLY, O_RDWR}) {
    UniqueFd client = OpenAgain(made.get(), flags);
    ASSERT_TRUE(client.valid());
    EXPECT_TRUE(IsHeldByOthers(own.get()));
    UniqueFd copy(dup(client.get()));
    client.Reset();
    EXPECT_TRUE(IsHeldByOthers(own.get())) << "by a copy";
    void* const of_client = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, copy.get(), 0);
    ASSERT_NE(of_client, MAP_FAILED);
    copy.Reset();
    EXPECT_TRUE(IsHeldByOthers(own.get())) << "by a mapping";
    munmap(of_client, 4096);
    EXPECT_FALSE(IsHeldByOthers(own.get()));
  }
}

// What a hostile client makes of that: core/runtime/memory_guard.h.
TEST(SharedFileTest, PagesInASocketOrAPipeAreHeldByNobodyAndStayWhenTheFileIsGone) {
  constexpr size_t kBytes = 4 * 4096;
  for (const bool is_pipe : {false, true}) {
    SCOPED_TRACE(is_pipe ? "pipe" : "socket");
    UniqueFd made(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    ASSERT_TRUE(made.valid());
    ASSERT_EQ(ftruncate(made.get(), kBytes), 0);
    UniqueFd own = OpenAgain(made.get(), O_RDWR);
    auto* const mapped = static_cast<unsigned char*>(
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, own.get(), 0));
    ASSERT_NE(mapped, MAP_FAILED);
    std::iota(mapped, mapped + kBytes, 0);
    // As an arena of results.
    ASSERT_TRUE(SealMapped(own.get()));
    UniqueFd client = OpenAgain(made.get(), O_RDONLY);
    int ends[2];
    ASSERT_EQ(
        is_pipe ? pipe2(ends, O_CLOEXEC) : socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends),
        0);
    const UniqueFd from(ends[0]);
    const UniqueFd to(ends[1]);
    const ssize_t put =
        is_pipe ? splice(client.get(), nullptr, to.get(), nullptr, kBytes, SPLICE_F_NONBLOCK)
                : sendfile(to.get(), client.get(), nullptr, kBytes);
    ASSERT_EQ(put, static_cast<ssize_t>(kBytes));
    client.Reset();
    EXPECT_FALSE(IsHeldByOthers(own.get())) << "there is no opener";
    // They are the pages, not copies of them.
    for (size_t page = 0; page < kBytes; page += 4096) mapped[page] = 77;
    munmap(mapped, kBytes);
    own.Reset();
    made.Reset();
    std::vector<unsigned char> read_bytes(kBytes);
    ASSERT_EQ(read(from.get(), read_bytes.data(), kBytes), static_cast<ssize_t>(kBytes));
    for (size_t i = 0; i < kBytes; ++i) {
      ASSERT_EQ(read_bytes[i], i % 4096 == 0 ? 77 : static_cast<unsigned char>(i)) << i;
    }
  }
}

// A caller that does not know that a file is free gives nobody its memory back.
TEST(SharedFileTest, IsHeldWhereTheKernelDoesNotSay) {
  EXPECT_TRUE(KernelGivesLeases());
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  for (const int end : ends) {
    const UniqueFd no_file(end);
    errno = 0;
    EXPECT_TRUE(IsHeldByOthers(no_file.get()));
    EXPECT_NE(errno, EAGAIN);
  }
  EXPECT_TRUE(IsHeldByOthers(-1));
}

TEST(SharedFileTest, WhatIsNotOpenCannotBeOpenedAgain) {
  EXPECT_FALSE(OpenAgain(-1, O_RDWR).valid());
}

}  // namespace
}  // namespace chorus
