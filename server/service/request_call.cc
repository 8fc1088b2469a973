#include "server/service/request_call.h"

#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "grpc/grpc.h"
#include "proto/convert/errors_convert.h"

namespace chorus::server {

void RequestCall::ReadRequest() {
  self_ = shared_from_this();
  {
    MutexLock lock(&mutex_);
    deadline_alarm_ = service_->alarms->Set(deadline_, [weak = weak_from_this()] {
      if (const auto call = weak.lock()) call->DeadlineHasCome();
    });
  }
  absl::StatusOr<PeerTable::Admitted> admitted = service_->peers->Admit(context_->peer());
  if (!admitted.ok()) return End(admitted.status());
  caller_ = std::move(admitted->caller);
  {
    MutexLock lock(&mutex_);
    slot_ = std::move(admitted->slot);
  }
  holder_ = {caller_.tenant, PeerTable::ConnectionIdOf(context_->peer()).value_or(0)};
  // What waits in line may outlive the call.
  const int64_t in_line =
      service_->reads->Enter(holder_, [weak = weak_from_this()](CallTurns::Turn turn) {
        if (const auto call = weak.lock()) call->StartReading(std::move(turn));
      });
  MutexLock lock(&mutex_);
  in_line_ = in_line;
}

void RequestCall::StartReading(CallTurns::Turn turn) {
  MutexLock lock(&mutex_);
  if (ended_) return;
  turn_ = std::move(turn);
  read_alarm_ =
      service_->alarms->Set(SteadyNow() + service_->read_timeout, [weak = weak_from_this()] {
        if (const auto call = weak.lock()) call->ReadLate();
      });
  StartRead(&request_);
}

void RequestCall::ReadLate() {
  MutexLock lock(&mutex_);
  if (is_read_ || done_) return;
  const grpc::Status timeout_status = ToGrpc(MakeError(
      Reason::kTransportTimeout, absl::StrCat("the request has not come whole within ",
                                              absl::FormatDuration(service_->read_timeout))));
  // The turn lasts until gRPC has done with the request. What Finish sends may stand behind what
  // the client does not read; this waits for nobody, also where the call has ended already.
  grpc_call_cancel_with_status(context_->c_call(),
                               static_cast<grpc_status_code>(timeout_status.error_code()),
                               timeout_status.error_message().c_str(), nullptr);
  if (EndsLocked()) Finish(timeout_status);
}

void RequestCall::DeadlineHasCome() {
  EndLate();
  MutexLock lock(&mutex_);
  if (!done_) GiveUpLocked();
}

void RequestCall::CanBeSpared() {
  MutexLock lock(&mutex_);
  if (ended_) return;
  slot_.Spare([weak = weak_from_this()] {
    const auto call = weak.lock();
    if (call == nullptr) return;
    call->End(MakeError(
        Reason::kTransportTimeout,
        "a later call of the same user has this one's place, for there are no more; what this one "
        "asked for goes on (Log.Wait tells the outcome of a command)"));
  });
}

void RequestCall::OnReadDone(bool ok) {
  bool take = false;
  {
    MutexLock lock(&mutex_);
    is_read_ = true;
    take = ok && !ended_;
    service_->alarms->Cancel(read_alarm_);
  }
  if (take) HaveRequest(&request_);
  if (!ok) End(Malformed("expected a request, got none"));
  request_.Clear();
  CallTurns::Turn turn;  // ends when the mutex is free
  MutexLock lock(&mutex_);
  turn = std::move(turn_);
}

void RequestCall::Post(node::NodeLoop::Task task) {
  CallTurns::Turn turn = TakeTurn();
  service_->loop->Post(caller_.tenant,
                       [worker = service_->worker, tenant = caller_.tenant, task = std::move(task),
                        turn = std::make_shared<CallTurns::Turn>(std::move(turn))](
                           node::LocalNode& node, absl::Time now) mutable {
                         task(node, now);
                         worker->Post(tenant, [turn = std::move(turn)] {});
                       });
}

void RequestCall::WhenAnswered(std::function<void()> answer) {
  service_->worker->Post(
      caller_.tenant, [call = shared_from_this(), answer = std::move(answer)]() mutable {
        CallTurns* const answering = call->service_->answering;
        const int64_t in_line = answering->Enter(
            call->holder_, [call, answer = std::move(answer)](CallTurns::Turn turn) {
              {
                MutexLock lock(&call->mutex_);
                if (call->done_) return;
                call->answer_turn_ = std::move(turn);
              }
              answer();
            });
        bool done = false;
        {
          MutexLock lock(&call->mutex_);
          call->in_answer_line_ = in_line;
          done = call->done_;
        }
        if (done) answering->Forget(call->holder_, in_line);
      });
}

void RequestCall::LeaveTurn() {
  CallTurns::Turn turn;  // ends when the mutex is free
  MutexLock lock(&mutex_);
  turn = std::move(answer_turn_);
}

void RequestCall::Hold(SessionId session, absl::Duration lease) {
  MutexLock lock(&mutex_);
  if (done_ || held_.value() != 0) return;
  held_ = session;
  service_->worker->Hold(session, lease);
}

void RequestCall::OnCancel() { End(MakeError(Reason::kCancelled, "the caller has cancelled")); }

void RequestCall::OnDone() {
  // They end when the mutex is free.
  PeerTable::Slot slot;
  CallTurns::Turn turn;
  CallTurns::Turn answer_turn;
  int64_t in_line = 0;
  int64_t in_answer_line = 0;
  bool wait_over = false;
  {
    MutexLock lock(&mutex_);
    done_ = true;
    wait_over = wait_over_;
    service_->alarms->Cancel(read_alarm_);
    service_->alarms->Cancel(deadline_alarm_);
    unread_.Stop();
    if (held_.value() != 0) service_->worker->Drop(held_);
    slot = std::move(slot_);
    turn = std::move(turn_);
    answer_turn = std::move(answer_turn_);
    in_line = in_line_;
    in_answer_line = in_answer_line_;
  }
  service_->reads->Forget(holder_, in_line);
  service_->answering->Forget(holder_, in_answer_line);
  if (wait_ != nullptr && !wait_over) {
    // Behind what has made it wait.
    service_->loop->Post(caller_.tenant,
                         [wait = std::move(wait_)](node::LocalNode& node, absl::Time now) {
                           node.Withdraw(wait, now);
                         });
  }
  Forget();
  self_.reset();
}

}  // namespace chorus::server
