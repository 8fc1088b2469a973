#include "benchmarks/grpc_round_trip.h"

#include <cstdio>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "benchmarks/timed_loop.h"
#include "core/base/error.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/health_check_service_interface.h"

namespace chorus {
namespace bench {
namespace {

// HealthCheckRequest{} in, HealthCheckResponse{status: SERVING} out.
absl::Status CheckOnce(grpc::GenericStub* stub, grpc::CompletionQueue* queue) {
  grpc::ClientContext context;
  const grpc::Slice nothing;
  const grpc::ByteBuffer request(&nothing, 1);
  grpc::ByteBuffer response;
  grpc::Status status;
  std::unique_ptr<grpc::GenericClientAsyncResponseReader> call =
      stub->PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", request, queue);
  call->StartCall();
  call->Finish(&response, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue->Next(&tag, &ok);
  if (!status.ok()) return absl::UnavailableError(status.error_message());
  std::vector<grpc::Slice> slices;
  (void)response.Dump(&slices);
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  if (bytes != std::string("\x08\x01", 2)) return absl::DataLossError("not serving");
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<HelperGroup>> StartOne(const ScratchDirectory& scratch,
                                                      const std::string& name,
                                                      const std::string& socket) {
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<HelperGroup> group,
                          HelperGroup::Create(scratch, name, 1));
  CHORUS_ASSIGN_OR_RETURN(
      Process process,
      Process::Start({"/proc/self/exe", absl::StrCat("--helper=", name),
                      absl::StrCat("--control=", group->path()), absl::StrCat("--socket=", socket)},
                     {}));
  group->Own(std::move(process));
  CHORUS_RETURN_IF_ERROR(group->AwaitHellos());
  return group;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcRoundTrip>> GrpcRoundTrip::Start(
    const ScratchDirectory& scratch) {
  const std::string socket = absl::StrCat(scratch.path(), "/grpc.sock");
  auto round_trip = std::make_unique<GrpcRoundTrip>();
  CHORUS_ASSIGN_OR_RETURN(round_trip->server_, StartOne(scratch, "grpc_server", socket));
  CHORUS_ASSIGN_OR_RETURN(round_trip->client_, StartOne(scratch, "grpc_client", socket));
  return round_trip;
}

absl::StatusOr<std::vector<double>> GrpcRoundTrip::Run(int64_t iterations) {
  Task task;
  task.op = "check";
  task.warm_up = iterations / 10 + 1;
  return client_->Sample(task, iterations);
}

int RunGrpcServerHelper(const std::string& control_path, const std::string& socket) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  builder.AddListeningPort(absl::StrCat("unix:", socket), grpc::InsecureServerCredentials());
  // Nothing arrives on it, but it does the polling: the health service alone is no reason for gRPC
  // to have threads.
  const std::unique_ptr<grpc::ServerCompletionQueue> queue = builder.AddCompletionQueue();
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) {
    std::fprintf(stderr, "cannot listen on %s\n", socket.c_str());
    return 1;
  }
  std::thread poller([&queue] {
    void* tag = nullptr;
    bool ok = false;
    while (queue->Next(&tag, &ok)) {
    }
  });
  const int status = RunHelper(control_path, 0, [](const Task&) { return Outcome(); });
  server->Shutdown();
  queue->Shutdown();
  poller.join();
  return status;
}

int RunGrpcClientHelper(const std::string& control_path, const std::string& socket) {
  grpc::GenericStub stub(
      grpc::CreateChannel(absl::StrCat("unix:", socket), grpc::InsecureChannelCredentials()));
  grpc::CompletionQueue queue;
  return RunHelper(control_path, 0, [&stub, &queue](const Task& task) {
    return TimedLoop(task, [&stub, &queue] { return CheckOnce(&stub, &queue); });
  });
}

}  // namespace bench
}  // namespace chorus
