#include "client/link/rpc_link.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "chorus/v1/diagnostics.grpc.pb.h"
#include "core/base/error.h"
#include "core/base/ids.h"
#include "core/transport/command.h"
#include "gmock/gmock.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server_builder.h"
#include "gtest/gtest.h"
#include "proto/convert/errors_convert.h"

namespace chorus {
namespace internal {
namespace {

using ::testing::HasSubstr;

constexpr char kAddress[] = "unix:/run/here";

std::string TextAt(const absl::Status& status) {
  const absl::Status at = AtAddress(kAddress, status);
  EXPECT_EQ(at.code(), status.code());
  EXPECT_EQ(ErrorOf(at).reason, ErrorOf(status).reason);
  return ErrorOf(at).message;
}

TEST(AtAddressTest, WhatComesOfTheDaemonsStateNamesIt) {
  EXPECT_EQ(TextAt(MakeError(Reason::kDaemonLost, "no more bytes")),
            "the daemon at unix:/run/here is gone: no more bytes");
  EXPECT_EQ(TextAt(MakeError(Reason::kTransportTimeout, "no outcome yet")),
            "the daemon at unix:/run/here: no outcome yet");
  // In its own words, which have no address, or in ours.
  EXPECT_EQ(TextAt(MakeError(Reason::kDraining,
                             "the daemon is shutting down and takes no new "
                             "sessions")),
            "the daemon at unix:/run/here is shutting down");
}

TEST(AtAddressTest, OthersStayAsTheyAre) {
  EXPECT_TRUE(AtAddress(kAddress, absl::OkStatus()).ok());
  EXPECT_EQ(TextAt(MakeError(Reason::kQuota, "too many")), "too many");
  // It is named already, perhaps by its path alone.
  EXPECT_EQ(TextAt(MakeError(Reason::kDaemonLost, "/run/here: refused")), "/run/here: refused");
  EXPECT_EQ(TextAt(AtAddress(kAddress, MakeError(Reason::kDaemonLost, "no more bytes"))),
            "the daemon at unix:/run/here is gone: no more bytes");
}

// What gRPC itself says of a deadline helps nobody; what the daemon says does.
TEST(AtAddressTest, OfACall) {
  const absl::Status late =
      AtAddress(kAddress, grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED, "Deadline Exceeded"));
  EXPECT_EQ(ErrorOf(late).message, "the daemon at unix:/run/here: it did not answer in time");
  const absl::Status told = AtAddress(
      kAddress, ToGrpc(MakeError(Reason::kTransportTimeout, "command 5 has no outcome yet")));
  EXPECT_EQ(ErrorOf(told).message, "the daemon at unix:/run/here: command 5 has no outcome yet");
  const absl::Status draining =
      AtAddress(kAddress, ToGrpc(MakeError(Reason::kDraining, "the daemon is shutting down")));
  EXPECT_EQ(ErrorOf(draining).reason, Reason::kDraining) << draining;
  EXPECT_THAT(ErrorOf(draining).message, HasSubstr(kAddress));
  EXPECT_TRUE(AtAddress(kAddress, grpc::Status::OK).ok());
}

// A daemon that has forgotten the texts of its errors.
class Forgetful : public v1::Diagnostics::Service {
  grpc::Status GetError(grpc::ServerContext*, const v1::GetErrorRequest*,
                        v1::GetErrorResponse*) override {
    return ToGrpc(MakeError(Reason::kUnknownName, "no such error"));
  }
};

class ErrorsLink : public RpcLink {
 public:
  using RpcLink::FetchError;
  using RpcLink::RpcLink;

  Transport transport() const override { return Transport::kUnary; }
  absl::Status Submit(const Command&) override { return Unsupported("submit"); }
  absl::StatusOr<absl::optional<RunOutcome>> Peek(Sequence) override { return Unsupported("peek"); }
  absl::Status WaitCommand(Sequence, absl::Duration) override { return Unsupported("wait"); }
  absl::StatusOr<bool> WaitTensor(TensorId, Sequence, absl::Duration) override {
    return Unsupported("wait");
  }
  void OnLost() override {}
};

// DEVICE_LOST is UNAVAILABLE, as what a daemon that shuts down fails is.
TEST(FetchErrorTest, OnlyADaemonThatIsGoneWasShuttingDown) {
  Forgetful service;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  OpenedSession opened;
  opened.address = absl::StrCat("127.0.0.1:", port);
  opened.channel = grpc::CreateChannel(opened.address, grpc::InsecureChannelCredentials());
  ErrorsLink link(std::move(opened));
  const absl::Status forgotten = link.FetchError(absl::StatusCode::kUnavailable, ErrorId(7));
  EXPECT_EQ(forgotten.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(ErrorOf(forgotten).reason, Reason::kDraining) << forgotten;
  EXPECT_THAT(ErrorOf(forgotten).message, HasSubstr("error 7 of the daemon at 127.0.0.1"));
  EXPECT_THAT(ErrorOf(forgotten).message, HasSubstr("no such error"));
  server->Shutdown();
  const absl::Status drained = link.FetchError(absl::StatusCode::kUnavailable, ErrorId(8));
  EXPECT_EQ(ErrorOf(drained).reason, Reason::kDraining) << drained;
}

}  // namespace
}  // namespace internal
}  // namespace chorus
