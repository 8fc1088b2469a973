#include "core/base/thread_pool.h"

#include <sched.h>
#include <sys/stat.h>

#include <atomic>
#include <fstream>
#include <vector>

#include "gtest/gtest.h"

namespace chorus {
namespace {

// Waits, with a deadline, for a number of things to happen.
class Countdown {
 public:
  explicit Countdown(int count) : left_(count) {}
  void Hit() {
    MutexLock lock(&mutex_);
    --left_;
    changed_.SignalAll();
  }
  bool Wait() {
    MutexLock lock(&mutex_);
    for (int i = 0; i < 600 && left_ > 0; ++i) changed_.WaitFor(&mutex_, absl::Milliseconds(100));
    return left_ == 0;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  int left_ ABSL_GUARDED_BY(mutex_);
};

TEST(ThreadPoolTest, RunsEverythingOnceInOrderOnOneThread) {
  std::vector<int> order;
  {
    ThreadPool pool(1);
    for (int i = 0; i < 1000; ++i) pool.Post([&order, i] { order.push_back(i); });
  }
  ASSERT_EQ(order.size(), 1000u);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(order[i], i);
}

TEST(ThreadPoolTest, TasksRunAtTheSameTimeOnDifferentThreads) {
  ThreadPool pool(3);
  Countdown all_inside(3);
  Countdown ended(3);
  std::atomic<int> met{0};
  for (int i = 0; i < 3; ++i) {
    pool.Post([&] {
      all_inside.Hit();
      if (all_inside.Wait()) ++met;
      ended.Hit();
    });
  }
  ASSERT_TRUE(ended.Wait());
  EXPECT_EQ(met, 3);
}

TEST(ThreadPoolTest, ATaskMayBePostedAgainFromWithinItself) {
  struct Again : ThreadPool::Task {
    ThreadPool* pool;
    int left = 100;
    Countdown* done;
  };
  Countdown done(1);
  Again again;
  ThreadPool pool(2);
  again.pool = &pool;
  again.done = &done;
  again.run = [](ThreadPool::Task* self) {
    auto* task = static_cast<Again*>(self);
    if (--task->left == 0) {
      task->done->Hit();
    } else {
      task->pool->Post(task);
    }
  };
  pool.Post(&again);
  ASSERT_TRUE(done.Wait());
  EXPECT_EQ(again.left, 0);
}

TEST(RunInChunksTest, RunsEachChunkOnceAndThenDone) {
  ThreadPool pool(3);
  for (const int64_t own : {0, 2, 1000000}) {
    for (int64_t count : {0, 1, 2, 3, 1000}) {
      std::vector<std::atomic<int>> runs(count);
      Countdown done(1);
      std::atomic<bool> complete{false};
      RunInChunks(
          &pool, count, own, [&runs](int64_t i) { ++runs[i]; },
          [&] {
            bool all = true;
            for (const auto& run : runs) all = all && run == 1;
            complete = all;
            done.Hit();
          });
      ASSERT_TRUE(done.Wait()) << count;
      EXPECT_TRUE(complete) << count << " chunks, own " << own;
    }
  }
}

TEST(UsableCpusTest, IsWithinTheAffinityMask) {
  cpu_set_t set;
  CPU_ZERO(&set);
  ASSERT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
  EXPECT_GE(UsableCpus(), 1);
  EXPECT_LE(UsableCpus(), CPU_COUNT(&set));
}

class CgroupTest : public testing::Test {
 protected:
  void SetUp() override {
    root_ = testing::TempDir() + "/cgroup_" +
            testing::UnitTest::GetInstance()->current_test_info()->name();
    MakeDirectory("");
  }
  void MakeDirectory(const std::string& path) { mkdir((root_ + path).c_str(), 0755); }
  void Write(const std::string& path, const std::string& text) {
    std::ofstream(root_ + path) << text << "\n";
  }
  std::string root_;
};

TEST_F(CgroupTest, Version2TakesTheSmallestLimitOfItselfAndItsAncestors) {
  MakeDirectory("/a");
  MakeDirectory("/a/b");
  Write("/a/cpu.max", "250000 100000");
  Write("/a/b/cpu.max", "max 100000");
  EXPECT_EQ(CgroupCpuLimit("0::/a/b\n", root_), 3);
  Write("/a/b/cpu.max", "50000 100000");
  EXPECT_EQ(CgroupCpuLimit("0::/a/b\n", root_), 1);
}

TEST_F(CgroupTest, Version1ReadsQuotaAndPeriod) {
  MakeDirectory("/cpu,cpuacct");
  MakeDirectory("/cpu,cpuacct/job");
  Write("/cpu,cpuacct/cpu.cfs_quota_us", "-1");
  Write("/cpu,cpuacct/cpu.cfs_period_us", "100000");
  Write("/cpu,cpuacct/job/cpu.cfs_quota_us", "400000");
  Write("/cpu,cpuacct/job/cpu.cfs_period_us", "100000");
  EXPECT_EQ(CgroupCpuLimit("7:memory:/job\n3:cpu,cpuacct:/job\n", root_), 4);
}

TEST_F(CgroupTest, NothingFoundOrNonsenseMeansNoLimit) {
  EXPECT_EQ(CgroupCpuLimit("", root_), 0);
  EXPECT_EQ(CgroupCpuLimit("0::/nowhere\nnonsense\n", root_), 0);
  Write("/cpu.max", "many");
  EXPECT_EQ(CgroupCpuLimit("0::/\n", root_), 0);
}

}  // namespace
}  // namespace chorus
