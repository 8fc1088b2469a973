// Commands for a daemon that takes none: a stopped process, as its clients see it.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "chorus/v1/log.grpc.pb.h"
#include "chorus/v1/sessions.grpc.pb.h"
#include "chorus/v1/worlds.grpc.pb.h"
#include "client/attach/attach_client.h"
#include "client/internal/link.h"
#include "client/link/grpc_links.h"
#include "client/link/ring_link.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/failpoint.h"
#include "core/base/mutex.h"
#include "core/transport/command.h"
#include "gmock/gmock.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server_builder.h"
#include "gtest/gtest.h"
#include "server/testing/rpc.h"
#include "server/testing/test_daemon.h"

namespace chorus {
namespace internal {
namespace {

using ::testing::HasSubstr;

// What ends the sending of commands, which a daemon takes ever more of.
absl::Status SubmitUntilItFails(Link* link, size_t bytes) {
  Release release;
  release.tensors.resize(bytes / 4, TensorId{1, 1});
  for (int64_t sequence = 1; sequence < 10000; ++sequence) {
    const absl::Status sent = link->Submit({Sequence(sequence), release});
    if (!sent.ok()) return sent;
  }
  return absl::OkStatus();
}

void ExpectLate(const absl::Status& status, const std::string& address) {
  EXPECT_EQ(ErrorOf(status).reason, Reason::kTransportTimeout) << status;
  EXPECT_THAT(ErrorOf(status).message, HasSubstr(absl::StrCat("the daemon at ", address)));
}

class SilentDaemonTest : public ::testing::Test {
 protected:
  SilentDaemonTest() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service_);
    queue_ = builder.AddCompletionQueue();
    server_ = builder.BuildAndStart();
    opened_.address = absl::StrCat("127.0.0.1:", port);
    opened_.channel = grpc::CreateChannel(opened_.address, grpc::InsecureChannelCredentials());
    opened_.session = 1;
    opened_.submit_timeout = absl::Milliseconds(200);
  }
  ~SilentDaemonTest() override {
    server_->Shutdown(std::chrono::system_clock::now());
    queue_->Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_->Next(&tag, &ok)) {
    }
  }

  // It never asks for a call: its connection takes some bytes, and no more.
  v1::Log::AsyncService service_;
  std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::unique_ptr<grpc::Server> server_;
  OpenedSession opened_;
};

TEST_F(SilentDaemonTest, AStreamThatIsNotReadIsLost) {
  const std::string address = opened_.address;
  const std::unique_ptr<Link> link = MakeStreamLink(std::move(opened_));
  ExpectLate(link->WaitCommand(Sequence(1), absl::Milliseconds(1)), address);
  const absl::Status failed = SubmitUntilItFails(link.get(), 40000);
  EXPECT_EQ(ErrorOf(failed).reason, Reason::kDaemonLost) << failed;
  const absl::Status waited = link->WaitCommand(Sequence(1), absl::Hours(1));
  EXPECT_EQ(ErrorOf(waited).reason, Reason::kDaemonLost) << waited;
}

TEST_F(SilentDaemonTest, OneCallMoreThanMayBeUnderWayIsNotSent) {
  const std::string address = opened_.address;
  const std::unique_ptr<Link> link = MakeUnaryLink(std::move(opened_));
  ExpectLate(link->WaitCommand(Sequence(1), absl::Milliseconds(1)), address);
  ExpectLate(SubmitUntilItFails(link.get(), 4), address);
}

// Serves on a port of this machine.
class LocalServer {
 public:
  explicit LocalServer(const std::vector<grpc::Service*>& services) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    for (grpc::Service* const service : services) builder.RegisterService(service);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
  }
  // As of session 1.
  OpenedSession Open() const {
    OpenedSession opened;
    opened.address = address_;
    opened.channel = grpc::CreateChannel(opened.address, grpc::InsecureChannelCredentials());
    opened.session = 1;
    return opened;
  }

 private:
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

// Has done each command at once, and tells of others too.
class TalkingDaemon : public v1::Log::Service {
 public:
  explicit TalkingDaemon(std::vector<int64_t> others) : others_(std::move(others)) {}
  std::unique_ptr<Link> Connect() const { return MakeStreamLink(server_.Open()); }

  grpc::Status Commands(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::CommandsResponse, v1::CommandsRequest>* stream) override {
    v1::CommandsRequest request;
    while (stream->Read(&request)) {
      v1::CommandsResponse response;
      for (const int64_t sequence : others_) {
        response.set_sequence(sequence);
        stream->Write(response);
      }
      response.set_sequence(request.command().sequence());
      stream->Write(response);
    }
    return grpc::Status::OK;
  }
  // Too busy for a call that has less than a second.
  grpc::Status Wait(grpc::ServerContext* context, const v1::WaitRequest*,
                    v1::WaitResponse*) override {
    const bool is_late =
        context->deadline() < std::chrono::system_clock::now() + std::chrono::seconds(1);
    return is_late ? grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED, "") : grpc::Status::OK;
  }

 private:
  const std::vector<int64_t> others_;
  const LocalServer server_{{this}};
};

TEST(TalkingDaemonTest, AnOutcomeOfWhatWasNotSentIsNone) {
  const TalkingDaemon daemon({-1, 0, 5000, int64_t{1} << 30});
  const std::unique_ptr<Link> link = daemon.Connect();
  for (const int64_t sequence : {1, 2}) {
    ASSERT_TRUE(link->Submit({Sequence(sequence), Release()}).ok());
    const absl::Status outcome = link->WaitCommand(Sequence(sequence), absl::Seconds(60));
    EXPECT_TRUE(outcome.ok()) << outcome;
  }
  const auto not_sent = link->Peek(Sequence(5000));
  ASSERT_TRUE(not_sent.ok()) << not_sent.status();
  EXPECT_FALSE(not_sent->has_value());
}

// What is no longer known here is asked for.
TEST(TalkingDaemonTest, WhatIsLongOverIsToldHoweverShortTheWait) {
  const TalkingDaemon daemon({});
  const std::unique_ptr<Link> link = daemon.Connect();
  constexpr int64_t kLast = 4097;
  for (int64_t sequence = 1; sequence <= kLast; ++sequence) {
    ASSERT_TRUE(link->Submit({Sequence(sequence), Release()}).ok());
  }
  EXPECT_TRUE(link->WaitCommand(Sequence(kLast), absl::Seconds(60)).ok());
  const absl::Status outcome = link->WaitCommand(Sequence(1), absl::ZeroDuration());
  EXPECT_TRUE(outcome.ok()) << outcome;
  const auto tensor = link->WaitTensor(TensorId{0, 1}, Sequence(1), absl::ZeroDuration());
  EXPECT_TRUE(tensor.ok()) << tensor.status();
}

// Ends each wait for others too early, but for one of a millisecond.
class LateDaemon : public v1::Worlds::Service {
 public:
  std::unique_ptr<Link> Connect() const { return MakeUnaryLink(server_.Open()); }

  grpc::Status Join(grpc::ServerContext*, const v1::JoinWorldRequest* request,
                    v1::JoinWorldResponse*) override {
    const auto& timeout = request->join_timeout();
    const bool is_last = timeout.seconds() == 0 && timeout.nanos() == 1000000;
    return is_last ? grpc::Status(grpc::StatusCode::ABORTED, "missing rank 1")
                   : grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED, "");
  }

 private:
  const LocalServer server_{{this}};
};

TEST(LateDaemonTest, WhoseTimeIsOverAsksOnceMoreWhoIsMissing) {
  const LateDaemon daemon;
  const std::unique_ptr<Link> link = daemon.Connect();
  WorldOptions options;
  options.rank = 0;
  options.size = 2;
  options.join_timeout = std::chrono::milliseconds(20);
  const absl::Status joined = link->Join(options, DeviceIndex(0)).status();
  EXPECT_THAT(std::string(joined.message()), HasSubstr("missing rank 1"));
}

// Whose commands wait for others, until all are there.
class WaitingDaemon {
 public:
  WaitingDaemon() : log_(this) {}
  std::unique_ptr<Link> Connect() const { return MakeUnaryLink(server_.Open()); }
  // From now on commands are over as they come.
  void AllAreThere() {
    MutexLock lock(&mutex_);
    all_are_there_ = true;
    for (grpc::ServerUnaryReactor* const call : waiting_) call->Finish(grpc::Status::OK);
    waiting_.clear();
  }
  // Different ones.
  size_t CountCommands() {
    MutexLock lock(&mutex_);
    return commands_.size();
  }

 private:
  class LogService : public v1::Log::CallbackService {
   public:
    explicit LogService(WaitingDaemon* daemon) : daemon_(daemon) {}
    grpc::ServerUnaryReactor* Submit(grpc::CallbackServerContext* context,
                                     const v1::SubmitRequest* request,
                                     v1::SubmitResponse*) override {
      return daemon_->Wait(context, request->command().sequence());
    }
    grpc::ServerUnaryReactor* Wait(grpc::CallbackServerContext* context,
                                   const v1::WaitRequest* request, v1::WaitResponse*) override {
      return daemon_->Wait(context, request->sequence());
    }

   private:
    WaitingDaemon* const daemon_;
  };
  class SessionsService : public v1::Sessions::CallbackService {
    grpc::ServerUnaryReactor* Renew(grpc::CallbackServerContext* context,
                                    const v1::RenewSessionRequest*,
                                    v1::RenewSessionResponse*) override {
      grpc::ServerUnaryReactor* const call = context->DefaultReactor();
      call->Finish(grpc::Status::OK);
      return call;
    }
  };

  grpc::ServerUnaryReactor* Wait(grpc::CallbackServerContext* context, int64_t command) {
    grpc::ServerUnaryReactor* const call = context->DefaultReactor();
    MutexLock lock(&mutex_);
    commands_.insert(command);
    if (all_are_there_) {
      call->Finish(grpc::Status::OK);
    } else {
      waiting_.push_back(call);
    }
    return call;
  }

  Mutex mutex_;
  bool all_are_there_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<int64_t> commands_ ABSL_GUARDED_BY(mutex_);
  std::vector<grpc::ServerUnaryReactor*> waiting_ ABSL_GUARDED_BY(mutex_);
  LogService log_;
  SessionsService sessions_;
  const LocalServer server_{{&log_, &sessions_}};
};

TEST(WaitingDaemonTest, CommandsThatWaitForOthersHoldUpNothing) {
  constexpr int64_t kLast = 150;
  WaitingDaemon daemon;
  const std::unique_ptr<Link> link = daemon.Connect();
  for (int64_t sequence = 1; sequence <= kLast; ++sequence) {
    const absl::Status sent = link->Submit({Sequence(sequence), Release()});
    ASSERT_TRUE(sent.ok()) << sequence << ": " << sent;
  }
  EXPECT_TRUE(server::Eventually([&] { return daemon.CountCommands() == kLast; }));
  for (const int64_t sequence : {int64_t{1}, kLast}) {
    const absl::Status early = link->WaitCommand(Sequence(sequence), absl::Milliseconds(1));
    EXPECT_EQ(ErrorOf(early).reason, Reason::kTransportTimeout) << sequence << ": " << early;
    EXPECT_THAT(ErrorOf(early).message, HasSubstr("is not done yet"));
  }
  daemon.AllAreThere();
  for (int64_t sequence = kLast; sequence > kLast / 2; --sequence) {
    const absl::Status outcome = link->WaitCommand(Sequence(sequence), absl::Seconds(60));
    EXPECT_TRUE(outcome.ok()) << sequence << ": " << outcome;
  }
  // Also where nobody waits.
  for (int64_t sequence = 1; sequence <= kLast; ++sequence) {
    EXPECT_TRUE(server::Eventually([&] {
      const auto outcome = link->Peek(Sequence(sequence));
      return outcome.ok() && outcome->has_value();
    })) << sequence;
  }
}

Mutex& ReadingOfRings() {
  static Mutex* const mutex = new Mutex;
  return *mutex;
}

TEST(SilentRingTest, ADaemonThatReadsNoRingIsNamed) {
  const server::TestDaemon daemon;
  OpenedSession opened;
  opened.address = absl::StrCat("unix:", daemon.path());
  opened.channel = daemon.Connect();
  opened.submit_timeout = absl::Milliseconds(200);
  auto attach = AttachClient::Connect(daemon.attach_path(), SteadyNow() + absl::Seconds(30));
  ASSERT_TRUE(attach.ok()) << attach.status();
  v1::OpenSessionRequest request;
  request.set_attach_token((*attach)->token());
  server::RpcRank session(opened.channel);
  const absl::Status open = session.Open(request);
  ASSERT_TRUE(open.ok()) << open;
  opened.attach = *std::move(attach);
  opened.session = session.session;
  const std::string address = opened.address;
  const auto link = MakeRingLink(std::move(opened), SteadyNow() + absl::Seconds(30));
  ASSERT_TRUE(link.ok()) << link.status();
  // The daemon's thread waits here with the first frame.
  MutexLock lock(&ReadingOfRings());
  SetFailpointHook([](absl::string_view name) {
    if (name == "ring_reader.before_copy") MutexLock wait(&ReadingOfRings());
  });
  ExpectLate(SubmitUntilItFails(link->get(), 4000), address);
  ExpectLate((*link)->WaitCommand(Sequence(1), absl::Milliseconds(1)), address);
  const auto tensor = (*link)->WaitTensor(TensorId{0, 1}, Sequence(1), absl::Milliseconds(1));
  ExpectLate(tensor.status(), address);
  SetFailpointHook(nullptr);
}

}  // namespace
}  // namespace internal
}  // namespace chorus
