#include "server/memory_limit.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/testing/file_tree.h"

namespace chorus::server {
namespace {

using testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;

class MemoryLimitTest : public FileTreeTest {
 protected:
  MemoryLimitTest() {
    Write("/proc/meminfo", "MemFree:  1 kB\nMemTotal:       16384 kB\nSwapTotal: 9 kB\n");
  }
  MemoryLimit Limit(int64_t own_bytes = 0) const { return DefaultMemoryLimit(own_bytes, root_); }
};

TEST_F(MemoryLimitTest, WithoutACgroupItIsOfTheMachinesMemory) {
  EXPECT_EQ(Limit().bytes, 12 * kMiB);
  EXPECT_THAT(Limit().source, HasSubstr("/proc/meminfo"));
  EXPECT_THAT(Limit().source, HasSubstr(absl::StrCat(16 * kMiB, " bytes")));
}

TEST_F(MemoryLimitTest, TheLowestOfItsOwnCgroupAndThoseAboveCounts) {
  Write("/proc/self/cgroup", "0::/jobs/chorusd\n");
  Write("/sys/fs/cgroup/jobs/chorusd/memory.max", "8388608\n");
  EXPECT_EQ(Limit().bytes, 6 * kMiB);
  EXPECT_THAT(Limit().source, HasSubstr("/sys/fs/cgroup/jobs/chorusd/memory.max"));
  Write("/sys/fs/cgroup/jobs/memory.max", "4194304\n");
  EXPECT_EQ(Limit().bytes, 3 * kMiB);
  EXPECT_THAT(Limit().source, HasSubstr("(/sys/fs/cgroup/jobs/memory.max)"));
  // A container's own, whatever path it is told.
  Write("/sys/fs/cgroup/memory.max", "2097152\n");
  EXPECT_EQ(Limit().bytes, 3 * kMiB / 2);
  EXPECT_THAT(Limit().source, HasSubstr("(/sys/fs/cgroup/memory.max)"));
}

TEST_F(MemoryLimitTest, ACgroupWithoutABoundHasNone) {
  Write("/proc/self/cgroup", "0::/\n");
  Write("/sys/fs/cgroup/memory.max", "max\n");
  EXPECT_EQ(Limit().bytes, 12 * kMiB);
  EXPECT_THAT(Limit().source, HasSubstr("/proc/meminfo"));
}

TEST_F(MemoryLimitTest, CgroupsOfVersionOneCountToo) {
  Write("/proc/self/cgroup", "12:pids:/x\n9:cpu,memory:/docker/12ab\n1:name=systemd:/y\n0::/\n");
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(Limit().bytes, 12 * kMiB);
  Write("/sys/fs/cgroup/memory/docker/12ab/memory.limit_in_bytes", "4194304\n");
  EXPECT_EQ(Limit().bytes, 3 * kMiB);
  // What other controllers have is no memory.
  Write("/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "1048576\n");
  EXPECT_EQ(Limit().bytes, 3 * kMiB);
}

// A container of 512 MiB: with three quarters for clients the daemon could be killed.
TEST_F(MemoryLimitTest, WhatTheDaemonMayTakeBesideIsLeft) {
  Write("/proc/self/cgroup", "0::/\n");
  Write("/sys/fs/cgroup/memory.max", absl::StrCat(512 * kMiB, "\n"));
  Write("/proc/meminfo", "MemTotal: 16777216 kB\n");
  EXPECT_EQ(Limit(256 * kMiB).bytes, 256 * kMiB);
  EXPECT_THAT(Limit(256 * kMiB).source, HasSubstr(absl::StrCat("less ", 256 * kMiB)));
  EXPECT_EQ(Limit(256 * kMiB).warning, "");
  EXPECT_EQ(Limit(128 * kMiB).bytes, 384 * kMiB);
  EXPECT_THAT(Limit(128 * kMiB).source, HasSubstr("three quarters"));
  EXPECT_EQ(Limit(100 * kMiB).bytes, 384 * kMiB);
}

TEST_F(MemoryLimitTest, WhereTooLittleIsLeftThereIsAWarning) {
  Write("/proc/meminfo", absl::StrCat("MemTotal: ", 320 * 1024, " kB\n"));
  EXPECT_EQ(Limit(240 * kMiB).bytes, 80 * kMiB);
  EXPECT_EQ(Limit(240 * kMiB).warning, "");
  for (const int64_t own : {241 * kMiB, 320 * kMiB, 1024 * kMiB}) {
    EXPECT_EQ(Limit(own).bytes, 80 * kMiB);
    EXPECT_THAT(Limit(own).warning, HasSubstr(absl::StrCat("take ", own, " beside")));
    EXPECT_THAT(Limit(own).warning, HasSubstr(absl::StrCat("at least ", own + own / 3)));
  }
}

TEST_F(MemoryLimitTest, WhatCannotBeReadBoundsNothing) {
  Write("/proc/meminfo", "");
  EXPECT_EQ(Limit().bytes, int64_t{8} << 30);
  EXPECT_THAT(Limit().source, HasSubstr("neither"));
  Write("/proc/self/cgroup", "junk\n0::\n");
  Write("/sys/fs/cgroup/memory.max", "junk");
  EXPECT_EQ(Limit().bytes, int64_t{8} << 30);
  Write("/sys/fs/cgroup/memory.max", "4194304");
  EXPECT_EQ(Limit().bytes, 3 * kMiB);
}

}  // namespace
}  // namespace chorus::server
