#include "server/service/request_call.h"

#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/base/error.h"

namespace chorus {

void RequestCall::ReadRequest() {
  self_ = shared_from_this();
  absl::StatusOr<Caller> caller = service_->peers->Admit(context_->peer());
  if (!caller.ok()) return End(caller.status());
  caller_ = *std::move(caller);
  reader_ = {caller_.tenant, PeerTable::NumberOf(context_->peer()).value_or(0)};
  // What waits in line may outlive the call.
  const int64_t in_line =
      service_->reads->Enter(reader_, [weak = weak_from_this()](ReadTurns::Turn turn) {
        if (const auto call = weak.lock()) call->StartReading(std::move(turn));
      });
  MutexLock lock(&mutex_);
  in_line_ = in_line;
}

void RequestCall::StartReading(ReadTurns::Turn turn) {
  MutexLock lock(&mutex_);
  if (ended_) return;
  turn_ = std::move(turn);
  read_alarm_.Set(absl::ToChronoTime(absl::Now() + service_->read_timeout),
                  [weak = weak_from_this()](bool fired) {
                    const auto call = weak.lock();
                    if (fired && call != nullptr) call->Late();
                  });
  StartRead(&request_);
}

void RequestCall::Late() {
  {
    MutexLock lock(&mutex_);
    if (has_request_) return;
  }
  End(MakeError(Reason::kTransportTimeout,
                absl::StrCat("the request has not come whole within ",
                             absl::FormatDuration(service_->read_timeout))));
}

void RequestCall::OnReadDone(bool ok) {
  read_alarm_.Cancel();
  {
    MutexLock lock(&mutex_);
    has_request_ = ok;
  }
  if (ok) {
    HaveRequest(&request_);
    request_.Clear();
  } else {
    End(Malformed("expected a request, got none"));
  }
  ReadTurns::Turn turn;  // ends when the mutex is free
  MutexLock lock(&mutex_);
  turn = std::move(turn_);
}

void RequestCall::OnCancel() { End(MakeError(Reason::kCancelled, "the caller has cancelled")); }

void RequestCall::OnDone() {
  read_alarm_.Cancel();
  ReadTurns::Turn turn;
  int64_t in_line = 0;
  {
    MutexLock lock(&mutex_);
    done_ = true;
    turn = std::move(turn_);
    in_line = in_line_;
  }
  service_->reads->Forget(reader_, in_line);
  Forget();
  self_.reset();
}

}  // namespace chorus
