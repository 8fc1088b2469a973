// Commands for a daemon that takes none: a stopped process, as its clients see it.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "chorus/v1/log.grpc.pb.h"
#include "client/internal/link.h"
#include "client/link/grpc_links.h"
#include "core/base/error.h"
#include "core/transport/command.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server_builder.h"
#include "gtest/gtest.h"

namespace chorus {
namespace internal {
namespace {

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

  // It never asks for a call: its connection takes some bytes, and no more.
  v1::Log::AsyncService service_;
  std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::unique_ptr<grpc::Server> server_;
  OpenedSession opened_;
};

TEST_F(SilentDaemonTest, AStreamThatIsNotReadIsLost) {
  const std::unique_ptr<Link> link = MakeStreamLink(std::move(opened_));
  const absl::Status failed = SubmitUntilItFails(link.get(), 40000);
  EXPECT_EQ(ErrorOf(failed).reason, Reason::kDaemonLost) << failed;
  const absl::Status waited = link->WaitCommand(Sequence(1), absl::Hours(1));
  EXPECT_EQ(ErrorOf(waited).reason, Reason::kDaemonLost) << waited;
}

TEST_F(SilentDaemonTest, OneCallMoreThanMayBeUnderWayIsNotSent) {
  const std::unique_ptr<Link> link = MakeUnaryLink(std::move(opened_));
  const absl::Status failed = SubmitUntilItFails(link.get(), 4);
  EXPECT_EQ(ErrorOf(failed).reason, Reason::kTransportTimeout) << failed;
}

}  // namespace
}  // namespace internal
}  // namespace chorus
