#include "core/node/node_loop.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "core/base/adaptive_spin.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/base/turn_queue.h"
#include "core/base/unique_fd.h"
#include "core/base/work.h"
#include "core/transport/doorbell.h"

namespace chorus::node {

class NodeLoop::Impl {
 public:
  Impl(NodeOptions options, std::unique_ptr<Devices> devices)
      : wake_event_(*CreateWakeEvent()),
        epoll_(epoll_create1(EPOLL_CLOEXEC)),
        node_(std::move(options), std::move(devices), [this] { Wake(); }),
        spin_(SpinClock::Real()) {
    // However a session ends.
    node_.OnSessionEnded([this](SessionId session) { Unwatch(session); });
    Watch(wake_event_.get(), EPOLLIN | EPOLLET, kWakeTag);
    Watch(node_.wake_epoll_fd(), EPOLLIN, kSessionsTag);
    thread_ = std::thread([this] { Run(); });
  }

  ~Impl() {
    stopping_.store(true, std::memory_order_release);
    Post(/*tenant=*/"", [](LocalNode&, absl::Time) {});
    thread_.join();
  }

  void Post(const std::string& tenant, Task task) {
    {
      MutexLock lock(&mutex_);
      tasks_.Push(tenant, std::move(task));
      has_tasks_.store(true, std::memory_order_seq_cst);
    }
    Wake();
  }

  void PostBehindAll(Task task) {
    {
      MutexLock lock(&mutex_);
      std::vector<std::string> owners = tasks_.Owners();
      if (owners.empty()) owners.emplace_back();
      // The last of these, each behind what its owner has by now.
      const Task last = [left = std::make_shared<size_t>(owners.size()), task = std::move(task)](
                            LocalNode& node, absl::Time now) {
        if (--*left == 0) task(node, now);
      };
      for (const std::string& owner : owners) tasks_.Push(owner, last);
      has_tasks_.store(true, std::memory_order_seq_cst);
    }
    Wake();
  }

  void WatchProcess(const std::string& tenant, SessionId session, int pidfd) {
    Post(tenant,
         [this, session, fd = std::make_shared<UniqueFd>(pidfd)](LocalNode& node, absl::Time) {
           if (!node.Lives(session)) return;  // it has ended meanwhile
           Watch(fd->get(), EPOLLIN, session.value());
           processes_[session] = std::move(*fd);
         });
  }

 private:
  // What an epoll event is about; sessions are positive.
  static constexpr int64_t kWakeTag = -1;
  static constexpr int64_t kSessionsTag = -2;

  void Watch(int fd, uint32_t events, int64_t tag) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = static_cast<uint64_t>(tag);
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
  }

  // Closing the pidfd would not end the watch: others may have its file.
  void Unwatch(SessionId session) {
    const auto process = processes_.find(session);
    if (process == processes_.end()) return;
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, process->second.get(), nullptr);
    processes_.erase(process);
  }

  // The store of what there is to do comes before this look at `asleep_`, and the loop's store of
  // `asleep_` before its last look at what there is to do: one of the two sees the other.
  void Wake() {
    if (asleep_.load(std::memory_order_seq_cst)) RingWakeEvent(wake_event_.get());
  }

  void Run() {
    while (!stopping_.load(std::memory_order_acquire)) {
      if (Work()) continue;
      if (spin_.Spin([this] { return Work(); })) continue;
      Sleep();
    }
    while (has_tasks_.load(std::memory_order_acquire)) Work();
  }

  bool Work() {
    bool worked = false;
    if (has_tasks_.load(std::memory_order_acquire)) worked |= RunTasks();
    // Deaths are seen while the loop is busy as well as while it sleeps.
    const absl::Time now = SteadyNow();
    if (!processes_.empty() && now >= next_look_) {
      next_look_ = now + absl::Milliseconds(1);
      worked |= TakeEvents(0);
    }
    worked |= node_.Poll(now);
    return worked;
  }

  // At most so many of what is posted by now, and none more when those before have taken so long:
  // rings, completions and timers are looked at before the rest, and what goes on by itself before
  // what is posted by whoever has just been told of something.
  static constexpr size_t kTasksPerTurn = 32;
  static constexpr absl::Duration kTasksTime = absl::Microseconds(200);

  bool RunTasks() {
    size_t left = 0;
    {
      MutexLock lock(&mutex_);
      left = std::min(kTasksPerTurn, tasks_.size());
      if (left == 0) has_tasks_.store(false, std::memory_order_relaxed);
    }
    if (left == 0) return false;
    const absl::Time now = SteadyNow();
    node_.SetTime(now);
    for (; left > 0 && SteadyNow() - now <= kTasksTime; --left) {
      // It ends here, with all that it holds.
      const WorkSlice slice;
      const Task task = NextTask();
      task(node_, now);
    }
    return true;
  }

  // There is one.
  Task NextTask() {
    MutexLock lock(&mutex_);
    return tasks_.Pop();
  }

  void Sleep() {
    const absl::Time started = SteadyNow();
    asleep_.store(true, std::memory_order_seq_cst);
    if (!has_tasks_.load(std::memory_order_seq_cst)) {
      node_.SleepUnlessBusy([this, started] {
        const absl::Duration left = node_.NextDeadline() - started;
        // Rounded up: a timer is due when this returns, not a moment later.
        const int64_t millis =
            left == absl::InfiniteDuration()
                ? -1
                : std::max<int64_t>(
                      0, std::min<int64_t>(absl::ToInt64Milliseconds(left) + 1, 60 * 60 * 1000));
        TakeEvents(static_cast<int>(millis));
      });
    }
    asleep_.store(false, std::memory_order_relaxed);
    spin_.WaitEnded(absl::ToInt64Nanoseconds(SteadyNow() - started));
  }

  bool TakeEvents(int timeout_ms) {
    epoll_event events[64];
    const int count = epoll_wait(epoll_.get(), events, 64, timeout_ms);
    int64_t work = 0;
    int i = 0;
    for (; i < count && work <= kTurnWork; ++i) {
      const int64_t tag = static_cast<int64_t>(events[i].data.u64);
      if (tag == kSessionsTag || tag == kWakeTag) continue;
      const WorkSlice slice;
      node_.SessionDied(SessionId(tag), SteadyNow());
      work += SliceWork();
    }
    // The others are told again: at once, but others have their turns first.
    if (i < count) next_look_ = absl::InfinitePast();
    return work > 0;
  }

  Mutex mutex_;
  TurnQueue<Task> tasks_ ABSL_GUARDED_BY(mutex_);  // by tenant
  std::atomic<bool> has_tasks_{false};             // it may have some
  std::atomic<bool> asleep_{false};
  std::atomic<bool> stopping_{false};
  UniqueFd wake_event_;
  UniqueFd epoll_;

  // The node thread's.
  absl::flat_hash_map<SessionId, UniqueFd> processes_;  // of sessions that live
  LocalNode node_;
  AdaptiveSpin spin_;
  absl::Time next_look_ = absl::InfinitePast();
  std::thread thread_;
};

NodeLoop::NodeLoop(NodeOptions options, std::unique_ptr<Devices> devices)
    : impl_(std::make_unique<Impl>(std::move(options), std::move(devices))) {}
NodeLoop::~NodeLoop() = default;
void NodeLoop::Post(const std::string& tenant, Task task) { impl_->Post(tenant, std::move(task)); }
void NodeLoop::PostBehindAll(Task task) { impl_->PostBehindAll(std::move(task)); }
void NodeLoop::WatchProcess(const std::string& tenant, SessionId session, int pidfd) {
  impl_->WatchProcess(tenant, session, pidfd);
}

}  // namespace chorus::node
