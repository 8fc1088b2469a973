#include "server/service/unread_alarm.h"

#include "absl/base/thread_annotations.h"
#include "absl/types/optional.h"
#include "core/base/alarms.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "server/peers.h"

namespace chorus::server {

struct UnreadAlarm::Call : std::enable_shared_from_this<Call> {
  Call(const ServiceContext* service, grpc::CallbackServerContext* context)
      : service(service),
        context(context),
        connection(PeerTable::ConnectionIdOf(context->peer())) {}

  void Set() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    alarm =
        service->alarms->Set(SteadyNow() + service->download_timeout, [weak = weak_from_this()] {
          if (const auto call = weak.lock()) call->GiveUp();
        });
  }

  void GiveUp() {
    MutexLock lock(&mutex);
    // The number of its connection may be another's then.
    if (done) return;
    context->TryCancel();
    if (!connection.has_value()) return;
    const bool runs = !service->peers->IsStopped(*connection);
    if (ran && runs) return service->peers->End(*connection);
    ran = runs;
    Set();
  }

  const ServiceContext* const service;
  grpc::CallbackServerContext* const context;
  const absl::optional<int> connection;
  Mutex mutex;
  bool done ABSL_GUARDED_BY(mutex) = false;
  bool ran ABSL_GUARDED_BY(mutex) = false;  // its process, when it was last looked at
  Alarms::Id alarm ABSL_GUARDED_BY(mutex);
};

void UnreadAlarm::Start(const ServiceContext* service, grpc::CallbackServerContext* context) {
  if (call_ != nullptr) return;
  call_ = std::make_shared<Call>(service, context);
  MutexLock lock(&call_->mutex);
  call_->Set();
}

void UnreadAlarm::Stop() {
  if (call_ == nullptr) return;
  MutexLock lock(&call_->mutex);
  call_->done = true;
  call_->service->alarms->Cancel(call_->alarm);
}

}  // namespace chorus::server
