// Short forms of calls for tests of the daemon over gRPC.
//
// Threads: an RpcRank belongs to one thread. Ownership: it shares its channel. Errors: those of the
// calls, as FromGrpc gives them.
#ifndef CHORUS_SERVER_TESTING_RPC_H_
#define CHORUS_SERVER_TESTING_RPC_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "chorus/v1/diagnostics.grpc.pb.h"
#include "chorus/v1/log.grpc.pb.h"
#include "chorus/v1/sessions.grpc.pb.h"
#include "chorus/v1/tensors.grpc.pb.h"
#include "chorus/v1/worlds.grpc.pb.h"
#include "core/base/error.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "proto/convert/errors_convert.h"

namespace chorus::server {

// Calls stub->*method(request) with a deadline.
template <typename Stub, typename Request, typename Response>
absl::Status Ask(Stub& stub,
                 grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                 const Request& request, Response* response,
                 absl::Duration timeout = absl::Seconds(30)) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  return FromGrpc((stub.*method)(&context, request, response));
}

inline std::string Floats(const std::vector<float>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
}

// One client on its own connection, with a session by lease (or none).
class RpcRank {
 public:
  explicit RpcRank(const std::shared_ptr<grpc::Channel>& channel)
      : sessions(v1::Sessions::NewStub(channel)),
        worlds(v1::Worlds::NewStub(channel)),
        tensors(v1::Tensors::NewStub(channel)),
        log(v1::Log::NewStub(channel)),
        diagnostics(v1::Diagnostics::NewStub(channel)) {}

  absl::Status Open(const v1::OpenSessionRequest& request = {}) {
    v1::OpenSessionResponse response;
    CHORUS_RETURN_IF_ERROR(Ask(*sessions, &v1::Sessions::Stub::Open, request, &response));
    session = response.session();
    return absl::OkStatus();
  }

  absl::Status Close() {
    v1::CloseSessionRequest request;
    request.set_session(session);
    v1::CloseSessionResponse response;
    return Ask(*sessions, &v1::Sessions::Stub::Close, request, &response);
  }

  absl::Status Renew() {
    v1::RenewSessionRequest request;
    request.set_session(session);
    v1::RenewSessionResponse response;
    return Ask(*sessions, &v1::Sessions::Stub::Renew, request, &response);
  }

  absl::Status Join(const std::string& name, int size, int rank_in_world,
                    absl::Duration join_timeout = absl::ZeroDuration()) {
    rank = rank_in_world;
    v1::JoinWorldRequest request;
    request.set_session(session);
    request.set_name(name);
    request.set_size(size);
    request.set_rank(rank);
    request.mutable_join_timeout()->set_nanos(
        static_cast<int32_t>(absl::ToInt64Nanoseconds(join_timeout)));
    v1::JoinWorldResponse response;
    CHORUS_RETURN_IF_ERROR(Ask(*worlds, &v1::Worlds::Stub::Join, request, &response));
    world = response.world().world();
    world_size = size;
    return absl::OkStatus();
  }

  // An all_reduce of `length` floats, as graph `slot`.
  v1::Command RegisterCommand(int64_t sequence, int slot, int64_t length) const {
    v1::Command command;
    command.set_sequence(sequence);
    v1::RegisterGraph* to = command.mutable_register_graph();
    to->mutable_id()->set_slot(slot);
    to->mutable_id()->set_generation(1);
    v1::Graph* graph = to->mutable_graph();
    v1::TensorType* type = graph->add_inputs()->mutable_type();
    type->set_dtype(v1::DTYPE_F32);
    type->add_dims(length);
    v1::Node* node = graph->add_nodes();
    node->set_op("all_reduce");
    node->add_inputs(0);
    *node->add_outputs() = *type;
    node->mutable_collective()->set_kind(v1::COLLECTIVE_KIND_ALL_REDUCE);
    node->mutable_collective()->set_reduction(v1::REDUCTION_SUM);
    node->mutable_collective()->set_rank(rank);
    node->set_source("rpc_test.cc:1");
    graph->add_outputs()->set_value(1);
    v1::GroupSlot* group = graph->add_group_slots();
    group->set_size(world_size);
    group->add_held_ranks(rank);
    return command;
  }

  // One run of graph `slot`, whose result gets the name (sequence, 1): the rank's call `call`, or
  // where that is -1 the next one as the daemon counts.
  v1::Command RunCommand(int64_t sequence, int slot, int64_t epoch, int64_t call,
                         const std::vector<float>& input) const {
    v1::Command command;
    command.set_sequence(sequence);
    v1::Run* run = command.mutable_run();
    run->mutable_graph()->set_slot(slot);
    run->mutable_graph()->set_generation(1);
    run->add_inputs()->set_inline_(Floats(input));
    v1::TensorId* out = run->add_outputs()->mutable_fresh();
    out->set_slot(static_cast<int32_t>(sequence));
    out->set_generation(1);
    v1::RunGroup* group = run->add_groups();
    group->set_world(world);
    group->set_epoch(epoch);
    if (call >= 0) group->add_base()->set_call(call);
    return command;
  }

  absl::Status Submit(const v1::Command& command, absl::Duration timeout = absl::Seconds(30)) {
    v1::SubmitRequest request;
    request.set_session(session);
    *request.mutable_command() = command;
    v1::SubmitResponse response;
    return Ask(*log, &v1::Log::Stub::Submit, request, &response, timeout);
  }

  absl::Status Wait(int64_t sequence, absl::Duration timeout = absl::Seconds(30)) {
    v1::WaitRequest request;
    request.set_session(session);
    request.set_sequence(sequence);
    v1::WaitResponse response;
    return Ask(*log, &v1::Log::Stub::Wait, request, &response, timeout);
  }

  // The parts of a download.
  absl::StatusOr<std::vector<v1::DownloadTensorResponse>> Download(int slot, int64_t offset = 0,
                                                                   int64_t size = 0) {
    v1::DownloadTensorRequest request;
    request.set_session(session);
    request.mutable_tensor()->set_slot(slot);
    request.mutable_tensor()->set_generation(1);
    request.set_offset_bytes(offset);
    request.set_size_bytes(size);
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(30)));
    auto reader = tensors->Download(&context, request);
    std::vector<v1::DownloadTensorResponse> parts;
    v1::DownloadTensorResponse part;
    while (reader->Read(&part)) parts.push_back(part);
    CHORUS_RETURN_IF_ERROR(FromGrpc(reader->Finish()));
    return parts;
  }

  absl::StatusOr<std::vector<float>> DownloadFloats(int slot) {
    CHORUS_ASSIGN_OR_RETURN(const auto parts, Download(slot));
    std::string bytes;
    for (const auto& part : parts) bytes += part.data();
    std::vector<float> values(bytes.size() / sizeof(float));
    memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
    return values;
  }

  absl::StatusOr<v1::ListSessionsResponse> ListSessions() {
    v1::ListSessionsResponse response;
    CHORUS_RETURN_IF_ERROR(Ask(*diagnostics, &v1::Diagnostics::Stub::ListSessions,
                               v1::ListSessionsRequest(), &response));
    return response;
  }

  absl::StatusOr<v1::ListPendingResponse> ListPending() {
    v1::ListPendingResponse response;
    CHORUS_RETURN_IF_ERROR(Ask(*diagnostics, &v1::Diagnostics::Stub::ListPending,
                               v1::ListPendingRequest(), &response));
    return response;
  }

  std::unique_ptr<v1::Sessions::Stub> sessions;
  std::unique_ptr<v1::Worlds::Stub> worlds;
  std::unique_ptr<v1::Tensors::Stub> tensors;
  std::unique_ptr<v1::Log::Stub> log;
  std::unique_ptr<v1::Diagnostics::Stub> diagnostics;
  int64_t session = 0;
  int64_t world = 0;
  int world_size = 1;
  int rank = 0;
};

// Asks again until `done()`; false after `timeout`.
template <typename Done>
bool Eventually(Done done, absl::Duration timeout = absl::Seconds(20)) {
  const absl::Time deadline = absl::Now() + timeout;
  while (absl::Now() < deadline) {
    if (done()) return true;
  }
  return false;
}

}  // namespace chorus::server

#endif  // CHORUS_SERVER_TESTING_RPC_H_
