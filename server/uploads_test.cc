// Uploads that the node has not come to, by a server that has no daemon around it.

#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "chorus/v1/tensors.grpc.pb.h"
#include "core/base/alarms.h"
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
#include "server/service/call_turns.h"
#include "server/service/context.h"
#include "server/service/room.h"
#include "server/service/tensors_service.h"
#include "server/service/worker.h"
#include "server/tenant_log.h"
#include "server/testing/rpc.h"
#include "server/testing/test_daemon.h"
#include "server/unix_listener.h"

namespace chorus::server {
namespace {

// A server of uploads that has no daemon around it, and a node that does nothing else.
class UploadsTest : public ::testing::Test {
 protected:
  void Serve(int64_t reads_of_one_connection, int64_t reads) {
    reads_ = std::make_unique<CallTurns>(reads_of_one_connection, reads);
    context_.loop = &loop_;
    context_.worker = &worker_;
    context_.alarms = &alarms_;
    context_.peers = &peers_;
    context_.parsing = &parsing_;
    context_.reads = reads_.get();
    context_.answering = &answering_;
    context_.incarnation = 1;
    context_.max_wait = absl::Minutes(10);
    context_.read_timeout = absl::Minutes(10);
    context_.download_timeout = absl::Minutes(10);
    service_ = MakeTensorsService(&context_);
    grpc::ServerBuilder builder;
    std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> guards;
    guards.push_back(GuardCalls(&peers_, &blocking_));
    builder.experimental().SetInterceptorCreators(std::move(guards));
    builder.RegisterService(service_.get());
    server_ = builder.BuildAndStart();
    absl::StatusOr<UniqueFd> listener = ListenUnix(path_, SOCK_STREAM, SocketAccess());
    ASSERT_TRUE(listener.ok()) << listener.status();
    std::vector<Acceptor::Listener> listeners;
    listeners.push_back({*std::move(listener), /*is_unix=*/true});
    PeerTable::Idle idle;
    idle.first_call = absl::Hours(1);
    idle.next_call = absl::Hours(1);
    acceptor_ =
        std::make_unique<Acceptor>(std::move(listeners), std::move(idle), &peers_, server_.get());
  }
  ~UploadsTest() override {
    acceptor_->Stop(absl::ZeroDuration());
    server_->Shutdown();
  }

  // On the node thread, behind what was posted before.
  void OnNode(const node::NodeLoop::Task& task) {
    std::promise<void> done;
    loop_.PostBehindAll([&](node::LocalNode& node, absl::Time now) {
      task(node, now);
      done.set_value();
    });
    done.get_future().wait();
  }
  std::unique_ptr<v1::Tensors::Stub> Connect() const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return v1::Tensors::NewStub(
        grpc::CreateCustomChannel("unix:" + path_, grpc::InsecureChannelCredentials(), arguments));
  }

  TestDaemon daemon_;  // for its folder and its backend
  const std::string path_ = daemon_.folder() + "/other.sock";
  const std::string tenant_ = TenantOf(geteuid());
  Room parsing_{kMaxParsedBytes};
  SharedRoom blocking_{1, "calls"};
  std::unique_ptr<CallTurns> reads_;
  CallTurns answering_{8};
  PeerTable peers_{geteuid(), /*max_connections=*/16, {128, 128, 128}};
  Alarms alarms_;
  ServiceWorker worker_{[](const std::vector<SessionId>&) {}, absl::Hours(1)};
  node::NodeLoop loop_{node::NodeOptions(), DevicesOf(daemon_.backend())};
  ServiceContext context_;
  std::unique_ptr<grpc::Service> service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Acceptor> acceptor_;
};

// It is not over before it has been answered.
struct UploadCall {
  grpc::ClientContext context;
  v1::WriteStagingRequest request;
  v1::WriteStagingResponse response;
  std::promise<grpc::StatusCode> code;

  void Start(v1::Tensors::Stub* stub) {
    stub->async()->WriteStaging(&context, &request, &response, [this](const grpc::Status& status) {
      code.set_value(status.error_code());
    });
  }
};

// A call that needs neither the node nor room finds one of gRPC's threads.
TEST_F(UploadsTest, ThoseThatWaitForTheNodeHaveNoThreads) {
  Serve(kMaxReads / 8, kMaxReads);
  std::promise<void> go;
  loop_.PostOwn([&go](node::LocalNode&, absl::Time) { go.get_future().wait(); });
  // Of each connection some wait to be read; of the user's turns some are left.
  constexpr size_t kConnections = 6;
  std::vector<std::unique_ptr<v1::Tensors::Stub>> stubs;
  std::vector<std::unique_ptr<UploadCall>> uploads;
  for (size_t i = 0; i < kConnections; ++i) stubs.push_back(Connect());
  for (size_t i = 0; i < 8 * kConnections; ++i) {
    uploads.push_back(std::make_unique<UploadCall>());
    UploadCall& upload = *uploads.back();
    upload.request.set_session(WireSession(1, SessionId(1)));
    upload.request.set_data(std::string(node::kMaxChunkBytes, 'x'));
    upload.Start(stubs[i % kConnections].get());
  }
  EXPECT_TRUE(Eventually([&] { return peers_.calls() == static_cast<int>(uploads.size()); }));
  const std::unique_ptr<v1::Tensors::Stub> other = Connect();
  for (int i = 0; i < 100; ++i) {
    v1::ReleaseStagingResponse response;
    EXPECT_EQ(Ask(*other, &v1::Tensors::Stub::ReleaseStaging, v1::ReleaseStagingRequest(),
                  &response, absl::Seconds(20))
                  .code(),
              absl::StatusCode::kInvalidArgument);
    if (HasFailure()) break;
  }
  go.set_value();
  for (const auto& upload : uploads) {
    EXPECT_EQ(upload->code.get_future().get(), grpc::StatusCode::NOT_FOUND);
  }
}

// So there is never more of them than may be read at a time.
TEST_F(UploadsTest, OneHasItsTurnUntilItIsWritten) {
  Serve(/*reads_of_one_connection=*/1, /*reads=*/1);
  SessionId session;
  std::promise<ArenaId> made;
  OnNode([&](node::LocalNode& node, absl::Time now) {
    node::OpenSessionRequest open;
    open.tenant = tenant_;
    session = node.OpenSession(open, now)->id;
    node.CreateStaging(session, node::kMaxChunkBytes,
                       [&](const auto& staging) { made.set_value(staging->arena); });
  });
  const ArenaId arena = made.get_future().get();
  // There is always one of the user's: whatever writes the first slice has the next one behind it.
  std::promise<void> half_written;
  std::promise<void> go;
  std::function<void(node::LocalNode&, absl::Time)> look = [&](node::LocalNode& node, absl::Time) {
    const int64_t written = node.Stats(/*tenant=*/"").paths.streamed_bytes;
    if (written == 0) return loop_.Post(tenant_, look);
    EXPECT_LT(written, node::kMaxChunkBytes);
    half_written.set_value();
    go.get_future().wait();
  };
  loop_.Post(tenant_, look);
  const std::unique_ptr<v1::Tensors::Stub> stub = Connect();
  UploadCall upload;
  upload.request.set_session(WireSession(1, session));
  upload.request.set_arena(arena.value());
  upload.request.set_data(std::string(node::kMaxChunkBytes, 'x'));
  upload.Start(stub.get());
  half_written.get_future().wait();
  // What the node has come to ends its turn there.
  std::promise<void> worker_done;
  worker_.Post(tenant_, [&] { worker_done.set_value(); });
  worker_done.get_future().wait();
  std::atomic<bool> has_turn{false};
  std::promise<void> next;
  reads_->Enter({tenant_, 1}, [&](CallTurns::Turn) {
    has_turn = true;
    next.set_value();
  });
  EXPECT_FALSE(has_turn);
  go.set_value();
  EXPECT_EQ(upload.code.get_future().get(), grpc::StatusCode::OK);
  next.get_future().wait();
}

}  // namespace
}  // namespace chorus::server
