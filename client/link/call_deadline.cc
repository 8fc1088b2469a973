#include "client/link/call_deadline.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>

#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "grpc/support/time.h"

namespace chorus {
namespace internal {
namespace {

// gRPC has so much longer to end a call itself.
constexpr absl::Duration kGrace = absl::Milliseconds(100);
// Nobody waits longer, and times beyond that have no number.
constexpr absl::Duration kLongest = absl::Hours(24);

std::atomic<Alarms*> the_alarms{nullptr};

// A child leaves its parent's alone and starts without.
void ForgetAlarms() { the_alarms.store(nullptr); }

// They live as long as the process.
Alarms* GetAlarms() {
  static const int registered = ::pthread_atfork(nullptr, nullptr, ForgetAlarms);
  (void)registered;
  Alarms* alarms = the_alarms.load();
  if (alarms != nullptr) return alarms;
  static Mutex* const mutex = new Mutex;
  MutexLock lock(mutex);
  alarms = the_alarms.load();
  if (alarms == nullptr) {
    alarms = new Alarms;
    the_alarms.store(alarms);
  }
  return alarms;
}

}  // namespace

struct CallDeadline::State {
  explicit State(grpc::ClientContext* context_of_call) : context(context_of_call) {}

  void Fire() {
    MutexLock lock(&mutex);
    if (context == nullptr) return;
    is_late = true;
    context->TryCancel();
  }

  Mutex mutex;
  grpc::ClientContext* context ABSL_GUARDED_BY(mutex);  // null: the call is over
  bool is_late ABSL_GUARDED_BY(mutex) = false;
};

CallDeadline::CallDeadline(grpc::ClientContext* context, absl::Duration timeout)
    : state_(std::make_shared<State>(context)),
      alarms_(GetAlarms()),
      alarm_(alarms_->Set(SteadyNow() + std::min(timeout, kLongest) + kGrace,
                          [state = state_] { state->Fire(); })) {
  const gpr_timespec left =
      gpr_time_from_nanos(absl::ToInt64Nanoseconds(std::min(timeout, kLongest)), GPR_TIMESPAN);
  context->set_deadline(gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), left));
}

CallDeadline::~CallDeadline() {
  {
    MutexLock lock(&state_->mutex);
    state_->context = nullptr;
  }
  alarms_->Cancel(alarm_);
}

grpc::Status CallDeadline::Of(const grpc::Status& status) const {
  MutexLock lock(&state_->mutex);
  // What the daemon says has details.
  const bool was_ended = state_->is_late && status.error_code() == grpc::StatusCode::CANCELLED &&
                         status.error_details().empty();
  return was_ended ? grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED, "its time is over") : status;
}

}  // namespace internal
}  // namespace chorus
