#include "core/runtime/memory_thread.h"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "core/base/mutex.h"

namespace chorus {
namespace {

// Touching stops between pieces when nothing else needs the memory any more.
constexpr int64_t kTouchBytes = int64_t{4} << 20;

}  // namespace

struct MemoryThread::State {
  struct Job {
    std::shared_ptr<const ArenaMemory> touched;  // null: there is nothing to touch
    std::shared_ptr<const void> disposed;
  };

  // Its own reference is the last one when the arena is gone: then touching is in vain.
  void Do(Job job) {
    if (job.touched == nullptr) return;
    const int64_t bytes = job.touched->bytes();
    for (int64_t at = 0; at < bytes && job.touched.use_count() > 1; at += kTouchBytes) {
      job.touched->Touch(at, std::min(kTouchBytes, bytes - at));
    }
  }

  void Loop() {
    while (true) {
      Job job;
      {
        MutexLock lock(&mutex);
        while (jobs.empty() && !stop) changed.Wait(&mutex);
        if (jobs.empty()) return;
        job = std::move(jobs.front());
        jobs.pop_front();
        busy = true;
      }
      Do(std::move(job));
      MutexLock lock(&mutex);
      busy = false;
      changed.SignalAll();
    }
  }

  void Add(Job job) {
    MutexLock lock(&mutex);
    jobs.push_back(std::move(job));
    changed.SignalAll();
  }

  Mutex mutex;
  CondVar changed;
  std::deque<Job> jobs ABSL_GUARDED_BY(mutex);
  bool busy ABSL_GUARDED_BY(mutex) = false;
  bool stop ABSL_GUARDED_BY(mutex) = false;
  std::thread thread;
};

MemoryThread::MemoryThread() : state_(new State) {
  state_->thread = std::thread([state = state_.get()] { state->Loop(); });
}

MemoryThread::~MemoryThread() {
  {
    MutexLock lock(&state_->mutex);
    state_->stop = true;
    state_->changed.SignalAll();
  }
  state_->thread.join();
}

void MemoryThread::Touch(std::shared_ptr<const ArenaMemory> memory) {
  state_->Add({std::move(memory), nullptr});
}

void MemoryThread::Dispose(std::shared_ptr<const void> memory) {
  state_->Add({nullptr, std::move(memory)});
}

void MemoryThread::Drain() {
  MutexLock lock(&state_->mutex);
  while (!state_->jobs.empty() || state_->busy) state_->changed.Wait(&state_->mutex);
}

}  // namespace chorus
