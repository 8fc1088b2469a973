// Commands that cannot be sent, or that the daemon does not take, leave no gap in the log.
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "client/internal/link.h"
#include "client/internal/session_core.h"
#include "client/link/grpc_links.h"
#include "client/link/open_link.h"
#include "client/link/rpc_link.h"
#include "core/backend/host/host_backend.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "core/base/thread_pool.h"
#include "core/graph/encoding.h"
#include "core/ops/host_kernels.h"
#include "core/transport/command.h"
#include "core/transport/frame_format.h"
#include "gmock/gmock.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "gtest/gtest.h"
#include "server/daemon.h"
#include "server/testing/rpc.h"

namespace chorus {
namespace {

using internal::Link;
using internal::OpenLink;
using internal::SessionCore;
using internal::SessionLock;

struct Way {
  Transport transport;
  bool tcp;
  const char* name;
};

class NumberingTest : public ::testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    char directory[] = "/tmp/chorus_XXXXXX";
    ASSERT_NE(::mkdtemp(directory), nullptr);
    directory_ = directory;
    pool_ = std::make_unique<ThreadPool>(2);
    HostBackendOptions backend;
    backend.devices = 1;
    backend.pool = pool_.get();
    backend.make_kernel = MakeHostKernel;
    backend_ = CreateHostBackend(backend);
    server::DaemonOptions options;
    options.listen = {*server::ParseListenAddress("unix:" + directory_ + "/d.sock"),
                      *server::ParseListenAddress("127.0.0.1:0")};
    options.insecure_loopback = true;
    options.node.gap_timeout = absl::Milliseconds(200);
    Change(&options);
    absl::StatusOr<std::unique_ptr<server::Daemon>> daemon =
        server::Daemon::Start(options, DevicesOf(backend_.get()));
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    SessionOptions session;
    session.address = daemon_->addresses()[GetParam().tcp ? 1 : 0].ToString();
    session.transport = GetParam().transport;
    absl::StatusOr<std::unique_ptr<Link>> link = OpenLink(session);
    ASSERT_TRUE(link.ok()) << link.status();
    internal::WaitReportOptions reports;
    reports.write = [this](const std::string& report) { reports_ += report; };
    core_ = SessionCore::Make(*std::move(link), absl::Seconds(60), reports);
  }
  virtual void Change(server::DaemonOptions*) {}
  void TearDown() override {
    core_.reset();
    daemon_.reset();
    backend_.reset();
    std::system(("rm -rf " + directory_).c_str());
  }

  absl::StatusOr<Sequence> Submit(CommandBody body) {
    SessionLock lock(core_.get());
    CHORUS_RETURN_IF_ERROR(lock.status());
    return core_->log().Submit(std::move(body));
  }
  // Of the one rank of a world.
  absl::StatusOr<Sequence> SubmitRefusal(const Error& why) {
    Link& link = core_->link();
    WorldOptions options;
    options.name = "alone";
    options.rank = 0;
    options.size = 1;
    CHORUS_ASSIGN_OR_RETURN(const internal::JoinedWorld world,
                            link.Join(options, link.devices().front()));
    Refuse refuse;
    refuse.world = world.world;
    refuse.epoch = world.epoch;
    refuse.members.resize(1);
    refuse.members.front().rank = Rank(0);
    refuse.why = why;
    return Submit(refuse);
  }
  absl::Status Outcome(Sequence sequence) {
    return core_->link().WaitCommand(sequence, absl::Seconds(60));
  }
  std::shared_ptr<grpc::Channel> Connect() const {
    return grpc::CreateChannel(daemon_->addresses()[0].ToString(),
                               grpc::InsecureChannelCredentials());
  }
  // Several commands: what comes after a gap is told only when nothing fills it.
  void ExpectThatTheLogGoesOn(int64_t sequence) {
    std::vector<Sequence> sent;
    for (int i = 0; i < 3; ++i) {
      const absl::StatusOr<Sequence> next = Submit(Release());
      ASSERT_TRUE(next.ok()) << next.status();
      EXPECT_EQ(next->value(), sequence + i);
      sent.push_back(*next);
    }
    for (const Sequence next : sent) {
      EXPECT_TRUE(Outcome(next).ok()) << next.value() << ": " << Outcome(next);
    }
  }

  std::string directory_;
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<server::Daemon> daemon_;
  std::shared_ptr<SessionCore> core_;
  std::string reports_;  // of long waits
};

// Nodes that use what is no value: any form of it can be encoded.
std::string WrongGraph() {
  Graph graph;
  graph.num_device_slots = 1;
  Node node;
  node.op = "neg";
  node.inputs = {-1};
  node.outputs = {TensorType(DType::kF32, {2})};
  graph.nodes.push_back(node);
  return EncodeGraph(graph);
}

TEST_P(NumberingTest, ACommandThatTheDaemonDoesNotTakeLeavesNoGap) {
  RegisterGraph body;
  body.graph = GraphId{0, 1};
  body.encoded = WrongGraph();
  const absl::StatusOr<Sequence> wrong = Submit(body);
  ASSERT_TRUE(wrong.ok()) << wrong.status();
  const int64_t next = wrong->value() + 1;
  ExpectThatTheLogGoesOn(next);
  EXPECT_EQ(Outcome(*wrong).code(), absl::StatusCode::kInvalidArgument) << Outcome(*wrong);
  EXPECT_EQ(ErrorOf(Outcome(*wrong)).reason, Reason::kMalformed) << Outcome(*wrong);
  ExpectThatTheLogGoesOn(next + 3);
}

TEST_P(NumberingTest, ACommandThatCannotBeEncodedTakesNoNumber) {
  RegisterGraph body;
  body.graph = GraphId{0, 1};
  body.encoded = "no graph";
  const absl::StatusOr<Sequence> wrong = Submit(body);
  int64_t next = 1;
  if (wrong.ok()) {  // bytes are sent as they are
    next = wrong->value() + 1;
    EXPECT_EQ(ErrorOf(Outcome(*wrong)).reason, Reason::kMalformed) << Outcome(*wrong);
  } else {
    EXPECT_EQ(wrong.status().code(), absl::StatusCode::kInvalidArgument) << wrong.status();
    EXPECT_EQ(ErrorOf(wrong.status()).reason, Reason::kMalformed) << wrong.status();
  }
  ExpectThatTheLogGoesOn(next);
}

TEST_P(NumberingTest, ACommandThatIsTooLargeTakesNoNumber) {
  // Of more bytes than a frame, and than a message of gRPC, may have.
  for (const size_t names : {kMaxFrameBytes, size_t{2} << 20}) {
    Release body;
    body.tensors.resize(names, TensorId{1 << 20, 1});
    const absl::StatusOr<Sequence> wrong = Submit(body);
    EXPECT_EQ(wrong.status().code(), absl::StatusCode::kInvalidArgument) << wrong.status();
    EXPECT_EQ(ErrorOf(wrong.status()).reason, Reason::kMalformed) << wrong.status();
  }
  ExpectThatTheLogGoesOn(1);
}

// What a command of the log comes to is told, also where it is as for one that is not taken: a
// refusal comes to what kept its rank from the call.
TEST_P(NumberingTest, ARefusalForWantOfAnAnswerIsOver) {
  const absl::StatusOr<Sequence> sent =
      SubmitRefusal(Error(Reason::kTransportTimeout, "it did not answer in time"));
  ASSERT_TRUE(sent.ok()) << sent.status();
  const absl::Status outcome = core_->link().WaitCommand(*sent, absl::Seconds(5));
  EXPECT_EQ(ErrorOf(outcome).reason, Reason::kTransportTimeout) << outcome;
  ASSERT_NE(ErrorOf(outcome).id, ErrorId()) << outcome;
  EXPECT_EQ(ErrorOf(outcome).ended.size(), 1u) << outcome;
  // Nor is that a wait that takes long.
  EXPECT_EQ(core_->WaitForRun(*sent), outcome);
  EXPECT_EQ(reports_, "");
  ExpectThatTheLogGoesOn(sent->value() + 1);
}

// A gap of another session's log is none of this one's.
TEST_P(NumberingTest, ARefusalForAGapIsOver) {
  const absl::StatusOr<Sequence> sent =
      SubmitRefusal(Error(Reason::kSequenceGap, "command 7 did not arrive within 10s"));
  ASSERT_TRUE(sent.ok()) << sent.status();
  const absl::Status outcome = core_->link().WaitCommand(*sent, absl::Seconds(5));
  EXPECT_EQ(ErrorOf(outcome).reason, Reason::kAborted) << outcome;
  EXPECT_THAT(std::string(outcome.message()), testing::HasSubstr("command 7 did not arrive"));
  EXPECT_EQ(ErrorOf(outcome).ended.size(), 1u) << outcome;
  ExpectThatTheLogGoesOn(sent->value() + 1);
}

class FullNumberingTest : public NumberingTest {
  void Change(server::DaemonOptions* options) override { options->node.max_node_graphs = 8; }
};

TEST_P(FullNumberingTest, ACommandThatFailsForWantOfRoomIsOver) {
  constexpr int kRoom = 7;  // of one user
  for (int i = 0; i <= kRoom; ++i) {
    Graph graph;
    graph.num_device_slots = 1;
    graph.inputs.resize(1);
    graph.inputs.front().type = TensorType(DType::kF32, {i + 1});
    graph.outputs.resize(1);
    RegisterGraph body;
    body.graph = GraphId{i, 1};
    body.encoded = EncodeGraph(graph);
    const absl::StatusOr<Sequence> sent = Submit(body);
    ASSERT_TRUE(sent.ok()) << sent.status();
    const absl::Status outcome = Outcome(*sent);
    EXPECT_EQ(ErrorOf(outcome).reason, i < kRoom ? Reason::kUnspecified : Reason::kQuota)
        << i << ": " << outcome;
  }
  ExpectThatTheLogGoesOn(kRoom + 2);
}

// Calls of gRPC may overtake each other, a process may be stopped between two of them, and a daemon
// may have no room for one command and some for the next.
using GrpcNumberingTest = NumberingTest;

TEST_P(GrpcNumberingTest, WhatWasRefusedForAGapIsSentAgain) {
  Link& link = core_->link();
  ASSERT_TRUE(link.Submit({Sequence(2), Release()}).ok());
  // Longer than the daemon waits for the first.
  const absl::Status early = link.WaitCommand(Sequence(2), absl::Seconds(1));
  EXPECT_EQ(ErrorOf(early).reason, Reason::kTransportTimeout) << early;
  ASSERT_TRUE(link.Submit({Sequence(1), Release()}).ok());
  EXPECT_TRUE(Outcome(Sequence(1)).ok()) << Outcome(Sequence(1));
  EXPECT_TRUE(Outcome(Sequence(2)).ok()) << Outcome(Sequence(2));
}

// Nor is the place of a command that the daemon could not read.
TEST_P(GrpcNumberingTest, ACommandThatIsNotTakenAheadOfItsTurnLeavesNoGap) {
  Link& link = core_->link();
  RegisterGraph wrong;
  wrong.graph = GraphId{0, 1};
  wrong.encoded = WrongGraph();
  ASSERT_TRUE(link.Submit({Sequence(2), wrong}).ok());
  ASSERT_TRUE(link.Submit({Sequence(3), Release()}).ok());
  // Longer than the daemon waits for the first.
  const absl::Status early = link.WaitCommand(Sequence(3), absl::Seconds(1));
  EXPECT_EQ(ErrorOf(early).reason, Reason::kTransportTimeout) << early;
  ASSERT_TRUE(link.Submit({Sequence(1), Release()}).ok());
  EXPECT_TRUE(Outcome(Sequence(1)).ok()) << Outcome(Sequence(1));
  EXPECT_EQ(ErrorOf(Outcome(Sequence(2))).reason, Reason::kMalformed) << Outcome(Sequence(2));
  EXPECT_TRUE(Outcome(Sequence(3)).ok()) << Outcome(Sequence(3));
}

// As many calls, or waits of the node, as their user may have: none ends or gives way to another.
// They are as many when `ask` is refused.
class AllCalls {
 public:
  AllCalls(const std::shared_ptr<grpc::Channel>& channel,
           const std::function<absl::Status(server::RpcRank* client)>& ask)
      : client_(channel) {
    EXPECT_TRUE(client_.Open().ok());
    EXPECT_TRUE(server::Eventually([this, &ask] {
      Begin();
      return ErrorOf(ask(&client_)).reason == Reason::kQuota;
    }));
  }
  ~AllCalls() {
    for (Wait& wait : waits_) wait.context.TryCancel();
    MutexLock lock(&mutex_);
    while (under_way_ > 0) ended_.Wait(&mutex_);
  }

 private:
  struct Wait {
    grpc::ClientContext context;
    v1::WaitRequest request;
    v1::WaitResponse response;
  };
  void Begin() {
    {
      MutexLock lock(&mutex_);
      ++under_way_;
    }
    Wait& wait = waits_.emplace_back();
    wait.request.set_session(client_.session);
    wait.request.set_sequence(1);
    client_.log->async()->Wait(&wait.context, &wait.request, &wait.response,
                               [this](const grpc::Status&) {
                                 MutexLock lock(&mutex_);
                                 --under_way_;
                                 ended_.SignalAll();
                               });
  }

  server::RpcRank client_;
  std::list<Wait> waits_;
  Mutex mutex_;
  CondVar ended_;
  int under_way_ ABSL_GUARDED_BY(mutex_) = 0;
};

class FewWaitsTest : public NumberingTest {
  void Change(server::DaemonOptions* options) override { options->node.max_waits = 8; }
};

TEST_P(FewWaitsTest, WhatTheLogHasNoRoomForIsSentAgain) {
  Link& link = core_->link();
  for (int command = 2; command <= 20; ++command) {
    ASSERT_TRUE(link.Submit({Sequence(command), Release()}).ok());
  }
  // Longer than the daemon holds those that had room.
  const absl::Status last = link.WaitCommand(Sequence(20), absl::Seconds(1));
  EXPECT_EQ(ErrorOf(last).reason, Reason::kTransportTimeout) << last;
  ASSERT_TRUE(link.Submit({Sequence(1), Release()}).ok());
  for (int command = 1; command <= 20; ++command) {
    EXPECT_TRUE(Outcome(Sequence(command)).ok()) << Outcome(Sequence(command));
  }
}

// Also where that is whatever comes, and more than may wait to be sent again.
TEST_P(FewWaitsTest, HoweverManyTheLogHasNoRoomForAreSentAgain) {
  constexpr int kMany = 100;
  // What is over is told at once: who asks for that keeps no room from anybody.
  server::RpcRank asker(Connect());
  ASSERT_TRUE(asker.Open().ok());
  v1::Command command;
  command.set_sequence(1);
  command.mutable_release();
  ASSERT_TRUE(asker.Submit(command).ok());
  const auto ask = [&asker](server::RpcRank*) { return asker.Wait(1); };
  auto others = std::make_unique<AllCalls>(Connect(), ask);
  std::thread sender([this] {
    for (int i = 0; i < kMany; ++i) {
      const absl::StatusOr<Sequence> sent = Submit(Release());
      EXPECT_TRUE(sent.ok()) << sent.status();
    }
  });
  const absl::Status first = core_->link().WaitCommand(Sequence(1), absl::Seconds(1));
  EXPECT_EQ(ErrorOf(first).reason, Reason::kTransportTimeout) << first;
  others.reset();
  sender.join();
  for (int command = 1; command <= kMany; ++command) {
    EXPECT_TRUE(Outcome(Sequence(command)).ok()) << Outcome(Sequence(command));
  }
  ExpectThatTheLogGoesOn(kMany + 1);
}

// Nobody waits for ever for what the daemon does not take.
class GivingUpTest : public NumberingTest {
 protected:
  // Of a session of its own.
  std::unique_ptr<Link> OpenImpatient() {
    internal::OpenedSession opened;
    opened.address = daemon_->addresses()[0].ToString();
    opened.channel = Connect();
    opened.submit_timeout = absl::Milliseconds(300);
    server::RpcRank client(opened.channel);
    EXPECT_TRUE(client.Open().ok());
    opened.session = session_ = client.session;
    return GetParam().transport == Transport::kUnary ? internal::MakeUnaryLink(std::move(opened))
                                                     : internal::MakeStreamLink(std::move(opened));
  }
  static void ExpectLost(Link* link, Reason reason, const std::string& missing) {
    for (const int64_t command : {2, 3, 77}) {
      const absl::Status status = link->WaitCommand(Sequence(command), absl::Seconds(60));
      EXPECT_EQ(ErrorOf(status).reason, reason) << status;
      EXPECT_THAT(std::string(status.message()), testing::HasSubstr(missing));
    }
    EXPECT_EQ(ErrorOf(link->Submit({Sequence(4), Release()})).reason, reason);
  }
  // The daemon lives, and would keep it until its lease is over.
  void ExpectThatItCanBeEnded(Link* link) const {
    server::RpcRank observer(Connect());
    observer.session = session_;
    EXPECT_TRUE(observer.Renew().ok()) << observer.Renew();
    EXPECT_TRUE(link->Close().ok());
    EXPECT_EQ(ErrorOf(observer.Renew()).reason, Reason::kSessionLost) << observer.Renew();
    EXPECT_TRUE(link->Close().ok());
  }

 private:
  int64_t session_ = 0;  // of OpenImpatient
};

TEST_P(GivingUpTest, ASessionWhoseGapIsNotFilledIsLost) {
  const std::unique_ptr<Link> link = OpenImpatient();
  ASSERT_TRUE(link->Submit({Sequence(2), Release()}).ok());
  ASSERT_TRUE(link->Submit({Sequence(3), Release()}).ok());
  ExpectLost(link.get(), Reason::kSequenceGap, "command 1 did not arrive within 200ms");
  ExpectThatItCanBeEnded(link.get());
}

class FewCallsTest : public GivingUpTest {
 protected:
  void Change(server::DaemonOptions* options) override { options->max_calls = 16; }
  std::unique_ptr<AllCalls> TakeAllCalls() const {
    return std::make_unique<AllCalls>(Connect(),
                                      [](server::RpcRank* client) { return client->Renew(); });
  }
};

TEST_P(FewCallsTest, WhatFoundNoRoomIsSentAgain) {
  std::unique_ptr<AllCalls> others = TakeAllCalls();
  std::vector<Sequence> sent;
  for (int i = 0; i < 3; ++i) sent.push_back(*Submit(Release()));
  for (const Sequence command : sent) {
    const absl::Status status = core_->link().WaitCommand(command, absl::Milliseconds(100));
    EXPECT_EQ(ErrorOf(status).reason, Reason::kTransportTimeout) << status;
  }
  others.reset();
  for (const Sequence command : sent) EXPECT_TRUE(Outcome(command).ok()) << Outcome(command);
  ExpectThatTheLogGoesOn(4);
}

TEST_P(FewCallsTest, ASessionWhoseCommandFindsNoRoomIsLost) {
  const std::unique_ptr<Link> link = OpenImpatient();
  ASSERT_TRUE(link->Submit({Sequence(1), Release()}).ok());
  EXPECT_TRUE(link->WaitCommand(Sequence(1), absl::Seconds(60)).ok());
  const std::unique_ptr<AllCalls> others = TakeAllCalls();
  ASSERT_TRUE(link->Submit({Sequence(2), Release()}).ok());
  ExpectLost(link.get(), Reason::kQuota, "has not taken command 2 for 300ms");
}

constexpr Way kUnaryWay = {Transport::kUnary, false, "Unary"};
const auto kWayName = [](const auto& way) { return way.param.name; };
INSTANTIATE_TEST_SUITE_P(Transports, FewCallsTest, ::testing::Values(kUnaryWay), kWayName);

const auto kGrpcWays = ::testing::Values(Way{Transport::kStream, false, "Stream"}, kUnaryWay);
INSTANTIATE_TEST_SUITE_P(Transports, GrpcNumberingTest, kGrpcWays, kWayName);
INSTANTIATE_TEST_SUITE_P(Transports, FewWaitsTest, kGrpcWays, kWayName);
INSTANTIATE_TEST_SUITE_P(Transports, GivingUpTest, kGrpcWays, kWayName);

const auto kWays = ::testing::Values(Way{Transport::kRing, false, "Ring"},
                                     Way{Transport::kStream, false, "Stream"}, kUnaryWay,
                                     Way{Transport::kStream, true, "StreamTcp"});
INSTANTIATE_TEST_SUITE_P(Transports, NumberingTest, kWays, kWayName);
INSTANTIATE_TEST_SUITE_P(Transports, FullNumberingTest, kWays, kWayName);

}  // namespace
}  // namespace chorus
