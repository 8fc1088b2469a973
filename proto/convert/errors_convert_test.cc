#include "proto/convert/errors_convert.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

Error FullError() {
  Error error(Reason::kMismatch);
  error.message = "all_reduce of group 0: rank 0 asked for f32[4], rank 1 for f32[5]";
  error.id = ErrorId(77);
  error.culprit.rank = 1;
  error.culprit.pid = 4711;
  error.culprit.node = "node-b";
  error.instance = "group 0 step 3 call 17";
  error.op = "all_reduce";
  error.source = "train.cc:42";
  error.expected = "f32[4]";
  error.got = "f32[5]";
  for (int rank = 0; rank < 8; ++rank) {
    error.ranks.push_back(
        {rank, rank == 1 ? "all_reduce SUM f32[5]" : "all_reduce SUM f32[4]", "train.cc:42"});
  }
  error.ended = {{WorldId(1), Epoch(4)}, {WorldId(int64_t{1} << 40), Epoch(2)}};
  error.alone = true;
  return error;
}

void ExpectEqual(const Error& a, const Error& b) {
  EXPECT_EQ(a.code, b.code);
  EXPECT_EQ(a.reason, b.reason);
  EXPECT_EQ(a.message, b.message);
  EXPECT_EQ(a.id, b.id);
  EXPECT_EQ(a.culprit, b.culprit);
  EXPECT_EQ(a.instance, b.instance);
  EXPECT_EQ(a.op, b.op);
  EXPECT_EQ(a.source, b.source);
  EXPECT_EQ(a.expected, b.expected);
  EXPECT_EQ(a.got, b.got);
  EXPECT_EQ(a.ranks, b.ranks);
  EXPECT_EQ(a.ended, b.ended);
  EXPECT_EQ(a.alone, b.alone);
}

TEST(ErrorsConvertTest, AllOfAnErrorCrossesTheWire) {
  const grpc::Status wire = ToGrpc(ToStatus(FullError()));
  EXPECT_EQ(wire.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(wire.error_message(), FullError().message + RemedyText(FullError()));
  ExpectEqual(ErrorOf(FromGrpc(wire)), FullError());
}

TEST(ErrorsConvertTest, EveryCodeAndReasonCrossesTheWire) {
  for (int code = 1; code <= 16; ++code) {
    for (const ReasonInfo& info : Reasons()) {
      Error error(info.reason, "text");
      error.code = static_cast<absl::StatusCode>(code);
      const absl::Status status = ToStatus(error);
      const absl::Status back = FromGrpc(ToGrpc(status));
      EXPECT_EQ(back, status);
      EXPECT_EQ(ErrorOf(back).reason, info.reason);
      EXPECT_EQ(ErrorOf(back).message, "text");
    }
  }
  EXPECT_TRUE(ToGrpc(absl::OkStatus()).ok());
  EXPECT_TRUE(FromGrpc(grpc::Status::OK).ok());
}

TEST(ErrorsConvertTest, StaysBelowFourKibibytesWhateverTheTexts) {
  for (const char filler : {'x', '\xff', '\n', '\0', '%'}) {
    Error error = FullError();
    const std::string text(100000, filler);
    error.message = error.culprit.node = error.instance = error.op = error.source = text;
    error.expected = error.got = text;
    for (Error::Version& version : error.ranks) version.what = version.source = text;
    for (int i = 0; i < 100; ++i) error.ranks.push_back({i, text, text});
    error.ended.assign(8, {WorldId(int64_t{1} << 62), Epoch(int64_t{1} << 62)});
    // As a status carries it, and as a handler makes it from texts of its own.
    const v1::RpcStatus packed = ToRpcStatus(ToStatus(error));
    EXPECT_LE(packed.ByteSizeLong(), 4096u);
    const grpc::Status status = ToGrpc(ToStatus(error));
    EXPECT_LE(status.error_details().size(), 4096u);
    // As gRPC encodes it, which drops all where this and the details are more than 8 KiB.
    size_t encoded = 0;
    for (const char c : status.error_message()) encoded += c >= ' ' && c <= '~' && c != '%' ? 1 : 3;
    EXPECT_LE(encoded, kMaxTrailerBytes) << filler;
    const Error back = ErrorOf(FromRpcStatus(packed));
    EXPECT_EQ(back.code, error.code);
    EXPECT_EQ(back.reason, error.reason);
    EXPECT_EQ(back.culprit.rank, 1);
    EXPECT_LE(back.ranks.size(), Error::kMaxRanks);
    EXPECT_GE(back.ranks.size(), 1u);
    EXPECT_EQ(back.ended, error.ended);
    EXPECT_FALSE(back.message.empty());
    EXPECT_THAT(packed.message(), testing::HasSubstr(RemedyText(error)));
  }
}

TEST(ErrorsConvertTest, ALongMessageIsCutBesideTheDetails) {
  Error error(Reason::kAborted);
  const auto message = [&error] { return ToGrpc(ToStatus(error)).error_message(); };
  error.message = std::string(1000, '\n');
  EXPECT_EQ(message(), error.message + RemedyText(error));
  error.message = std::string(1500, '%');
  EXPECT_TRUE(message() == std::string(1023, '%') + "...") << message();
  EXPECT_TRUE(ErrorOf(FromGrpc(ToGrpc(ToStatus(error)))).message == error.message);
}

TEST(ErrorsConvertTest, UsesGooglesTypeUrls) {
  const v1::RpcStatus packed = ToRpcStatus(MakeError(Reason::kDraining, "going down"));
  ASSERT_EQ(packed.details_size(), 2);
  EXPECT_EQ(packed.details(0).type_url(), "type.googleapis.com/google.rpc.ErrorInfo");
  EXPECT_EQ(packed.details(1).type_url(), "type.googleapis.com/google.rpc.RetryInfo");
  v1::ErrorInfo info;
  ASSERT_TRUE(info.ParseFromString(packed.details(0).value()));
  EXPECT_EQ(info.reason(), "DRAINING");
  EXPECT_EQ(info.domain(), "chorus");
  v1::RetryInfo retry;
  ASSERT_TRUE(retry.ParseFromString(packed.details(1).value()));
  EXPECT_GT(retry.retry_delay().seconds(), 0);
}

TEST(ErrorsConvertTest, StatusesOfTheTransportGetAReason) {
  const auto reason = [](grpc::StatusCode code) {
    return ErrorOf(FromGrpc(grpc::Status(code, "from the channel"))).reason;
  };
  EXPECT_EQ(reason(grpc::StatusCode::UNAVAILABLE), Reason::kDaemonLost);
  EXPECT_EQ(reason(grpc::StatusCode::DEADLINE_EXCEEDED), Reason::kTransportTimeout);
  EXPECT_EQ(reason(grpc::StatusCode::CANCELLED), Reason::kDraining);
  EXPECT_EQ(
      ErrorOf(FromGrpc(grpc::Status(grpc::StatusCode::UNAVAILABLE, "Cancelling all calls"))).reason,
      Reason::kDraining);
  EXPECT_EQ(reason(grpc::StatusCode::INTERNAL), Reason::kUnspecified);
}

TEST(ErrorsConvertTest, StrangeDetailsDoNoHarm) {
  const absl::Status garbage = FromGrpc(
      grpc::Status(grpc::StatusCode::ABORTED, "text", std::string("\xff\xff\xff not a status")));
  EXPECT_EQ(garbage.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ErrorOf(garbage).message, "text");

  v1::RpcStatus message;
  message.set_code(1000);
  EXPECT_EQ(FromRpcStatus(message).code(), absl::StatusCode::kUnknown);
  message.set_code(-3);
  EXPECT_EQ(FromRpcStatus(message).code(), absl::StatusCode::kUnknown);

  // Another system's ErrorInfo is not taken for ours; numbers that are none are left out.
  v1::ErrorInfo info;
  info.set_reason("MISMATCH");
  info.set_domain("example.com");
  (*info.mutable_metadata())["rank"] = "three";
  message.set_code(10);
  message.add_details()->set_type_url("type.googleapis.com/google.rpc.ErrorInfo");
  message.mutable_details(0)->set_value(info.SerializeAsString());
  EXPECT_EQ(ErrorOf(FromRpcStatus(message)).reason, Reason::kUnspecified);
  info.set_domain("chorus");
  message.mutable_details(0)->set_value(info.SerializeAsString());
  EXPECT_EQ(ErrorOf(FromRpcStatus(message)).reason, Reason::kMismatch);
  EXPECT_EQ(ErrorOf(FromRpcStatus(message)).culprit.rank, -1);
}

}  // namespace
}  // namespace chorus
