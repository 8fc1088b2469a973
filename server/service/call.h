// One unary RPC, from its handler to its end.
//
// A handler takes what it needs out of the request (which is gone once the call has ended), lets
// the node thread do the work and ends the call with Reply. Four may end a call: the work, the
// client's cancel, the call's deadline (its own, at most ServiceContext::max_wait) and, where it
// can be spared, a later call that needs its slot. The first one wins; for the others nothing
// happens. The work itself is not withdrawn by either: a command stays in its log, and its outcome
// can be asked for. A call that does nothing but wait is.
//
// Threads: Reply from any thread. The reply is made and sent on the worker's thread, or on one of
// gRPC's that has done with another call.
// Ownership: gRPC and what works for it share it, until its end. Errors: end the call.
#ifndef CHORUS_SERVER_SERVICE_CALL_H_
#define CHORUS_SERVER_SERVICE_CALL_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/base/error.h"
#include "core/base/ids.h"
#include "core/base/mutex.h"
#include "core/node/node_loop.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/server_callback.h"
#include "proto/convert/errors_convert.h"
#include "server/service/context.h"
#include "server/service/parsed.h"
#include "server/service/request_call.h"

namespace chorus::server {

// What the node thread does for a session of the caller's.
using SessionTask = std::function<void(node::LocalNode& node, absl::Time now, SessionId session)>;

// Hands `post` what does `task` on the node thread if `caller` may use the session `name`, and else
// tells `refuse` (on any thread). `hold` is called before `task`, with the lease that the session
// has from now on.
using HoldSession = std::function<void(SessionId session, absl::Duration lease)>;
void ForSessionOf(const ServiceContext& context, const Caller& caller, int64_t name,
                  HoldSession hold, SessionTask task, std::function<void(absl::Status)> refuse,
                  absl::FunctionRef<void(node::NodeLoop::Task task)> post);

absl::Status CallTimedOut();

// Answers of more bytes take room until their clients have read them.
inline constexpr int64_t kSmallAnswer = 4 << 10;
// The longest list, and what it is made of.
inline constexpr int64_t kListBytes = int64_t{2} << 20;

template <typename Response>
class Call : public RequestCall {
 public:
  using Fill = std::function<void(Response* response)>;
  using OnRequest = std::function<void(const std::shared_ptr<Call>& call, grpc::ByteBuffer* bytes)>;

  // `on_request` outlives it.
  static ByteStream* Start(const ServiceContext* service, grpc::CallbackServerContext* context,
                           const OnRequest* on_request) {
    std::shared_ptr<Call> call(new Call(service, context, on_request));
    call->ReadRequest();
    return call.get();
  }

  // Room for an answer of up to so many bytes, and for what it is made of. RESOURCE_EXHAUSTED
  // kQuota: there is none.
  absl::Status Reserve(int64_t bytes) {
    MutexLock lock(&mutex_);
    if (done_ || bytes <= room_.bytes()) return absl::OkStatus();
    CHORUS_ASSIGN_OR_RETURN(SharedRoom::Part part, service_->answers->Take(caller().tenant, bytes));
    room_ = std::move(part);
    return absl::OkStatus();
  }

  // Does `task` on the node thread for the caller's session `name`, or ends the call. While the
  // call is under way the session's lease does not run out.
  void ForSession(int64_t name, SessionTask task) {
    std::shared_ptr<Call> call = self();
    ForSessionOf(
        *service_, caller(), name,
        [call](SessionId session, absl::Duration lease) { call->Hold(session, lease); },
        std::move(task), [call](absl::Status status) { call->Reply(std::move(status)); },
        [call](node::NodeLoop::Task posted) { call->Post(std::move(posted)); });
  }

  using RequestCall::CanBeSpared;
  using RequestCall::Waits;

  // Ends the call; `fill` makes the response of a good one.
  void Reply(absl::Status status, Fill fill = nullptr) {
    WaitIsOver();
    WhenAnswered([call = self(), status = std::move(status), fill = std::move(fill)] {
      call->EndWith(status, fill);
    });
  }

 private:
  Call(const ServiceContext* service, grpc::CallbackServerContext* context,
       const OnRequest* on_request)
      : RequestCall(service, context), on_request_(on_request) {}

  std::shared_ptr<Call> self() { return std::static_pointer_cast<Call>(shared_from_this()); }

  void HaveRequest(grpc::ByteBuffer* bytes) override { (*on_request_)(self(), bytes); }

  void EndWith(absl::Status status, const Fill& fill) {
    if (!MayEnd()) return;
    bool is_small = true;
    if (status.ok()) {
      Response response;
      if (fill) fill(&response);
      const auto bytes = static_cast<int64_t>(response.ByteSizeLong());
      is_small = bytes <= kSmallAnswer;
      if (!is_small) status = Reserve(bytes);
      if (status.ok()) response_ = Serialized(response);
      MutexLock lock(&mutex_);
      room_.Shrink(!is_small && status.ok() ? bytes : 0);
    }
    if (!status.ok()) return Finish(ToGrpc(status));
    if (!is_small) LeaveTurn();
    StartWriteAndFinish(&response_, grpc::WriteOptions(), grpc::Status::OK);
  }
  void End(const absl::Status& status) override { EndWith(status, nullptr); }

  void EndLate() override { End(CallTimedOut()); }

  void Forget() override {
    MutexLock lock(&mutex_);
    room_ = SharedRoom::Part();
  }

  const OnRequest* const on_request_;
  grpc::ByteBuffer response_;  // of what ends the call
  SharedRoom::Part room_ ABSL_GUARDED_BY(mutex_);
};
template <typename Response>
using CallRef = std::shared_ptr<Call<Response>>;

}  // namespace chorus::server

#endif  // CHORUS_SERVER_SERVICE_CALL_H_
