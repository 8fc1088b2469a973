#include "core/base/alarms.h"

#include "core/base/clock.h"

namespace chorus {

void Alarms::Stop() {
  if (!thread_.joinable()) return;
  {
    MutexLock lock(&mutex_);
    stop_ = true;
    changed_.Signal();
  }
  thread_.join();
}

Alarms::Id Alarms::Set(absl::Time due, std::function<void()> fire) {
  MutexLock lock(&mutex_);
  const Id id{due, ++last_};
  waiting_.emplace(std::make_pair(due, id.serial), std::move(fire));
  if (due < wakes_) {
    wakes_ = due;
    changed_.Signal();
  }
  return id;
}

void Alarms::Cancel(const Id& id) {
  std::function<void()> cancelled;  // goes when the mutex is free
  MutexLock lock(&mutex_);
  const auto place = waiting_.find(std::make_pair(id.due, id.serial));
  if (place == waiting_.end()) return;
  cancelled = std::move(place->second);
  waiting_.erase(place);
}

void Alarms::Loop() {
  for (;;) {
    std::function<void()> fire;
    {
      MutexLock lock(&mutex_);
      while (!stop_ && fire == nullptr) {
        const absl::Time next =
            waiting_.empty() ? absl::InfiniteFuture() : waiting_.begin()->first.first;
        const absl::Duration left = next - SteadyNow();
        if (left > absl::ZeroDuration()) {
          wakes_ = next;
          changed_.WaitFor(&mutex_, left);
          continue;
        }
        fire = std::move(waiting_.begin()->second);
        waiting_.erase(waiting_.begin());
      }
      if (stop_) return;
    }
    fire();
  }
}

}  // namespace chorus
