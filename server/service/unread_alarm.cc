#include "server/service/unread_alarm.h"

#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/time/clock.h"
#include "core/base/mutex.h"
#include "grpcpp/alarm.h"

namespace chorus::server {

struct UnreadAlarm::Call {
  Mutex mutex;
  bool done ABSL_GUARDED_BY(mutex) = false;
  std::function<void()> give_up;
  grpc::Alarm alarm;
};

void UnreadAlarm::Start(absl::Duration time, std::function<void()> give_up) {
  call_ = std::make_shared<Call>();
  call_->give_up = std::move(give_up);
  call_->alarm.Set(absl::ToChronoTime(absl::Now() + time),
                   [weak = std::weak_ptr<Call>(call_)](bool fired) {
                     const auto call = weak.lock();
                     if (!fired || call == nullptr) return;
                     MutexLock lock(&call->mutex);
                     if (!call->done) call->give_up();
                   });
}

void UnreadAlarm::Stop() {
  if (call_ == nullptr) return;
  {
    MutexLock lock(&call_->mutex);
    call_->done = true;
  }
  call_->alarm.Cancel();
}

}  // namespace chorus::server
