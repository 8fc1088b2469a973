#include "core/base/shared_file.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

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
