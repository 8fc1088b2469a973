#include "server/service/tensors_service.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "chorus/v1/tensors.grpc.pb.h"
#include "proto/convert/convert.h"
#include "server/service/call.h"
#include "server/service/call_turns.h"
#include "server/service/download.h"
#include "server/service/methods.h"
#include "server/service/submit.h"
#include "server/service/worker.h"

namespace chorus::server {
namespace {

// Written to staging by the node thread in one go: small enough that other sessions do not wait.
constexpr size_t kSliceBytes = 128 * 1024;

template <typename Names>
v1::Release ReleaseOf(const Names& tensors) {
  v1::Release release;
  *release.mutable_tensors() = tensors;
  return release;
}

// Its bytes, until they are written, also when its client has gone: so there are no more of them
// than turns, and nobody waits for room with a thread of gRPC's.
struct Upload {
  Upload(Call<v1::WriteStagingResponse>* call, node::WriteStagingRequest request)
      : worker(call->service()->worker),
        tenant(call->caller().tenant),
        turn(std::make_shared<CallTurns::Turn>(call->TakeTurn())),
        write(std::move(request)) {}
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;
  ~Upload() {
    worker->Post(tenant, [turn = std::move(turn)] {});
  }

  ServiceWorker* const worker;
  const std::string tenant;
  std::shared_ptr<CallTurns::Turn> turn;
  const node::WriteStagingRequest write;
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
  if (!status.ok() || next == write->bytes.size()) return call->Reply(status);
  service->loop->Post(call->caller().tenant, [=](node::LocalNode& later, absl::Time) {
    WriteSlices(service, call, session, upload, next, later);
  });
}

void OnCreate(const CallRef<v1::CreateTensorResponse>& call,
              const v1::CreateTensorRequest& request) {
  SubmitCommand(call, request.session(), request.sequence(), FromProto(request.tensor()));
}

void OnMakeReadable(const CallRef<v1::MakeReadableResponse>& call,
                    const v1::MakeReadableRequest& request) {
  v1::MakeReadable command;
  *command.mutable_tensors() = request.tensors();
  SubmitCommand(call, request.session(), request.sequence(), FromProto(command));
}

void OnRelease(const CallRef<v1::ReleaseTensorsResponse>& call,
               const v1::ReleaseTensorsRequest& request) {
  SubmitCommand(call, request.session(), request.sequence(),
                FromProto(ReleaseOf(request.tensors())));
}

void OnCreateStaging(const CallRef<v1::CreateStagingResponse>& call,
                     const v1::CreateStagingRequest& request) {
  call->ForSession(request.session(), [call, bytes = request.size_bytes()](
                                          node::LocalNode& node, absl::Time, SessionId session) {
    node.CreateStaging(session, bytes, [call](const absl::StatusOr<node::StagingArena>& staging) {
      if (!staging.ok()) return call->Reply(staging.status());
      call->Reply(absl::OkStatus(),
                  [arena = staging->arena, size = staging->bytes](v1::CreateStagingResponse* to) {
                    to->set_arena(arena.value());
                    to->set_size_bytes(size);
                  });
    });
  });
}

void OnWriteStaging(const CallRef<v1::WriteStagingResponse>& call, grpc::ByteBuffer* bytes) {
  const ServiceContext* const service = call->service();
  const Parsed<v1::WriteStagingRequest> request(service->parsing, bytes, kMaxWriteMessageBytes);
  if (!request.ok()) return call->Reply(request.status());
  const auto upload = std::make_shared<const Upload>(
      call.get(), node::WriteStagingRequest{ArenaId(request->arena()), request->offset_bytes(),
                                            request->data()});
  const absl::Status checked = upload->write.Check();
  if (!checked.ok()) return call->Reply(checked);
  call->ForSession(request->session(),
                   [service, call, upload](node::LocalNode& node, absl::Time, SessionId session) {
                     WriteSlices(service, call, session, upload, 0, node);
                   });
}

void OnReleaseStaging(const CallRef<v1::ReleaseStagingResponse>& call,
                      const v1::ReleaseStagingRequest& request) {
  call->ForSession(request.session(), [call, arena = ArenaId(request.arena())](
                                          node::LocalNode& node, absl::Time, SessionId session) {
    call->Reply(node.ReleaseStaging(session, arena));
  });
}

}  // namespace

std::unique_ptr<grpc::Service> MakeTensorsService(const ServiceContext* context) {
  auto service = std::make_unique<Methods<v1::Tensors>>(context);
  (*service)
      .Unary("Create", &OnCreate, kMaxCommandMessageBytes)
      .Unary("MakeReadable", &OnMakeReadable, kMaxCommandMessageBytes)
      .Unary("Release", &OnRelease, kMaxCommandMessageBytes)
      .Unary("CreateStaging", &OnCreateStaging)
      .Raw<v1::WriteStagingResponse>("WriteStaging", &OnWriteStaging)
      .Unary("ReleaseStaging", &OnReleaseStaging)
      .Stream("Download", [context](grpc::CallbackServerContext* call) {
        return StartDownload(context, call);
      });
  return service;
}

}  // namespace chorus::server
