#include "server/service/log_service.h"

#include <algorithm>
#include <utility>

#include "core/base/clock.h"
#include "proto/convert/convert.h"
#include "server/service/call.h"
#include "server/service/command_stream.h"
#include "server/service/submit.h"

namespace chorus {

grpc::ServerUnaryReactor* LogService::Submit(grpc::CallbackServerContext* context,
                                             const grpc::ByteBuffer* bytes,
                                             grpc::ByteBuffer* response) {
  auto call = Call<v1::SubmitResponse>::Start(service_, context, response);
  const Parsed<v1::SubmitRequest> request(service_, context, bytes, kMaxCommandMessageBytes);
  if (!request.ok()) return call->Refuse(request.status());
  absl::StatusOr<Command> command = FromProto(request->command());
  if (!command.ok()) return call->Refuse(command.status());
  SubmitCommand(call, request->session(), command->sequence.value(), std::move(command->body));
  return call.get();
}

grpc::ServerUnaryReactor* LogService::Wait(grpc::CallbackServerContext* context,
                                           const grpc::ByteBuffer* bytes,
                                           grpc::ByteBuffer* response) {
  auto call = Call<v1::WaitResponse>::Start(service_, context, response);
  const Parsed<v1::WaitRequest> request(service_, context, bytes);
  if (!request.ok()) return call->Refuse(request.status());
  const absl::Time deadline =
      std::min(SteadyTime(absl::FromChrono(context->deadline())), SteadyNow() + service_->max_wait);
  call->ForSession(request->session(), [call, deadline, sequence = Sequence(request->sequence())](
                                           node::LocalNode& node, absl::Time, SessionId session) {
    node.WaitOutcome(session, sequence, deadline,
                     [call](node::Outcome outcome) { call->Reply(outcome.status); });
  });
  return call.get();
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* LogService::Commands(
    grpc::CallbackServerContext* context) {
  return StartCommandStream(service_, context);
}

}  // namespace chorus
