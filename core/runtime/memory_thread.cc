#include "core/runtime/memory_thread.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "core/base/mutex.h"
#include "core/base/turn_queue.h"

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
    int64_t bytes_done = 0;
    int64_t bytes_left = 0;
  };

  struct Disposal {
    std::shared_ptr<const void> memory;
    std::shared_ptr<std::atomic<int64_t>> done_of_tenant;
    std::shared_ptr<std::atomic<int64_t>> done_of_all;
  };

  // Whether there is more to touch.
  bool TouchPart(Touching* touching) {
    const std::shared_ptr<const ArenaMemory> memory = touching->memory.lock();
    if (memory == nullptr) {
      untouched_bytes -= touching->bytes_left;
      return false;
    }
    const int64_t bytes = std::min(kTouchBytes, touching->bytes_left);
    memory->Touch(touching->bytes_done, bytes);
    touching->bytes_done += bytes;
    touching->bytes_left -= bytes;
    untouched_bytes -= bytes;
    return touching->bytes_left > 0;
  }

  void Loop() {
    while (true) {
      Disposal disposal;
      Touching touching;
      bool touches = false;
      {
        MutexLock lock(&mutex);
        while (disposals.empty() && touched.empty() && !stop) changed.Wait(&mutex);
        if (!disposals.empty()) {
          disposal = disposals.Pop();
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
        disposal.memory.reset();
        ++*disposal.done_of_tenant;
        ++*disposal.done_of_all;
      }
      const bool has_more = touches && TouchPart(&touching);
      MutexLock lock(&mutex);
      if (has_more) touched.push_front(std::move(touching));
      busy = false;
      changed.SignalAll();
    }
  }

  std::atomic<int64_t> untouched_bytes{0};
  Mutex mutex;
  CondVar changed;
  TurnQueue<Disposal, const Budget*> disposals ABSL_GUARDED_BY(mutex);  // by tenant
  std::deque<Touching> touched ABSL_GUARDED_BY(mutex);
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

void MemoryThread::Touch(const std::shared_ptr<const ArenaMemory>& memory) {
  state_->untouched_bytes += memory->bytes();
  MutexLock lock(&state_->mutex);
  state_->touched.push_back({memory, 0, memory->bytes()});
  state_->changed.SignalAll();
}

int64_t MemoryThread::untouched_bytes() const { return state_->untouched_bytes; }

void MemoryThread::Dispose(const Budget& of, std::shared_ptr<const void> memory) {
  Disposals& disposals = tenants_[&of.share()].disposals;
  ++disposals.num_asked;
  ++all_.num_asked;
  MutexLock lock(&state_->mutex);
  state_->disposals.Push(&of.share(), {std::move(memory), disposals.num_done, all_.num_done});
  state_->changed.SignalAll();
}

void MemoryThread::Leave(Charge charge) {
  Settle();
  if (charge.amount() == 0) return;
  Tenant& tenant = tenants_[&charge.budget().share()];
  charge.Leave();
  tenant.leaving.emplace_back(tenant.disposals.num_asked, std::move(charge));
}

bool MemoryThread::Settle() {
  bool has_settled = false;
  for (auto it = tenants_.begin(); it != tenants_.end();) {
    Tenant& tenant = it->second;
    const int64_t num_done = *tenant.disposals.num_done;
    for (; !tenant.leaving.empty() && tenant.leaving.front().first <= num_done;
         has_settled = true) {
      tenant.leaving.pop_front();
    }
    if (tenant.leaving.empty() && tenant.disposals.all_done()) {
      tenants_.erase(it++);
    } else {
      ++it;
    }
  }
  return has_settled;
}

std::function<bool()> MemoryThread::WhetherGone(const Budget& of) {
  const auto it = tenants_.find(&of.share());
  const bool has_some = it != tenants_.end() && !it->second.disposals.all_done();
  return (has_some ? it->second.disposals : all_).WhetherGone();
}

void MemoryThread::Drain() {
  MutexLock lock(&state_->mutex);
  while (!state_->disposals.empty() || !state_->touched.empty() || state_->busy) {
    state_->changed.Wait(&state_->mutex);
  }
}

}  // namespace chorus
