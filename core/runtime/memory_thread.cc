#include "core/runtime/memory_thread.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "core/base/mutex.h"

namespace chorus {
namespace {

// What is to be disposed of waits for no more than this, which takes about half a millisecond.
constexpr int64_t kTouchBytes = int64_t{1} << 20;

}  // namespace

struct MemoryThread::State {
  // Weak: the pages of what is disposed of are gone when that is done, however much of it was to be
  // touched yet.
  struct Touching {
    std::weak_ptr<const ArenaMemory> memory;
    int64_t done = 0;
  };

  // Whether there is more to touch.
  static bool TouchPart(Touching* touching) {
    const std::shared_ptr<const ArenaMemory> memory = touching->memory.lock();
    if (memory == nullptr) return false;
    const int64_t bytes = std::min(kTouchBytes, memory->bytes() - touching->done);
    memory->Touch(touching->done, bytes);
    touching->done += bytes;
    return touching->done < memory->bytes();
  }

  void Loop() {
    while (true) {
      std::shared_ptr<const void> disposed;
      Touching touching;
      bool touches = false;
      {
        MutexLock lock(&mutex);
        while (disposals.empty() && touched.empty() && !stop) changed.Wait(&mutex);
        if (!disposals.empty()) {
          disposed = std::move(disposals.front());
          disposals.pop_front();
        } else if (!touched.empty()) {
          touching = std::move(touched.front());
          touched.pop_front();
          touches = true;
        } else {
          return;
        }
        busy = true;
      }
      if (!touches) {
        disposed.reset();
        disposals_done.fetch_add(1, std::memory_order_release);
      }
      const bool more = touches && TouchPart(&touching);
      MutexLock lock(&mutex);
      if (more) touched.push_front(std::move(touching));
      busy = false;
      changed.SignalAll();
    }
  }

  Mutex mutex;
  CondVar changed;
  std::deque<std::shared_ptr<const void>> disposals ABSL_GUARDED_BY(mutex);
  std::deque<Touching> touched ABSL_GUARDED_BY(mutex);
  bool busy ABSL_GUARDED_BY(mutex) = false;
  bool stop ABSL_GUARDED_BY(mutex) = false;
  std::atomic<int64_t> disposals_done{0};
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

void MemoryThread::Touch(const std::shared_ptr<const ArenaMemory>& memory) {
  MutexLock lock(&state_->mutex);
  state_->touched.push_back({memory, 0});
  state_->changed.SignalAll();
}

void MemoryThread::Dispose(std::shared_ptr<const void> memory) {
  ++disposals_;
  MutexLock lock(&state_->mutex);
  state_->disposals.push_back(std::move(memory));
  state_->changed.SignalAll();
}

void MemoryThread::Leave(Charge charge) {
  Settle();
  if (charge.amount() == 0) return;
  charge.Leave();
  leaving_.emplace_back(disposals_, std::move(charge));
}

bool MemoryThread::Settle() {
  const size_t before = leaving_.size();
  while (!leaving_.empty() && leaving_.front().first <= disposals_done()) leaving_.pop_front();
  return leaving_.size() < before;
}

int64_t MemoryThread::disposals_done() const {
  return state_->disposals_done.load(std::memory_order_acquire);
}

void MemoryThread::Drain() {
  MutexLock lock(&state_->mutex);
  while (!state_->disposals.empty() || !state_->touched.empty() || state_->busy) {
    state_->changed.Wait(&state_->mutex);
  }
}

}  // namespace chorus
