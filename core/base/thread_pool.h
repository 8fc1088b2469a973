// The node's one pool of worker threads, and how many threads this process may usefully run.
//
// Threads: said at each. Ownership: a pool owns its threads; a task is its poster's. Errors: none.
#ifndef CHORUS_CORE_BASE_THREAD_POOL_H_
#define CHORUS_CORE_BASE_THREAD_POOL_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "core/base/mutex.h"

namespace chorus {

// CPUs that this process may use, at least 1: its affinity mask, cut by the cpu limits of its
// control groups (version 1 and 2), rounded up.
int UsableCpus();
// The control groups' part, from the text of /proc/self/cgroup and the path at which the
// hierarchies are mounted. 0: no limit found.
int CgroupCpuLimit(const std::string& proc_self_cgroup, const std::string& mount_root);

// A fixed set of threads that run tasks in the order in which they were posted. A thread without a
// task looks for one for a while, as long as that has lately paid (adaptive_spin.h), before it
// sleeps: waking it costs more than a chunk of most collectives.
//
// Threads: Post may come from anywhere, tasks included. Tasks must not wait for other tasks: what
//   has to wait is posted again by what completes it.
// The destructor runs everything that was posted before it, then joins.
class ThreadPool {
 public:
  // What the pool runs. Lives in its poster's own structures, so that posting allocates nothing; it
  // must stay valid until `run` is called and may be posted again from then on.
  struct Task {
    void (*run)(Task* self) = nullptr;
    Task* next = nullptr;  // the pool's
  };

  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(threads_.size()); }
  void Post(Task* task) ABSL_LOCKS_EXCLUDED(mutex_);
  void Post(std::function<void()> function);

 private:
  void Work();

  Mutex mutex_;
  CondVar posted_;
  Task* first_ ABSL_GUARDED_BY(mutex_) = nullptr;
  Task* last_ ABSL_GUARDED_BY(mutex_) = nullptr;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  int asleep_ ABSL_GUARDED_BY(mutex_) = 0;
  // There is a task, or the end; a hint for threads that look without the mutex.
  std::atomic<bool> has_tasks_{false};
  std::vector<std::thread> threads_;
};

// Runs chunk(0) .. chunk(count - 1), in any order, on all threads of `pool`. This thread runs up to
// `own_chunks` of them itself before it returns: all that it can get, for a caller that is itself a
// thread of the pool, or a few while the pool wakes up. It waits for nothing. `done` runs once,
// after all chunks, on the thread that ended the last one.
void RunInChunks(ThreadPool* pool, int64_t count, int64_t own_chunks,
                 std::function<void(int64_t)> chunk, std::function<void()> done);

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_THREAD_POOL_H_
