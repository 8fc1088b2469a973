#include "server/channelz_guard.h"

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "grpcpp/server_context.h"

namespace chorus {
namespace {

// Looks when the call has its caller: a synchronous one, as channelz has, has none yet when its
// interceptor is made.
class Guard : public grpc::experimental::Interceptor {
 public:
  Guard(const PeerTable* peers, grpc::ServerContextBase* context)
      : peers_(peers), context_(context) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(
            grpc::experimental::InterceptionHookPoints::POST_RECV_INITIAL_METADATA)) {
      const absl::StatusOr<Caller> caller = peers_->Resolve(context_->peer());
      if (!caller.ok() || !caller->is_daemon) context_->TryCancel();
    }
    methods->Proceed();
  }

 private:
  const PeerTable* const peers_;
  grpc::ServerContextBase* const context_;
};

class Guards : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit Guards(const PeerTable* peers) : peers_(peers) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    if (!absl::StartsWith(info->method(), "/grpc.channelz.")) return nullptr;
    return new Guard(peers_, info->server_context());
  }

 private:
  const PeerTable* const peers_;
};

}  // namespace

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> GuardChannelz(
    const PeerTable* peers) {
  return std::make_unique<Guards>(peers);
}

}  // namespace chorus
