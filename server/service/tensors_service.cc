#include "server/service/tensors_service.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "proto/convert/convert.h"
#include "server/service/call.h"
#include "server/service/download.h"
#include "server/service/submit.h"

namespace chorus {
namespace {

// Written to staging by the node thread in one go: small enough that other sessions do not wait.
constexpr size_t kSliceBytes = 128 * 1024;

template <typename Names>
v1::Release ReleaseOf(const Names& tensors) {
  v1::Release release;
  *release.mutable_tensors() = tensors;
  return release;
}

struct Upload {
  Room::Part room;
  node::WriteStagingRequest write;
};

// Writes `upload` slice by slice, from byte `done` on, each in its own turn of the node thread.
void WriteSlices(const ServiceContext* service,
                 const std::shared_ptr<Call<v1::WriteStagingResponse>>& call, SessionId session,
                 const std::shared_ptr<const Upload>& upload, size_t done, node::LocalNode& node) {
  const node::WriteStagingRequest* const write = &upload->write;
  const absl::string_view slice = absl::string_view(write->bytes).substr(done, kSliceBytes);
  const absl::Status status =
      node.WriteStaging(session, write->arena, write->offset + static_cast<int64_t>(done), slice);
  const size_t next = done + slice.size();
  if (!status.ok() || next == write->bytes.size()) {
    node.CountStreamed(static_cast<int64_t>(next));
    return call->Reply(status);
  }
  service->loop->Post([=](node::LocalNode& later, absl::Time) {
    WriteSlices(service, call, session, upload, next, later);
  });
}

}  // namespace

grpc::ServerUnaryReactor* TensorsService::Create(grpc::CallbackServerContext* context,
                                                 const grpc::ByteBuffer* bytes,
                                                 grpc::ByteBuffer* response) {
  auto call = Call<v1::CreateTensorResponse>::Start(service_, context, response);
  const Parsed<v1::CreateTensorRequest> request(service_, context, bytes, kMaxCommandMessageBytes);
  if (!request.ok()) return call->Refuse(request.status());
  SubmitCommand(call, request->session(), request->sequence(), FromProto(request->tensor()));
  return call.get();
}

grpc::ServerUnaryReactor* TensorsService::MakeReadable(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* bytes,
                                                       grpc::ByteBuffer* response) {
  auto call = Call<v1::MakeReadableResponse>::Start(service_, context, response);
  const Parsed<v1::MakeReadableRequest> request(service_, context, bytes, kMaxCommandMessageBytes);
  if (!request.ok()) return call->Refuse(request.status());
  v1::MakeReadable command;
  *command.mutable_tensors() = request->tensors();
  SubmitCommand(call, request->session(), request->sequence(), FromProto(command));
  return call.get();
}

grpc::ServerUnaryReactor* TensorsService::Release(grpc::CallbackServerContext* context,
                                                  const grpc::ByteBuffer* bytes,
                                                  grpc::ByteBuffer* response) {
  auto call = Call<v1::ReleaseTensorsResponse>::Start(service_, context, response);
  const Parsed<v1::ReleaseTensorsRequest> request(service_, context, bytes,
                                                  kMaxCommandMessageBytes);
  if (!request.ok()) return call->Refuse(request.status());
  SubmitCommand(call, request->session(), request->sequence(),
                FromProto(ReleaseOf(request->tensors())));
  return call.get();
}

grpc::ServerUnaryReactor* TensorsService::CreateStaging(grpc::CallbackServerContext* context,
                                                        const grpc::ByteBuffer* bytes,
                                                        grpc::ByteBuffer* response) {
  auto call = Call<v1::CreateStagingResponse>::Start(service_, context, response);
  const Parsed<v1::CreateStagingRequest> request(service_, context, bytes);
  if (!request.ok()) return call->Refuse(request.status());
  call->ForSession(request->session(), [call, bytes = request->size_bytes()](
                                           node::LocalNode& node, absl::Time, SessionId session) {
    const auto staging = node.CreateStaging(session, bytes);
    if (!staging.ok()) return call->Reply(staging.status());
    call->Reply(absl::OkStatus(),
                [arena = staging->arena, size = staging->bytes](v1::CreateStagingResponse* to) {
                  to->set_arena(arena.value());
                  to->set_size_bytes(size);
                });
  });
  return call.get();
}

grpc::ServerUnaryReactor* TensorsService::WriteStaging(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* bytes,
                                                       grpc::ByteBuffer* response) {
  auto call = Call<v1::WriteStagingResponse>::Start(service_, context, response);
  Room::Part room = service_->uploads->Enter(
      std::min(static_cast<int64_t>(bytes->Length()), kMaxWriteMessageBytes));
  const Parsed<v1::WriteStagingRequest> request(service_, context, bytes, kMaxWriteMessageBytes);
  if (!request.ok()) return call->Refuse(request.status());
  const std::shared_ptr<const Upload> upload(new Upload{
      std::move(room), {ArenaId(request->arena()), request->offset_bytes(), request->data()}});
  const absl::Status checked = upload->write.Check();
  if (!checked.ok()) return call->Refuse(checked);
  call->ForSession(request->session(), [service = service_, call, upload](
                                           node::LocalNode& node, absl::Time, SessionId session) {
    WriteSlices(service, call, session, upload, 0, node);
  });
  return call.get();
}

grpc::ServerUnaryReactor* TensorsService::ReleaseStaging(grpc::CallbackServerContext* context,
                                                         const grpc::ByteBuffer* bytes,
                                                         grpc::ByteBuffer* response) {
  auto call = Call<v1::ReleaseStagingResponse>::Start(service_, context, response);
  const Parsed<v1::ReleaseStagingRequest> request(service_, context, bytes);
  if (!request.ok()) return call->Refuse(request.status());
  call->ForSession(request->session(), [call, arena = ArenaId(request->arena())](
                                           node::LocalNode& node, absl::Time, SessionId session) {
    call->Reply(node.ReleaseStaging(session, arena));
  });
  return call.get();
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* TensorsService::Download(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes) {
  return StartDownload(service_, context, bytes);
}

}  // namespace chorus
