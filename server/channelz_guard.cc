#include "server/channelz_guard.h"

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "grpcpp/server_context.h"

namespace chorus {
namespace {

class Guard : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit Guard(const PeerTable* peers) : peers_(peers) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    if (absl::StartsWith(info->method(), "/grpc.channelz.")) {
      const absl::StatusOr<Caller> caller = peers_->Resolve(info->server_context()->peer());
      if (!caller.ok() || !caller->is_daemon) info->server_context()->TryCancel();
    }
    return nullptr;
  }

 private:
  const PeerTable* const peers_;
};

}  // namespace

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> GuardChannelz(
    const PeerTable* peers) {
  return std::make_unique<Guard>(peers);
}

}  // namespace chorus
