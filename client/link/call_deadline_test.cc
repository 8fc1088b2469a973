#include "client/link/call_deadline.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "chorus/v1/log.grpc.pb.h"
#include "core/base/clock.h"
#include "core/base/unique_fd.h"
#include "grpcpp/create_channel.h"
#include "gtest/gtest.h"

namespace chorus {
namespace internal {
namespace {

// An address at which connections are taken and nothing is ever said.
class SilentAddress {
 public:
  SilentAddress() : listener_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(listener_.get(), any, size), 0);
    EXPECT_EQ(listen(listener_.get(), 8), 0);
    EXPECT_EQ(getsockname(listener_.get(), any, &size), 0);
    text_ = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
  }
  const std::string& text() const { return text_; }

 private:
  const UniqueFd listener_;
  std::string text_;
};

class CallDeadlineTest : public ::testing::Test {
 protected:
  // gRPC's own timers come late, as where the wall clock was set back.
  static void DelayGrpcs(grpc::ClientContext* context) {
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  }
  static void ExpectEndedHere(const grpc::Status& status) {
    EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
    EXPECT_EQ(status.error_message(), "its time is over");
  }
  grpc::Status Call(grpc::ClientContext* context) {
    v1::WaitResponse response;
    return stub_->Wait(context, v1::WaitRequest(), &response);
  }

 private:
  const SilentAddress address_;
  const std::unique_ptr<v1::Log::Stub> stub_ =
      v1::Log::NewStub(grpc::CreateChannel(address_.text(), grpc::InsecureChannelCredentials()));
};

TEST_F(CallDeadlineTest, ACallEndsWhereGrpcsTimersComeLate) {
  constexpr absl::Duration kTimeout = absl::Milliseconds(20);
  const absl::Time began = SteadyNow();
  grpc::ClientContext context;
  const CallDeadline deadline(&context, kTimeout);
  DelayGrpcs(&context);
  ExpectEndedHere(deadline.Of(Call(&context)));
  EXPECT_GE(SteadyNow() - began, kTimeout);
}

TEST_F(CallDeadlineTest, WhereTheyComeInTimeTheyEndIt) {
  grpc::ClientContext context;
  const CallDeadline deadline(&context, absl::Milliseconds(20));
  const grpc::Status status = Call(&context);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED) << status.error_message();
  EXPECT_EQ(deadline.Of(status).error_message(), status.error_message());
}

// One that is over is not looked at any more: the context may be gone.
TEST_F(CallDeadlineTest, WhatIsOverIsLeftAlone) {
  for (int i = 0; i < 100; ++i) {
    auto context = std::make_unique<grpc::ClientContext>();
    auto deadline = std::make_unique<CallDeadline>(context.get(), absl::ZeroDuration());
    deadline.reset();
    context.reset();
  }
  grpc::ClientContext context;
  const CallDeadline behind_them(&context, absl::ZeroDuration());
  DelayGrpcs(&context);
  ExpectEndedHere(behind_them.Of(Call(&context)));
}

TEST_F(CallDeadlineTest, WhatOthersSayStays) {
  grpc::ClientContext context;
  const CallDeadline deadline(&context, absl::Hours(1));
  const grpc::Status cancelled(grpc::StatusCode::CANCELLED, "by somebody else");
  EXPECT_EQ(deadline.Of(cancelled).error_message(), "by somebody else");
  EXPECT_TRUE(deadline.Of(grpc::Status::OK).ok());
}

}  // namespace
}  // namespace internal
}  // namespace chorus
