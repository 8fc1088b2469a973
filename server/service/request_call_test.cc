#include "server/service/request_call.h"

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "core/base/alarms.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/wall_clock.h"
#include "core/node/node_loop.h"
#include "core/runtime/devices.h"
#include "grpcpp/server_context.h"
#include "gtest/gtest.h"
#include "server/service/call_turns.h"
#include "server/service/worker.h"
#include "server/testing/test_daemon.h"

namespace chorus::server {
namespace {

// One that gRPC does not know of.
class Call : public RequestCall {
 public:
  explicit Call(const ServiceContext* service)
      : Call(service, std::make_unique<grpc::CallbackServerContext>()) {}

  using RequestCall::StartReading;
  using RequestCall::WhenAnswered;
  void End(const absl::Status& status) override {
    if (MayEnd()) ended_with_ = status.code();
  }
  void EndLate() override {}
  void Forget() override {}

  // What it does with its request.
  std::function<void()> have_request = [] {};
  int requests() const { return requests_; }
  absl::StatusCode ended_with() const { return ended_with_; }

 private:
  Call(const ServiceContext* service, std::unique_ptr<grpc::CallbackServerContext> context)
      : RequestCall(service, context.get()), grpc_context_(std::move(context)) {}
  void HaveRequest(grpc::ByteBuffer*) override {
    ++requests_;
    have_request();
  }

  const std::unique_ptr<grpc::CallbackServerContext> grpc_context_;
  int requests_ = 0;
  absl::StatusCode ended_with_ = absl::StatusCode::kOk;
};

class RequestCallTest : public ::testing::Test {
 protected:
  RequestCallTest() {
    service_.reads = &reads_;
    service_.answering = &answering_;
    service_.worker = &worker_;
    service_.alarms = &alarms_;
    service_.max_wait = absl::Minutes(10);
    service_.read_timeout = absl::Minutes(10);
    service_.download_timeout = absl::Minutes(10);
  }
  // Until the worker has done what was posted before, for calls of no known tenant.
  void AwaitWorker() {
    std::promise<void> done;
    worker_.Post("", [&done] { done.set_value(); });
    done.get_future().wait();
  }

  CallTurns reads_{1};
  CallTurns answering_{2};
  Alarms alarms_;
  ServiceWorker worker_{[](const std::vector<SessionId>&) {}, absl::Hours(1)};
  ServiceContext service_;
  const std::shared_ptr<Call> call_ = std::make_shared<Call>(&service_);
};

TEST_F(RequestCallTest, ARequestIsTaken) {
  call_->OnReadDone(true);
  EXPECT_EQ(call_->requests(), 1);
  EXPECT_EQ(call_->ended_with(), absl::StatusCode::kOk);
}

TEST_F(RequestCallTest, NoRequestEndsIt) {
  call_->OnReadDone(false);
  EXPECT_EQ(call_->requests(), 0);
  EXPECT_EQ(call_->ended_with(), absl::StatusCode::kInvalidArgument);
}

// Its client was told that it has ended.
TEST_F(RequestCallTest, ARequestThatComesBehindTheEndIsNotTaken) {
  call_->End(MakeError(Reason::kTransportTimeout, "late"));
  call_->OnReadDone(true);
  EXPECT_EQ(call_->requests(), 0);
  EXPECT_EQ(call_->ended_with(), absl::StatusCode::kDeadlineExceeded);
}

// No call that waits for its turn, or for an outcome, is late because somebody sets the wall clock.
TEST_F(RequestCallTest, ItsDeadlineIsByTheSteadyClock) {
  const absl::Time before = SteadyNow();
  wall_ahead_nanos = absl::ToInt64Nanoseconds(absl::Hours(1));
  const Call call(&service_);
  EXPECT_GE(call.deadline(), before + service_.max_wait);
  EXPECT_LE(call.deadline(), SteadyNow() + service_.max_wait);
  wall_ahead_nanos = 0;
}

// What waits for the node is bounded as what is read is, also when its client has gone.
TEST_F(RequestCallTest, ARequestHasItsTurnUntilTheNodeComesToIt) {
  TestDaemon daemon;
  node::NodeLoop loop(node::NodeOptions(), DevicesOf(daemon.backend()));
  service_.loop = &loop;
  std::promise<void> go;
  loop.PostOwn([&go](node::LocalNode&, absl::Time) { go.get_future().wait(); });

  call_->have_request = [this] { call_->Post([](node::LocalNode&, absl::Time) {}); };
  reads_.Enter({}, [this](CallTurns::Turn turn) { call_->StartReading(std::move(turn)); });
  call_->OnReadDone(true);
  EXPECT_EQ(call_->requests(), 1);
  call_->OnDone();
  std::promise<void> next;
  bool came = false;
  reads_.Enter({}, [&](CallTurns::Turn) {
    came = true;
    next.set_value();
  });
  EXPECT_FALSE(came);
  go.set_value();
  next.get_future().wait();
}

// It stands behind no other tenant's, however many those have.
TEST_F(RequestCallTest, WhatItAsksOfTheNodeHasATurnOfItsTenants) {
  TestDaemon daemon;
  std::promise<void> go;
  std::promise<int> waited_for;
  int others = 0;
  node::NodeLoop loop(node::NodeOptions(), DevicesOf(daemon.backend()));
  service_.loop = &loop;
  loop.PostOwn([&go](node::LocalNode&, absl::Time) { go.get_future().wait(); });
  for (int i = 0; i < 600; ++i) {
    loop.Post("another", [&others](node::LocalNode&, absl::Time) { ++others; });
  }
  call_->Post([&](node::LocalNode&, absl::Time) { waited_for.set_value(others); });
  go.set_value();
  EXPECT_LE(waited_for.get_future().get(), 1);
}

// The node's thread, which knows the answer, does not make it.
TEST_F(RequestCallTest, AnswersAreMadeByTheWorker) {
  std::promise<void> go;
  worker_.Post("", [&go] { go.get_future().wait(); });
  std::atomic<bool> answered{false};
  call_->WhenAnswered([&answered] { answered = true; });
  EXPECT_FALSE(answered);
  go.set_value();
  AwaitWorker();
  EXPECT_TRUE(answered);
  call_->OnDone();
}

// Of a connection only so many answers are under way until gRPC has done with their calls.
TEST_F(RequestCallTest, AnswersWaitForThoseBefore) {
  std::vector<std::shared_ptr<Call>> calls;
  std::vector<int> answered;
  for (int i = 0; i < 5; ++i) {
    calls.push_back(std::make_shared<Call>(&service_));
    calls.back()->WhenAnswered([&answered, i] { answered.push_back(i); });
  }
  AwaitWorker();
  EXPECT_EQ(answered, (std::vector<int>{0, 1}));
  // One whose client has gone is not answered.
  calls[3]->OnDone();
  EXPECT_EQ(answered, (std::vector<int>{0, 1}));
  calls[1]->OnDone();
  EXPECT_EQ(answered, (std::vector<int>{0, 1, 2}));
  calls[0]->OnDone();
  EXPECT_EQ(answered, (std::vector<int>{0, 1, 2, 4}));
  for (const int i : {2, 4}) calls[static_cast<size_t>(i)]->OnDone();
}

}  // namespace
}  // namespace chorus::server
