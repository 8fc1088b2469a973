#include "core/base/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <memory>
#include <sstream>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/base/adaptive_spin.h"

namespace chorus {
namespace {

// The first line of a file, empty where there is none.
std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

int CpusOf(double quota, double period) {
  if (quota <= 0 || period <= 0) return 0;
  return std::max(1, static_cast<int>((quota + period - 1) / period));
}

// Version 2: "QUOTA PERIOD" or "max PERIOD".
int LimitOfVersion2(const std::string& directory) {
  const std::vector<std::string> words =
      absl::StrSplit(FirstLine(directory + "/cpu.max"), ' ', absl::SkipEmpty());
  double quota = 0;
  double period = 0;
  if (words.size() != 2 || !absl::SimpleAtod(words[0], &quota) ||
      !absl::SimpleAtod(words[1], &period)) {
    return 0;
  }
  return CpusOf(quota, period);
}

// Version 1: a quota of -1 means none.
int LimitOfVersion1(const std::string& directory) {
  double quota = 0;
  double period = 0;
  if (!absl::SimpleAtod(FirstLine(directory + "/cpu.cfs_quota_us"), &quota) ||
      !absl::SimpleAtod(FirstLine(directory + "/cpu.cfs_period_us"), &period)) {
    return 0;
  }
  return CpusOf(quota, period);
}

}  // namespace

int CgroupCpuLimit(const std::string& proc_self_cgroup, const std::string& mount_root) {
  int limit = 0;
  const auto apply = [&limit](int cpus) {
    if (cpus > 0) limit = limit == 0 ? cpus : std::min(limit, cpus);
  };
  for (absl::string_view line : absl::StrSplit(proc_self_cgroup, '\n', absl::SkipEmpty())) {
    // "ID:CONTROLLERS:PATH"; version 2 has no controllers here.
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const bool version2 = parts[1].empty();
    const std::vector<std::string> controllers = absl::StrSplit(parts[1], ',');
    if (!version2 &&
        std::find(controllers.begin(), controllers.end(), "cpu") == controllers.end()) {
      continue;
    }
    const std::string mount = version2 ? mount_root : absl::StrCat(mount_root, "/", parts[1]);
    // A limit of any ancestor holds as well. Inside a container the path may not be visible; the
    // container's own group is then the root of the mount.
    std::string path = parts[2];
    while (true) {
      while (!path.empty() && path.back() == '/') path.pop_back();
      const std::string directory = mount + path;
      apply(version2 ? LimitOfVersion2(directory) : LimitOfVersion1(directory));
      if (path.empty()) break;
      path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
  return limit;
}

int UsableCpus() {
  int cpus = std::max(1u, std::thread::hardware_concurrency());
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) cpus = std::max(1, CPU_COUNT(&set));
  std::ifstream file("/proc/self/cgroup");
  std::ostringstream text;
  text << file.rdbuf();
  const int limit = CgroupCpuLimit(text.str(), "/sys/fs/cgroup");
  return limit > 0 ? std::min(cpus, limit) : cpus;
}

ThreadPool::ThreadPool(int threads) {
  threads_.reserve(threads);
  for (int i = 0; i < std::max(1, threads); ++i) threads_.emplace_back([this] { Work(); });
}

ThreadPool::~ThreadPool() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    has_tasks_.store(true, std::memory_order_relaxed);
  }
  posted_.SignalAll();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::Post(Task* task) {
  task->next = nullptr;
  bool wake = false;
  {
    MutexLock lock(&mutex_);
    if (last_ == nullptr) {
      first_ = task;
    } else {
      last_->next = task;
    }
    last_ = task;
    has_tasks_.store(true, std::memory_order_relaxed);
    wake = asleep_ > 0;
  }
  if (wake) posted_.Signal();
}

void ThreadPool::Post(std::function<void()> function) {
  struct FunctionTask : Task {
    std::function<void()> function;
  };
  auto* task = new FunctionTask;
  task->function = std::move(function);
  task->run = [](Task* self) {
    std::unique_ptr<FunctionTask> function_task(static_cast<FunctionTask*>(self));
    function_task->function();
  };
  Post(task);
}

void ThreadPool::Work() {
  AdaptiveSpin spin(SpinClock::Real());
  while (true) {
    int64_t start = 0;
    const bool saw_task =
        spin.Spin([this] { return has_tasks_.load(std::memory_order_relaxed); }, &start);
    Task* task = nullptr;
    {
      MutexLock lock(&mutex_);
      if (!saw_task) {
        ++asleep_;
        while (first_ == nullptr && !stopping_) posted_.Wait(&mutex_);
        --asleep_;
      }
      if (first_ == nullptr) {
        if (stopping_) return;
        continue;  // another thread was faster
      }
      task = first_;
      first_ = task->next;
      if (first_ == nullptr) {
        last_ = nullptr;
        has_tasks_.store(stopping_, std::memory_order_relaxed);
      }
    }
    if (!saw_task) spin.WaitEnded(SpinClock::Real()->NowNanos() - start);
    task->run(task);
  }
}

namespace {

// Kept alive by the tasks that refer to it: one that gets its thread only after the last chunk has
// ended finds nothing left to do.
struct ChunkedRun {
  int64_t count = 0;
  std::function<void(int64_t)> chunk;
  std::function<void()> done;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> num_ended{0};

  void Work(int64_t most) {
    int64_t num_run = 0;
    while (num_run < most) {
      const int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) break;
      chunk(i);
      ++num_run;
    }
    // acq_rel: the thread that brings the sum to `count` sees what all others wrote.
    if (num_run > 0 && num_ended.fetch_add(num_run, std::memory_order_acq_rel) + num_run == count)
      done();
  }
};

}  // namespace

void RunInChunks(ThreadPool* pool, int64_t count, int64_t own_chunks,
                 std::function<void(int64_t)> chunk, std::function<void()> done) {
  if (count <= 0) {
    done();
    return;
  }
  auto run = std::make_shared<ChunkedRun>();
  run->count = count;
  run->chunk = std::move(chunk);
  run->done = std::move(done);
  const int64_t helpers = std::min<int64_t>(count, pool->size());
  // A thread of the pool that stays to the end is one of the helpers itself.
  const int64_t num_posted = own_chunks >= count ? helpers - 1 : helpers;
  for (int64_t i = 0; i < num_posted; ++i) {
    pool->Post([run] { run->Work(run->count); });
  }
  run->Work(std::min(own_chunks, count));
}

}  // namespace chorus
