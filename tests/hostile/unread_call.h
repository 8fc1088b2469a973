// A call whose answers nobody reads, until it goes.
//
// Threads: its reactions are gRPC's, the rest one at a time.
#ifndef CHORUS_TESTS_HOSTILE_UNREAD_CALL_H_
#define CHORUS_TESTS_HOSTILE_UNREAD_CALL_H_

#include <utility>

#include "absl/synchronization/notification.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/client_callback.h"
#include "tests/fault/raw_session.h"

namespace chorus {
namespace hostile {

template <typename Request, typename Response>
class UnreadCall : public grpc::ClientBidiReactor<Request, Response> {
 public:
  // `prepare(context, reactor)` says which call it is.
  template <typename Prepare>
  UnreadCall(Request request, Prepare prepare) : request_(std::move(request)) {
    fault::RawSession::SetDeadline(&context_);
    prepare(&context_, this);
  }
  ~UnreadCall() override { End(); }

  void Start() {
    this->StartWrite(&request_);
    this->StartCall();
  }
  void OnDone(const grpc::Status&) override { done_.Notify(); }

 protected:
  // Nothing reacts any more. Who derives and reacts calls it first in its destructor.
  void End() {
    context_.TryCancel();
    done_.WaitForNotification();
  }
  void WriteAgain() { this->StartWrite(&request_); }

 private:
  grpc::ClientContext context_;
  const Request request_;
  absl::Notification done_;
};

}  // namespace hostile
}  // namespace chorus

#endif  // CHORUS_TESTS_HOSTILE_UNREAD_CALL_H_
