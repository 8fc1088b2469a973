#include "server/cgroups.h"

#include <unistd.h>

#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/testing/file_tree.h"

namespace chorus::server {
namespace {

using testing::HasSubstr;

constexpr pid_t kPid = 41;

class CgroupsTest : public FileTreeTest {
 protected:
  // One of version 2 that this process is alone in.
  void WriteOwn(const std::string& folder = "/sys/fs/cgroup/jobs/chorusd") {
    Write("/proc/self/cgroup", "0::/jobs/chorusd\n");
    Write(folder + "/cgroup.procs", "41\n");
    Write(folder + "/memory.current", "1000000\n");
    Write(folder + "/memory.stat",
          "anon 700000\nfile 290000\nshmem 90000\nactive_file 30000\ninactive_file 170000\n"
          "slab_reclaimable 5000\nslab_unreclaimable 7000\n");
  }
  // Of a process that this one has started, or another one has.
  void WriteProcess(pid_t pid, pid_t parent) {
    Write(absl::StrCat("/proc/", pid, "/stat"),
          absl::StrCat(pid, " (a name) with) (more) S ", parent, " 1 1 0\n"));
  }
  absl::optional<ProcessCgroup> Find() const { return ProcessCgroup::Find(root_, kPid); }
};

TEST_F(CgroupsTest, TellsWhatItHasAndWhatOfItTheKernelDoesNotTakeBack) {
  WriteOwn();
  const auto own = Find();
  ASSERT_TRUE(own.has_value());
  EXPECT_EQ(own->folder(), "/sys/fs/cgroup/jobs/chorusd");
  EXPECT_EQ(own->Others(), "");
  EXPECT_EQ(own->UsageBytes(), 1000000);
  EXPECT_EQ(own->FixedBytes(), 1000000 - 30000 - 170000 - 5000) << "memfds' pages stay";
}

TEST_F(CgroupsTest, AContainerSeesItsOwnAtTheMount) {
  WriteOwn("/sys/fs/cgroup");
  const auto own = Find();
  ASSERT_TRUE(own.has_value());
  EXPECT_EQ(own->folder(), "/sys/fs/cgroup");
  EXPECT_EQ(own->UsageBytes(), 1000000);
}

TEST_F(CgroupsTest, WhoeverIsNoChildOfTheProcessIsSomebodyElse) {
  WriteOwn();
  const auto own = Find();
  ASSERT_TRUE(own.has_value());
  const std::string procs = "/sys/fs/cgroup/jobs/chorusd/cgroup.procs";
  Write(procs, "41\n42\n43\n");
  WriteProcess(42, kPid);
  EXPECT_EQ(own->Others(), "") << "a worker, and one that has ended meanwhile";
  WriteProcess(43, 1);
  EXPECT_EQ(own->Others(), "process 43");
  Write(procs, "0\n41\n");
  EXPECT_EQ(own->Others(), "process 0") << "one that this namespace has no number for";
  std::string many = "41\n";
  for (int pid = 100; pid < 200; ++pid) absl::StrAppend(&many, pid, "\n");
  Write(procs, many);
  EXPECT_EQ(own->Others(), "101 processes");
  Write(procs, "42\n");
  EXPECT_EQ(own->Others(), "others than this process") << "it has been moved elsewhere";
}

TEST_F(CgroupsTest, ACgroupBelowIsSomebodyElse) {
  WriteOwn();
  const auto own = Find();
  ASSERT_TRUE(own.has_value());
  Write("/sys/fs/cgroup/jobs/chorusd/trainers/cgroup.procs", "");
  EXPECT_THAT(own->Others(), HasSubstr("trainers"));
}

TEST_F(CgroupsTest, Version1HasOtherNamesAndThatOfTheMachineIsNone) {
  const std::string folder = "/sys/fs/cgroup/memory/jobs";
  Write("/proc/self/cgroup", "4:cpu:/x\n3:memory:/jobs\n0::/\n");
  Write(folder + "/cgroup.procs", "41\n");
  Write(folder + "/memory.usage_in_bytes", "5000\n");
  EXPECT_FALSE(Find().has_value()) << "it does not say what is a file's";
  Write(folder + "/memory.stat", "cache 900\nrss 4000\ninactive_file 300\nactive_file 200\n");
  const auto own = Find();
  ASSERT_TRUE(own.has_value());
  EXPECT_EQ(own->Others(), "");
  EXPECT_EQ(own->UsageBytes(), 5000);
  EXPECT_EQ(own->FixedBytes(), 4500);
  Write("/proc/self/cgroup", "3:memory:/\n");
  for (const char* name : {"cgroup.procs", "memory.usage_in_bytes", "memory.stat"}) {
    std::filesystem::copy(absl::StrCat(root_, folder, "/", name),
                          absl::StrCat(root_, "/sys/fs/cgroup/memory/", name));
  }
  EXPECT_FALSE(Find().has_value());
}

TEST_F(CgroupsTest, WhatCannotBeReadIsNone) {
  EXPECT_FALSE(Find().has_value());
  Write("/proc/self/cgroup", "junk\n0::\n");
  EXPECT_FALSE(Find().has_value());
  WriteOwn();
  const std::string folder = "/sys/fs/cgroup/jobs/chorusd";
  const auto own = Find();
  ASSERT_TRUE(own.has_value());
  for (const char* text : {"", "max\n", "junk", "-5\n", "99999999999999999999\n"}) {
    Write(folder + "/memory.current", text);
    EXPECT_FALSE(own->UsageBytes().has_value()) << text;
    EXPECT_FALSE(own->FixedBytes().has_value()) << text;
  }
  WriteOwn();
  for (const char* text : {"", "active_file 1\n", "active_file 1\ninactive_file x\n", "\n \n"}) {
    Write(folder + "/memory.stat", text);
    EXPECT_FALSE(own->FixedBytes().has_value()) << text;
  }
  WriteOwn();
  Write(folder + "/cgroup.procs", "");
  EXPECT_FALSE(Find().has_value());
}

}  // namespace
}  // namespace chorus::server
