#include "server/service/graphs_service.h"

#include "proto/convert/convert.h"
#include "server/service/call.h"
#include "server/service/submit.h"

namespace chorus {

grpc::ServerUnaryReactor* GraphsService::Register(grpc::CallbackServerContext* context,
                                                  const grpc::ByteBuffer* bytes,
                                                  grpc::ByteBuffer* response) {
  auto call = Call<v1::RegisterGraphResponse>::Start(service_, context, response);
  const Parsed<v1::RegisterGraphRequest> request(service_, context, bytes, kMaxCommandMessageBytes);
  if (!request.ok()) return call->Refuse(request.status());
  SubmitCommand(call, request->session(), request->sequence(), FromProto(request->graph()));
  return call.get();
}

grpc::ServerUnaryReactor* GraphsService::Run(grpc::CallbackServerContext* context,
                                             const grpc::ByteBuffer* bytes,
                                             grpc::ByteBuffer* response) {
  auto call = Call<v1::RunGraphResponse>::Start(service_, context, response);
  const Parsed<v1::RunGraphRequest> request(service_, context, bytes, kMaxCommandMessageBytes);
  if (!request.ok()) return call->Refuse(request.status());
  SubmitCommand(call, request->session(), request->sequence(), FromProto(request->run()));
  return call.get();
}

grpc::ServerUnaryReactor* GraphsService::Release(grpc::CallbackServerContext* context,
                                                 const grpc::ByteBuffer* bytes,
                                                 grpc::ByteBuffer* response) {
  auto call = Call<v1::ReleaseGraphsResponse>::Start(service_, context, response);
  const Parsed<v1::ReleaseGraphsRequest> request(service_, context, bytes, kMaxCommandMessageBytes);
  if (!request.ok()) return call->Refuse(request.status());
  v1::Release release;
  *release.mutable_graphs() = request->graphs();
  SubmitCommand(call, request->session(), request->sequence(), FromProto(release));
  return call.get();
}

}  // namespace chorus
