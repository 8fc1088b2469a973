// Commands that cannot be sent, or that the daemon does not take, leave no gap in the log.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/internal/link.h"
#include "client/internal/session_core.h"
#include "client/link/open_link.h"
#include "core/backend/host/host_backend.h"
#include "core/base/error.h"
#include "core/base/thread_pool.h"
#include "core/graph/encoding.h"
#include "core/ops/host_kernels.h"
#include "core/transport/command.h"
#include "core/transport/frame_format.h"
#include "gtest/gtest.h"
#include "server/daemon.h"

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
    DaemonOptions options;
    options.listen = {*ParseListenAddress("unix:" + directory_ + "/d.sock"),
                      *ParseListenAddress("127.0.0.1:0")};
    options.insecure_loopback = true;
    options.node.gap_timeout = absl::Milliseconds(200);
    absl::StatusOr<std::unique_ptr<Daemon>> daemon =
        Daemon::Start(options, DevicesOf(backend_.get()));
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    SessionOptions session;
    session.address = daemon_->addresses()[GetParam().tcp ? 1 : 0].ToString();
    session.transport = GetParam().transport;
    absl::StatusOr<std::unique_ptr<Link>> link = OpenLink(session);
    ASSERT_TRUE(link.ok()) << link.status();
    core_ = std::make_shared<SessionCore>(*std::move(link), absl::Seconds(60));
  }
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
  absl::Status Outcome(Sequence sequence) {
    return core_->link().WaitCommand(sequence, absl::Seconds(60));
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
  std::unique_ptr<Daemon> daemon_;
  std::shared_ptr<SessionCore> core_;
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

// Calls of gRPC may overtake each other, and a process may be stopped between two of them.
using UnaryNumberingTest = NumberingTest;

TEST_P(UnaryNumberingTest, WhatWasRefusedForAGapIsSentAgain) {
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
TEST_P(UnaryNumberingTest, ACommandThatIsNotTakenAheadOfItsTurnLeavesNoGap) {
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

INSTANTIATE_TEST_SUITE_P(Transports, UnaryNumberingTest,
                         ::testing::Values(Way{Transport::kUnary, false, "Unary"}),
                         [](const auto& way) { return way.param.name; });

INSTANTIATE_TEST_SUITE_P(Transports, NumberingTest,
                         ::testing::Values(Way{Transport::kRing, false, "Ring"},
                                           Way{Transport::kStream, false, "Stream"},
                                           Way{Transport::kUnary, false, "Unary"},
                                           Way{Transport::kStream, true, "StreamTcp"}),
                         [](const auto& way) { return way.param.name; });

}  // namespace
}  // namespace chorus
