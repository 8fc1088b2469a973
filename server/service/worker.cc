#include "server/service/worker.h"

#include <algorithm>
#include <utility>

#include "core/base/clock.h"

namespace chorus::server {

ServiceWorker::ServiceWorker(Renew renew, absl::Duration longest_period)
    : renew_(std::move(renew)), longest_period_(longest_period), thread_([this] { Loop(); }) {}

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

absl::Time ServiceWorker::RenewalOf(absl::Duration lease) const {
  return SteadyNow() + std::min(lease / 4, longest_period_);
}

void ServiceWorker::Hold(SessionId session, absl::Duration lease) {
  const absl::Time renewal = RenewalOf(lease);
  MutexLock lock(&mutex_);
  Held& held = held_[session];
  ++held.calls;
  held.lease = lease;
  if (renewal >= next_renewal_) return;
  next_renewal_ = renewal;
  changed_.Signal();
}

void ServiceWorker::Drop(SessionId session) {
  MutexLock lock(&mutex_);
  const auto it = held_.find(session);
  if (--it->second.calls == 0) held_.erase(it);
}

std::vector<SessionId> ServiceWorker::TakeDueLocked() {
  std::vector<SessionId> sessions;
  if (SteadyNow() < next_renewal_) return sessions;
  next_renewal_ = absl::InfiniteFuture();
  for (const auto& [session, held] : held_) {
    sessions.push_back(session);
    next_renewal_ = std::min(next_renewal_, RenewalOf(held.lease));
  }
  return sessions;
}

void ServiceWorker::Loop() {
  for (;;) {
    std::function<void()> task;
    std::vector<SessionId> sessions;
    {
      MutexLock lock(&mutex_);
      while (tasks_.empty() && !stop_) {
        const absl::Duration left = next_renewal_ - SteadyNow();
        if (left <= absl::ZeroDuration()) break;
        changed_.WaitFor(&mutex_, left);
      }
      if (tasks_.empty() && stop_) return;
      if (!tasks_.empty()) task = tasks_.Pop();
      sessions = TakeDueLocked();
    }
    if (!sessions.empty()) renew_(std::move(sessions));
    if (task != nullptr) task();
  }
}

}  // namespace chorus::server
