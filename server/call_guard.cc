#include "server/call_guard.h"

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "core/base/error.h"
#include "grpc/grpc.h"
#include "grpcpp/server_context.h"
#include "proto/convert/errors_convert.h"

namespace chorus::server {
namespace {

class Guard : public grpc::experimental::Interceptor {
 public:
  Guard(PeerTable* peers, SharedRoom* blocking, grpc::experimental::ServerRpcInfo* info)
      : peers_(peers), blocking_(blocking), context_(info->server_context()) {
    const absl::string_view method = info->method();
    is_channelz_ = absl::StartsWith(method, "/grpc.channelz.");
    is_blocking_ = is_channelz_ || absl::StartsWith(method, "/grpc.reflection.");
  }
  ~Guard() override {
    if (connection_.has_value()) peers_->CallEnded(*connection_, began_);
  }

  // Not before this point has a synchronous call its caller.
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(
            grpc::experimental::InterceptionHookPoints::POST_RECV_INITIAL_METADATA)) {
      const absl::Status status = Look();
      if (!status.ok()) Cancel(ToGrpc(status));
    }
    methods->Proceed();
  }

 private:
  absl::Status Look() {
    connection_ = PeerTable::ConnectionIdOf(context_->peer());
    if (connection_.has_value()) {
      CHORUS_RETURN_IF_ERROR(peers_->CallBegan(*connection_));
      began_ = true;
    }
    if (!is_blocking_) return absl::OkStatus();
    CHORUS_ASSIGN_OR_RETURN(const Caller caller, peers_->Resolve(context_->peer()));
    if (is_channelz_ && !caller.is_daemon) {
      return MakeError(Reason::kNotAttached, "channelz is for the daemon's own user");
    }
    CHORUS_ASSIGN_OR_RETURN(thread_, blocking_->Take(caller.tenant, 1));
    return absl::OkStatus();
  }
  void Cancel(const grpc::Status& why) {
    grpc_call_cancel_with_status(context_->c_call(),
                                 static_cast<grpc_status_code>(why.error_code()),
                                 why.error_message().c_str(), nullptr);
  }

  PeerTable* const peers_;
  SharedRoom* const blocking_;
  grpc::ServerContextBase* const context_;
  bool is_channelz_ = false;
  bool is_blocking_ = false;
  absl::optional<int> connection_;  // once it has been looked at
  bool began_ = false;              // and is counted
  SharedRoom::Part thread_;
};

class Guards : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  Guards(PeerTable* peers, SharedRoom* blocking) : peers_(peers), blocking_(blocking) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    return new Guard(peers_, blocking_, info);
  }

 private:
  PeerTable* const peers_;
  SharedRoom* const blocking_;
};

}  // namespace

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> GuardCalls(
    PeerTable* peers, SharedRoom* blocking) {
  return std::make_unique<Guards>(peers, blocking);
}

}  // namespace chorus::server
