#include "server/service/request_call.h"

#include <memory>

#include "core/base/error.h"
#include "grpcpp/server_context.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

// One that gRPC does not know of.
class Call : public RequestCall {
 public:
  Call(const ServiceContext* service, grpc::CallbackServerContext* context)
      : RequestCall(service, context) {}

  void End(const absl::Status& status) override {
    if (MayEnd()) ended_with_ = status.code();
  }
  void EndLate() override {}
  void Forget() override {}

  int requests() const { return requests_; }
  absl::StatusCode ended_with() const { return ended_with_; }

 private:
  void HaveRequest(grpc::ByteBuffer*) override { ++requests_; }

  int requests_ = 0;
  absl::StatusCode ended_with_ = absl::StatusCode::kOk;
};

class RequestCallTest : public ::testing::Test {
 protected:
  ServiceContext service_;
  grpc::CallbackServerContext context_;
  const std::shared_ptr<Call> call_ = std::make_shared<Call>(&service_, &context_);
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

}  // namespace
}  // namespace chorus
