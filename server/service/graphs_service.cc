#include "server/service/graphs_service.h"

#include <memory>

#include "chorus/v1/graphs.grpc.pb.h"
#include "proto/convert/convert.h"
#include "server/service/call.h"
#include "server/service/methods.h"
#include "server/service/submit.h"

namespace chorus::server {
namespace {

void OnRegister(const CallRef<v1::RegisterGraphResponse>& call,
                const v1::RegisterGraphRequest& request) {
  SubmitCommand(call, request.session(), request.sequence(), FromProto(request.graph()));
}

void OnRun(const CallRef<v1::RunGraphResponse>& call, const v1::RunGraphRequest& request) {
  SubmitCommand(call, request.session(), request.sequence(), FromProto(request.run()));
}

void OnRelease(const CallRef<v1::ReleaseGraphsResponse>& call,
               const v1::ReleaseGraphsRequest& request) {
  v1::Release release;
  *release.mutable_graphs() = request.graphs();
  SubmitCommand(call, request.session(), request.sequence(), FromProto(release));
}

}  // namespace

std::unique_ptr<grpc::Service> MakeGraphsService(const ServiceContext* context) {
  auto service = std::make_unique<Methods<v1::Graphs>>(context);
  (*service)
      .Unary("Register", &OnRegister, kMaxCommandMessageBytes)
      .Unary("Run", &OnRun, kMaxCommandMessageBytes)
      .Unary("Release", &OnRelease, kMaxCommandMessageBytes);
  return service;
}

}  // namespace chorus::server
