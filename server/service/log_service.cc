#include "server/service/log_service.h"

#include <memory>
#include <utility>

#include "chorus/v1/log.grpc.pb.h"
#include "proto/convert/convert.h"
#include "server/service/call.h"
#include "server/service/command_stream.h"
#include "server/service/methods.h"
#include "server/service/submit.h"

namespace chorus::server {
namespace {

void OnSubmit(const CallRef<v1::SubmitResponse>& call, const v1::SubmitRequest& request) {
  absl::StatusOr<Command> command = FromProto(request.command());
  if (!command.ok()) return call->Reply(command.status());
  SubmitCommand(call, request.session(), command->sequence.value(), std::move(command->body));
}

void OnWait(const CallRef<v1::WaitResponse>& call, const v1::WaitRequest& request) {
  call->ForSession(request.session(),
                   [call, sequence = Sequence(request.sequence()), wait = call->Waits()](
                       node::LocalNode& node, absl::Time, SessionId session) {
                     node.WaitOutcome(
                         session, sequence, call->deadline(),
                         [call](node::Outcome outcome) { call->Reply(outcome.status); }, wait);
                   });
}

}  // namespace

std::unique_ptr<grpc::Service> MakeLogService(const ServiceContext* context) {
  auto service = std::make_unique<Methods<v1::Log>>(context);
  (*service)
      .Unary("Submit", &OnSubmit, kMaxCommandMessageBytes)
      .Unary("Wait", &OnWait)
      .Stream("Commands", [context](grpc::CallbackServerContext* call) {
        return StartCommandStream(context, call);
      });
  return service;
}

}  // namespace chorus::server
