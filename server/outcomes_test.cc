// What calls ask of the node thread, and outcomes of a stream of commands that the worker has not
// come to, by a server that has no daemon around it.

#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "chorus/v1/log.grpc.pb.h"
#include "chorus/v1/tensors.grpc.pb.h"
#include "core/base/alarms.h"
#include "core/base/error.h"
#include "core/base/unique_fd.h"
#include "core/node/node_loop.h"
#include "core/node/options.h"
#include "core/node/requests.h"
#include "core/runtime/devices.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "proto/convert/errors_convert.h"
#include "server/acceptor.h"
#include "server/call_guard.h"
#include "server/own_memory.h"
#include "server/peers.h"
#include "server/service/context.h"
#include "server/service/farewell.h"
#include "server/service/log_service.h"
#include "server/service/room.h"
#include "server/service/tensors_service.h"
#include "server/service/worker.h"
#include "server/testing/rpc.h"
#include "server/testing/test_daemon.h"
#include "server/unix_listener.h"

namespace chorus::server {
namespace {

constexpr int kCommands = 300;
constexpr int64_t kRoom = int64_t{7} << 16;  // more than their outcomes take, of one user

class OutcomesTest : public ::testing::Test {
 protected:
  OutcomesTest() {
    const std::string path = daemon_.folder() + "/other.sock";
    absl::StatusOr<UniqueFd> listener = ListenUnix(path, SOCK_STREAM, SocketAccess());
    EXPECT_TRUE(listener.ok()) << listener.status();
    context_.loop = &loop_;
    context_.worker = &worker_;
    context_.alarms = &alarms_;
    context_.peers = &peers_;
    context_.farewell = &farewell_;
    context_.parsing = &parsing_;
    context_.answers = &answers_;
    context_.streams = &streams_;
    context_.reads = &reads_;
    context_.answering = &answering_;
    context_.incarnation = 1;
    context_.max_wait = absl::Minutes(10);
    context_.read_timeout = absl::Minutes(10);
    context_.download_timeout = absl::Minutes(10);
    log_ = MakeLogService(&context_);
    tensors_ = MakeTensorsService(&context_);
    grpc::ServerBuilder builder;
    std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> guards;
    guards.push_back(GuardCalls(&peers_, &blocking_));
    builder.experimental().SetInterceptorCreators(std::move(guards));
    builder.RegisterService(log_.get());
    builder.RegisterService(tensors_.get());
    server_ = builder.BuildAndStart();
    std::vector<Acceptor::Listener> listeners;
    listeners.push_back({*std::move(listener), /*is_unix=*/true});
    PeerTable::Idle idle;
    idle.first_call = absl::Hours(1);
    idle.next_call = absl::Hours(1);
    acceptor_ =
        std::make_unique<Acceptor>(std::move(listeners), std::move(idle), &peers_, server_.get());
    OnNode([this](node::LocalNode& node, absl::Time now) {
      node::OpenSessionRequest open;
      open.tenant = tenant_;
      open.devices = {DeviceIndex(0)};
      const absl::StatusOr<node::SessionInfo> opened = node.OpenSession(open, now);
      EXPECT_TRUE(opened.ok()) << opened.status();
      if (opened.ok()) session_ = opened->id;
    });
    const auto channel = grpc::CreateChannel("unix:" + path, grpc::InsecureChannelCredentials());
    client_ = v1::Log::NewStub(channel);
    tensors_client_ = v1::Tensors::NewStub(channel);
    stream_ = client_->Commands(&call_);
  }
  ~OutcomesTest() override {
    acceptor_->Stop(absl::ZeroDuration());
    server_->Shutdown();
    server_->Wait();
    worker_.Stop();
  }

  // Commands wait for the first however slow the machine is.
  static node::NodeOptions Options() {
    node::NodeOptions options;
    options.gap_timeout = absl::Hours(1);
    return options;
  }

  // Returns when the node thread has done `task`, behind all that it was asked before.
  void OnNode(const node::NodeLoop::Task& task) {
    std::promise<void> done;
    loop_.PostBehindAll([&](node::LocalNode& node, absl::Time now) {
      task(node, now);
      done.set_value();
    });
    done.get_future().wait();
  }

  // One that fails at once.
  void Send(int64_t sequence) {
    v1::CommandsRequest request;
    request.set_session(WireSession(context_.incarnation, session_));
    request.mutable_command()->set_sequence(sequence);
    request.mutable_command()->mutable_make_readable()->add_tensors()->set_generation(1);
    EXPECT_TRUE(stream_->Write(request));
  }
  // Commands 2 .. kCommands + 1 are with the log.
  void SendAllButTheFirst() {
    for (int64_t sequence = 2; sequence <= kCommands + 1; ++sequence) Send(sequence);
    Send(0);  // is none, and answered when it has been read
    v1::CommandsResponse response;
    EXPECT_TRUE(stream_->Read(&response));
    EXPECT_EQ(response.sequence(), 0);
    // And the stream reads on.
    OnNode([](node::LocalNode&, absl::Time) {});
    std::promise<void> done;
    worker_.Post(tenant_, [&done] { done.set_value(); });
    done.get_future().wait();
  }
  // The first comes, and so the log takes all: returns when each has its outcome.
  void TakeAll() {
    TakeAllBy([this] { Send(1); });
  }
  void TakeAllBy(const std::function<void()>& send_first) {
    std::promise<void> last;
    loop_.PostOwn([&](node::LocalNode& node, absl::Time) {
      node.WaitOutcome(session_, Sequence(kCommands + 1), absl::InfiniteFuture(),
                       [&last](const node::Outcome&) { last.set_value(); });
    });
    send_first();
    last.get_future().wait();
    OnNode([](node::LocalNode&, absl::Time) {});
  }
  // How many outcomes come before the stream ends.
  int ReadAll() {
    v1::CommandsResponse response;
    int outcomes = 0;
    for (; stream_->Read(&response); ++outcomes) EXPECT_TRUE(response.has_error());
    return outcomes;
  }

  const std::string tenant_ = absl::StrCat("uid:", geteuid());
  TestDaemon daemon_;  // for its folder and its backend
  ServiceContext context_;
  Room parsing_{kMaxParsedBytes};
  SharedRoom answers_{kRoom / 7 * 8, "bytes of answers"};
  SharedRoom streams_{2 * kMaxMessageBytes, "bytes of streams"};
  SharedRoom blocking_{1, "calls"};
  CallTurns reads_{8};
  CallTurns answering_{8};
  PeerTable peers_{geteuid(), /*max_connections=*/8, {16, 16, 16}};
  Farewell farewell_;
  Alarms alarms_;
  ServiceWorker worker_{[](const std::vector<SessionId>&) {}, absl::Hours(1)};
  node::NodeLoop loop_{Options(), DevicesOf(daemon_.backend())};
  std::unique_ptr<grpc::Service> log_;
  std::unique_ptr<grpc::Service> tensors_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Acceptor> acceptor_;
  SessionId session_;
  std::unique_ptr<v1::Log::Stub> client_;
  std::unique_ptr<v1::Tensors::Stub> tensors_client_;
  grpc::ClientContext call_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::CommandsRequest, v1::CommandsResponse>> stream_;
};

// The node is done with thousands at a time, where what they wait for fails.
TEST_F(OutcomesTest, CountBeforeTheWorkerHasComeToThem) {
  SendAllButTheFirst();
  std::promise<void> go;
  std::promise<void> waits;
  worker_.Post(tenant_, [&] {
    waits.set_value();
    go.get_future().wait();
  });
  waits.get_future().wait();
  // What there is room for, but for ten of them.
  std::vector<SharedRoom::Part> others;
  constexpr int64_t kOfTen = int64_t{10} << 10;
  others.push_back(*answers_.Take(tenant_, kRoom - kOfTen));
  TakeAll();
  EXPECT_FALSE(answers_.Take(tenant_, kOfTen / 5).ok());
  go.set_value();
  EXPECT_LT(ReadAll(), 50);
  const absl::Status end = FromGrpc(stream_->Finish());
  EXPECT_EQ(ErrorOf(end).reason, Reason::kQuota) << end;
  // What they had of it is free.
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (!answers_.Take(tenant_, kOfTen).ok()) {
    ASSERT_LT(absl::Now(), deadline);
    std::this_thread::yield();
  }
}

TEST_F(OutcomesTest, AllComeWhereThereIsRoom) {
  SendAllButTheFirst();
  std::promise<void> go;
  worker_.Post(tenant_, [&] { go.get_future().wait(); });
  TakeAll();
  EXPECT_FALSE(answers_.Take(tenant_, kRoom / 2).ok());
  go.set_value();
  stream_->WritesDone();
  EXPECT_EQ(ReadAll(), kCommands + 1);
  const absl::Status end = FromGrpc(stream_->Finish());
  EXPECT_TRUE(end.ok()) << end;
  EXPECT_TRUE(answers_.Take(tenant_, kRoom).ok());
}

// Nobody reads them.
TEST_F(OutcomesTest, TakeNoRoomOnceTheirStreamHasEnded) {
  SendAllButTheFirst();
  call_.TryCancel();
  EXPECT_EQ(stream_->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([this] { return peers_.calls() == 0; }));
  std::promise<void> go;
  worker_.Post(tenant_, [&] { go.get_future().wait(); });
  std::thread first;
  TakeAllBy([&] {
    first = std::thread([this] {
      v1::SubmitRequest request;
      request.set_session(WireSession(context_.incarnation, session_));
      request.mutable_command()->set_sequence(1);
      request.mutable_command()->mutable_release();
      v1::SubmitResponse response;
      const absl::Status told = Ask(*client_, &v1::Log::Stub::Submit, request, &response);
      EXPECT_TRUE(told.ok()) << told;
    });
  });
  EXPECT_TRUE(answers_.Take(tenant_, kRoom).ok());
  go.set_value();
  first.join();
}

// However much another tenant asks for, or the node for itself: a call waits behind its own
// tenant's.
class TurnsTest : public OutcomesTest {
 protected:
  // The node thread does nothing until the promise is kept, and then has a lot to do for others.
  std::promise<void> Occupy() {
    std::promise<void> go;
    auto begun = std::make_shared<std::promise<void>>();
    loop_.PostOwn([begun, gone = std::make_shared<std::future<void>>(go.get_future())](
                      node::LocalNode&, absl::Time) {
      begun->set_value();
      gone->wait();
    });
    begun->get_future().wait();
    for (int i = 0; i < 600; ++i) {
      loop_.PostOwn([this](node::LocalNode&, absl::Time) { ++of_node_; });
      loop_.Post("another", [this](node::LocalNode&, absl::Time) { ++of_another_; });
    }
    return go;
  }
  // What `look` gives behind what this tenant's calls have asked of the node by now, which is
  // `before` tasks.
  int64_t BehindOwn(std::promise<void> go, int before,
                    const std::function<int64_t(node::LocalNode&)>& look) {
    std::promise<int64_t> seen;
    loop_.Post(tenant_, [&](node::LocalNode& node, absl::Time) {
      ExpectTurn(before + 1);
      seen.set_value(look(node));
    });
    go.set_value();
    return seen.get_future().get();
  }
  // The node thread's, in the tenant's so manieth task: others have had as many.
  void ExpectTurn(int own) const {
    EXPECT_LE(of_node_, own);
    EXPECT_LE(of_another_, own);
  }
  void EndStream() {
    stream_->WritesDone();
    ReadAll();
    EXPECT_TRUE(stream_->Finish().ok());
  }

  // The node thread's.
  int of_node_ = 0;
  int of_another_ = 0;
};

TEST_F(TurnsTest, ACommandOfAStreamHasOneOfItsTenants) {
  std::promise<void> taken;
  OnNode([&](node::LocalNode& node, absl::Time) {
    node.WaitOutcome(session_, Sequence(1), absl::InfiniteFuture(), [&](const node::Outcome&) {
      ExpectTurn(1);
      taken.set_value();
    });
  });
  std::promise<void> go = Occupy();
  Send(1);
  Send(0);  // is none, and answered when it has been read
  v1::CommandsResponse response;
  EXPECT_TRUE(stream_->Read(&response));
  EXPECT_EQ(response.sequence(), 0);
  go.set_value();
  taken.get_future().wait();
  EndStream();
}

// The tensor is the node's until then.
TEST_F(TurnsTest, TheEndOfADownloadHasOneOfItsTenants) {
  constexpr int64_t kBytes = 16 * node::kMaxChunkBytes;  // more than gRPC sends ahead
  const int64_t session = WireSession(context_.incarnation, session_);
  v1::CreateStagingRequest stage;
  stage.set_session(session);
  stage.set_size_bytes(kBytes);
  v1::CreateStagingResponse staging;
  absl::Status made = Ask(*tensors_client_, &v1::Tensors::Stub::CreateStaging, stage, &staging);
  ASSERT_TRUE(made.ok()) << made;
  v1::CreateTensorRequest create;
  create.set_session(session);
  create.set_sequence(1);
  v1::CreateTensor* const tensor = create.mutable_tensor();
  tensor->mutable_id()->set_generation(1);
  tensor->mutable_type()->set_dtype(v1::DTYPE_U8);
  tensor->mutable_type()->add_dims(kBytes);
  tensor->mutable_source()->mutable_external()->set_arena(staging.arena());
  v1::CreateTensorResponse created;
  made = Ask(*tensors_client_, &v1::Tensors::Stub::Create, create, &created);
  ASSERT_TRUE(made.ok()) << made;
  grpc::ClientContext call;
  v1::DownloadTensorRequest request;
  request.set_session(session);
  request.mutable_tensor()->set_generation(1);
  const auto download = tensors_client_->Download(&call, request);
  v1::DownloadTensorResponse part;
  ASSERT_TRUE(download->Read(&part));
  std::promise<void> go = Occupy();
  while (download->Read(&part)) {
  }
  EXPECT_TRUE(download->Finish().ok());
  EXPECT_EQ(BehindOwn(std::move(go), /*before=*/1,
                      [](node::LocalNode& node) { return node.Stats("").paths.streamed_bytes; }),
            kBytes);
  EndStream();
}

TEST_F(TurnsTest, WhoGoesWhileItWaitsIsForgottenInOneOfItsTenants) {
  const auto used = [](node::LocalNode& node) { return node.Stats("").memory_used_bytes; };
  int64_t without = 0;
  OnNode([&](node::LocalNode& node, absl::Time) {
    // The next one is charged for.
    for (int64_t i = 0; i < node::kFreeWaits; ++i) {
      node.WaitOutcome(session_, Sequence(100 + i), absl::InfiniteFuture(),
                       [](const node::Outcome&) {});
    }
    without = used(node);
  });
  grpc::ClientContext call;
  std::thread waits([&] {
    v1::WaitRequest request;
    request.set_session(WireSession(context_.incarnation, session_));
    request.set_sequence(50);
    v1::WaitResponse response;
    EXPECT_EQ(client_->Wait(&call, request, &response).error_code(), grpc::StatusCode::CANCELLED);
  });
  int64_t with = without;
  EXPECT_TRUE(Eventually([&] {
    OnNode([&](node::LocalNode& node, absl::Time) { with = used(node); });
    return with > without;
  }));
  std::promise<void> go = Occupy();
  call.TryCancel();
  waits.join();
  EXPECT_TRUE(Eventually([&] { return peers_.calls() == 1; })) << "the stream";
  EXPECT_EQ(BehindOwn(std::move(go), /*before=*/1, used), without);
  EndStream();
}

}  // namespace
}  // namespace chorus::server
