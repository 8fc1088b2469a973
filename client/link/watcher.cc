#include "client/link/watcher.h"

#include <errno.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "core/base/mutex.h"

namespace chorus {
namespace internal {
namespace {

class Watcher {
 public:
  explicit Watcher(int epoll_fd) : epoll_(epoll_fd) {
    // Never joined: it lives as long as the process.
    std::thread([this] { Run(); }).detach();
  }

  uint64_t Add(int fd, std::function<void()> callback) {
    MutexLock lock(&mutex_);
    const uint64_t id = next_id_++;
    epoll_event event = {};
    // Data is the attach client's to read; hang-ups are always reported.
    event.events = EPOLLRDHUP | EPOLLONESHOT;
    event.data.u64 = id;
    if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) return 0;
    callbacks_[id] = std::move(callback);
    return id;
  }

  void Remove(int fd, uint64_t id) {
    MutexLock lock(&mutex_);
    ::epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
    callbacks_.erase(id);
    while (running_ == id) done_.Wait(&mutex_);
  }

 private:
  void Run() {
    while (true) {
      epoll_event event;
      if (::epoll_wait(epoll_, &event, 1, -1) != 1) continue;
      std::function<void()> callback;
      {
        MutexLock lock(&mutex_);
        const auto row = callbacks_.find(event.data.u64);
        if (row == callbacks_.end()) continue;
        callback = std::move(row->second);
        callbacks_.erase(row);
        running_ = event.data.u64;
      }
      callback();
      MutexLock lock(&mutex_);
      running_ = 0;
      done_.SignalAll();
    }
  }

  const int epoll_;
  Mutex mutex_;
  CondVar done_;
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  uint64_t running_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<uint64_t, std::function<void()>> callbacks_ ABSL_GUARDED_BY(mutex_);
};

std::atomic<Watcher*> the_watcher{nullptr};

// A child leaves its parent's watcher alone and starts without.
void ForgetWatcher() { the_watcher.store(nullptr); }

Watcher* GetWatcher() {
  static const int registered = ::pthread_atfork(nullptr, nullptr, ForgetWatcher);
  (void)registered;
  Watcher* watcher = the_watcher.load();
  if (watcher != nullptr) return watcher;
  static Mutex* const mutex = new Mutex;
  MutexLock lock(mutex);
  watcher = the_watcher.load();
  if (watcher == nullptr) {
    const int epoll_fd = ::epoll_create1(EPOLL_CLOEXEC);
    if (epoll_fd < 0) return nullptr;
    watcher = new Watcher(epoll_fd);
    the_watcher.store(watcher);
  }
  return watcher;
}

class WatchImpl : public Watch {
 public:
  WatchImpl(Watcher* watcher, int fd, uint64_t id) : watcher_(watcher), fd_(fd), id_(id) {}
  ~WatchImpl() override { watcher_->Remove(fd_, id_); }

 private:
  Watcher* const watcher_;
  const int fd_;
  const uint64_t id_;
};

}  // namespace

std::unique_ptr<Watch> WatchForHangup(int socket_fd, std::function<void()> on_hangup) {
  Watcher* const watcher = GetWatcher();
  if (watcher == nullptr) return nullptr;
  const uint64_t id = watcher->Add(socket_fd, std::move(on_hangup));
  if (id == 0) return nullptr;
  return std::make_unique<WatchImpl>(watcher, socket_fd, id);
}

}  // namespace internal
}  // namespace chorus
