// Uploads that wait for room, by a server that has no daemon around it.

#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "chorus/v1/tensors.grpc.pb.h"
#include "core/base/unique_fd.h"
#include "core/node/node_loop.h"
#include "core/node/requests.h"
#include "core/runtime/devices.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "server/acceptor.h"
#include "server/call_guard.h"
#include "server/own_memory.h"
#include "server/peers.h"
#include "server/service/context.h"
#include "server/service/room.h"
#include "server/service/tensors_service.h"
#include "server/service/worker.h"
#include "server/testing/test_daemon.h"
#include "server/unix_listener.h"

namespace chorus::server {
namespace {

TEST(UploadsTest, OneThatWaitsForRoomTakesNoneOfParsing) {
  TestDaemon daemon;  // for its folder and its backend
  const std::string path = daemon.folder() + "/other.sock";
  absl::StatusOr<UniqueFd> listener = ListenUnix(path, SOCK_STREAM, SocketAccess());
  ASSERT_TRUE(listener.ok()) << listener.status();
  Room parsing(kMaxParsedBytes);
  Room uploads(kMaxUploadBytes);
  SharedRoom blocking(1, "calls");
  CallTurns reads(8);
  CallTurns answering(8);
  PeerTable peers(geteuid(), /*max_connections=*/8, {16, 16, 16});
  ServiceWorker worker([](const std::vector<SessionId>&) {}, absl::Hours(1));
  node::NodeLoop loop(node::NodeOptions(), DevicesOf(daemon.backend()));
  ServiceContext context;
  context.loop = &loop;
  context.worker = &worker;
  context.peers = &peers;
  context.parsing = &parsing;
  context.uploads = &uploads;
  context.reads = &reads;
  context.answering = &answering;
  context.incarnation = 1;
  context.max_wait = absl::Minutes(10);
  context.read_timeout = absl::Minutes(10);
  context.download_timeout = absl::Minutes(10);
  const std::unique_ptr<grpc::Service> service = MakeTensorsService(&context);
  grpc::ServerBuilder builder;
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> guards;
  guards.push_back(GuardCalls(&peers, &blocking));
  builder.experimental().SetInterceptorCreators(std::move(guards));
  builder.RegisterService(service.get());
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  std::vector<Acceptor::Listener> listeners;
  listeners.push_back({*std::move(listener), /*is_unix=*/true});
  PeerTable::Idle idle;
  idle.first_call = absl::Hours(1);
  idle.next_call = absl::Hours(1);
  Acceptor acceptor(std::move(listeners), std::move(idle), &peers, server.get());

  auto all = std::make_unique<Room::Part>(uploads.Enter(kMaxUploadBytes));
  std::thread waits([&path] {
    const auto stub = v1::Tensors::NewStub(
        grpc::CreateChannel("unix:" + path, grpc::InsecureChannelCredentials()));
    v1::WriteStagingRequest request;
    request.set_data(std::string(node::kMaxChunkBytes, 'x'));
    grpc::ClientContext call;
    v1::WriteStagingResponse response;
    // It is of no session.
    EXPECT_EQ(stub->WriteStaging(&call, request, &response).error_code(),
              grpc::StatusCode::INVALID_ARGUMENT);
  });
  while (uploads.waiting() == 0) std::this_thread::yield();
  const std::future<void> others =
      std::async(std::launch::async, [&parsing] { parsing.Enter(kMaxParsedBytes); });
  EXPECT_EQ(others.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  all.reset();
  waits.join();
  acceptor.Stop(absl::ZeroDuration());
  server->Shutdown();
}

}  // namespace
}  // namespace chorus::server
