#include "server/service/worker.h"

#include <utility>

#include "core/base/clock.h"

namespace chorus {

ServiceWorker::ServiceWorker(node::NodeLoop* loop, absl::Duration renew_period)
    : loop_(loop), renew_period_(renew_period), thread_([this] { Loop(); }) {}

void ServiceWorker::Stop() {
  if (!thread_.joinable()) return;
  {
    MutexLock lock(&mutex_);
    stop_ = true;
    changed_.Signal();
  }
  thread_.join();
}

void ServiceWorker::Post(std::function<void()> task) {
  MutexLock lock(&mutex_);
  tasks_.push_back(std::move(task));
  if (tasks_.size() == 1) changed_.Signal();
}

void ServiceWorker::Hold(SessionId session) {
  MutexLock lock(&mutex_);
  ++held_[session];
  // The thread may sleep without a limit.
  if (held_.size() == 1) changed_.Signal();
}

void ServiceWorker::Drop(SessionId session) {
  MutexLock lock(&mutex_);
  const auto it = held_.find(session);
  if (--it->second == 0) held_.erase(it);
}

void ServiceWorker::RenewAll() {
  std::vector<SessionId> sessions;
  for (const auto& [session, calls] : held_) sessions.push_back(session);
  loop_->Post([sessions](node::LocalNode& node, absl::Time now) {
    // One that has ended meanwhile needs no lease.
    for (SessionId session : sessions) node.RenewLease(session, now).IgnoreError();
  });
}

void ServiceWorker::Loop() {
  absl::Time next_renewal = SteadyNow() + renew_period_;
  for (;;) {
    std::vector<std::function<void()>> tasks;
    {
      MutexLock lock(&mutex_);
      while (tasks_.empty() && !stop_) {
        if (held_.empty()) {
          changed_.Wait(&mutex_);
          next_renewal = SteadyNow() + renew_period_;
        } else {
          changed_.WaitFor(&mutex_, next_renewal - SteadyNow());
        }
        if (!held_.empty() && SteadyNow() >= next_renewal) {
          RenewAll();
          next_renewal = SteadyNow() + renew_period_;
        }
      }
      if (tasks_.empty()) return;
      tasks.swap(tasks_);
    }
    for (std::function<void()>& task : tasks) task();
  }
}

}  // namespace chorus
