#include "client/link/rpc_link.h"

#include <string>

#include "absl/status/status.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
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

}  // namespace
}  // namespace internal
}  // namespace chorus
