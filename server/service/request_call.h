// One call of gRPC, until its request has been read, and its end.
//
// It is counted from its headers on. Its request is read when it is its turn, and has to come
// within ServiceContext::read_timeout from then on; the turn lasts until the request has been
// taken, by the node where it is for that, an upload until it is written. A call that has ended
// before is not carried out. An end that its client does not take is given up
// ServiceContext::download_timeout after the call's deadline, that of a download after it.
//
// Threads: gRPC's. Under its mutex it takes that of its UnreadAlarm, and under either those of
// SharedRoom, ServiceWorker, Alarms and PeerTable, or gRPC's (docs/architecture.md, Its locks).
// Ownership: gRPC's, until OnDone; others share it. Errors: end the call. Of every call:
// PERMISSION_DENIED (NOT_ATTACHED) of an unknown caller, RESOURCE_EXHAUSTED (QUOTA) where there are
// too many, INVALID_ARGUMENT (MALFORMED) where no request comes, DEADLINE_EXCEEDED
// (TRANSPORT_TIMEOUT) where it does not come in time, and CANCELLED.
#ifndef CHORUS_SERVER_SERVICE_REQUEST_CALL_H_
#define CHORUS_SERVER_SERVICE_REQUEST_CALL_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "core/base/alarms.h"
#include "core/base/clock.h"
#include "core/base/ids.h"
#include "core/base/mutex.h"
#include "core/node/node.h"
#include "core/node/node_loop.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/service/call_turns.h"
#include "server/service/context.h"
#include "server/service/unread_alarm.h"

namespace chorus::server {

// What every call is to gRPC.
using ByteStream = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

class RequestCall : public ByteStream, public std::enable_shared_from_this<RequestCall> {
 public:
  ~RequestCall() override = default;

  const ServiceContext* service() const { return service_; }
  // When it ends at the latest, by the steady clock: the call may wait long until it is read, and
  // the wall clock may be set in the meantime.
  absl::Time deadline() const { return deadline_; }
  // Whose call it is.
  const Caller& caller() const { return caller_; }

  // Does `task` on the node thread. What has been read of the call waits for that until then, and
  // has its turn, unless that has been taken.
  void Post(node::NodeLoop::Task task) ABSL_LOCKS_EXCLUDED(mutex_);
  // By HaveRequest: the turn goes with whatever keeps what has been read for longer. It is not for
  // the node thread to end it: the next request is begun to be read then.
  CallTurns::Turn TakeTurn() ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    return std::move(turn_);
  }

  void OnReadDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 protected:
  RequestCall(const ServiceContext* service, grpc::CallbackServerContext* context)
      : service_(service),
        context_(context),
        deadline_(std::min(SteadyTime(absl::FromChrono(context->deadline())),
                           SteadyNow() + service->max_wait)) {}

  // Once, when it is shared: then HaveRequest follows, or End.
  void ReadRequest();
  // Takes what it needs of `bytes`; on one of gRPC's threads, which may wait for room to parse.
  virtual void HaveRequest(grpc::ByteBuffer* bytes) = 0;
  // Ends the call, unless it has ended.
  virtual void End(const absl::Status& status) = 0;
  // Its deadline has come.
  virtual void EndLate() = 0;
  void StartReading(CallTurns::Turn turn);
  // Lets `answer` end the call when it is its turn to be answered, unless gRPC has done with it; on
  // the worker's thread, or on one of gRPC's.
  void WhenAnswered(std::function<void()> answer) ABSL_LOCKS_EXCLUDED(mutex_);
  // What is sent has room of its own, until its client has read it: it takes nobody's turn.
  void LeaveTurn() ABSL_LOCKS_EXCLUDED(mutex_);
  // An end that its client does not take is given up download_timeout from now on. Before Finish,
  // or with it under the mutex: behind that the call may be gone.
  void GiveUpLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { unread_.Start(service_, context_); }
  // Whether the caller is the one that ends it, which is gRPC's Finish: behind that nothing may be
  // started.
  bool MayEnd() ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    return EndsLocked();
  }
  // By HaveRequest: from now on the call only waits for what goes on without it, and can be asked
  // for again. It ends (TRANSPORT_TIMEOUT) where a later call of its user's needs its slot.
  void CanBeSpared() ABSL_LOCKS_EXCLUDED(mutex_);
  // For a wait of the node's; by HaveRequest. The call's end withdraws it, unless it is over.
  const node::WaitRef& Waits() { return wait_ = std::make_shared<node::Wait>(); }
  void WaitIsOver() ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    wait_over_ = true;
  }
  // Until the call has ended `session`'s lease does not run out.
  void Hold(SessionId session, absl::Duration lease);
  // After the last reaction, before gRPC's reference goes.
  virtual void Forget() = 0;

  const ServiceContext* const service_;
  grpc::CallbackServerContext* const context_;  // until OnDone
  Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;  // gRPC has done with it

 private:
  bool EndsLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    slot_.End();
    return !std::exchange(ended_, true);
  }
  void ReadLate();
  void DeadlineHasCome();

  const absl::Time deadline_;
  Caller caller_;                                 // constant once it reads
  PeerTable::Slot slot_ ABSL_GUARDED_BY(mutex_);  // until OnDone
  CallTurns::Holder holder_;                      // of its turns; constant once it reads
  grpc::ByteBuffer request_;                      // gRPC's while it reads
  int64_t in_line_ ABSL_GUARDED_BY(mutex_) = 0;   // for its turn; 0: it never was
  CallTurns::Turn turn_ ABSL_GUARDED_BY(mutex_);  // to be read
  int64_t in_answer_line_ ABSL_GUARDED_BY(mutex_) = 0;
  CallTurns::Turn answer_turn_ ABSL_GUARDED_BY(mutex_);
  bool is_read_ ABSL_GUARDED_BY(mutex_) = false;  // or never will be
  Alarms::Id read_alarm_ ABSL_GUARDED_BY(mutex_);
  Alarms::Id deadline_alarm_ ABSL_GUARDED_BY(mutex_);
  UnreadAlarm unread_ ABSL_GUARDED_BY(mutex_);
  SessionId held_ ABSL_GUARDED_BY(mutex_);  // 0: none
  node::WaitRef wait_;                      // null: none
  bool wait_over_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<RequestCall> self_;  // gRPC's reference, until OnDone
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_SERVICE_REQUEST_CALL_H_
