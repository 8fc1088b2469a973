#include "server/service/worker.h"

#include <utility>

#include "core/base/clock.h"

namespace chorus::server {

ServiceWorker::ServiceWorker(Renew renew, absl::Duration renew_period)
    : renew_(std::move(renew)), renew_period_(renew_period), thread_([this] { Loop(); }) {}

void ServiceWorker::Stop() {
  if (!thread_.joinable()) return;
  {
    MutexLock lock(&mutex_);
    stop_ = true;
    changed_.Signal();
  }
  thread_.join();
}

void ServiceWorker::Post(const std::string& tenant, std::function<void()> task) {
  MutexLock lock(&mutex_);
  if (stop_) return;
  if (tasks_.empty()) changed_.Signal();
  tasks_.Push(tenant, std::move(task));
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

void ServiceWorker::Loop() {
  absl::Time next_renewal = SteadyNow() + renew_period_;
  for (;;) {
    std::function<void()> task;
    std::vector<SessionId> sessions;
    {
      MutexLock lock(&mutex_);
      while (tasks_.empty() && !stop_) {
        if (held_.empty()) {
          changed_.Wait(&mutex_);
          next_renewal = SteadyNow() + renew_period_;
          continue;
        }
        const absl::Duration left = next_renewal - SteadyNow();
        if (left <= absl::ZeroDuration()) break;
        changed_.WaitFor(&mutex_, left);
      }
      if (tasks_.empty() && stop_) return;
      if (!tasks_.empty()) task = tasks_.Pop();
      if (SteadyNow() >= next_renewal) {
        for (const auto& [session, calls] : held_) sessions.push_back(session);
        next_renewal = SteadyNow() + renew_period_;
      }
    }
    if (!sessions.empty()) renew_(std::move(sessions));
    if (task != nullptr) task();
  }
}

}  // namespace chorus::server
