#include "proto/convert/errors_convert.h"

#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/base/error.h"

namespace chorus {
namespace {

constexpr char kErrorInfoUrl[] = "type.googleapis.com/google.rpc.ErrorInfo";
constexpr char kRetryInfoUrl[] = "type.googleapis.com/google.rpc.RetryInfo";
constexpr char kDomain[] = "chorus";
// For UNAVAILABLE: long enough for a restart, short enough for a person.
constexpr int kRetrySeconds = 1;

using Metadata = google::protobuf::Map<std::string, std::string>;

void Set(Metadata* metadata, absl::string_view key, absl::string_view value) {
  if (!value.empty()) (*metadata)[std::string(key)] = std::string(value);
}

void SetNumber(Metadata* metadata, absl::string_view key, int64_t value, int64_t least) {
  if (value >= least) (*metadata)[std::string(key)] = absl::StrCat(value);
}

std::string Get(const Metadata& metadata, absl::string_view key) {
  const auto it = metadata.find(std::string(key));
  return it == metadata.end() ? "" : it->second;
}

template <typename T>
T GetNumber(const Metadata& metadata, absl::string_view key, T otherwise) {
  T value = otherwise;
  const std::string text = Get(metadata, key);
  return absl::SimpleAtoi(text, &value) ? value : otherwise;
}

// Bytes that are no UTF-8 do not travel in proto strings: gRPC tools would refuse the details.
std::string PrintableOnly(absl::string_view text) {
  std::string result(text);
  for (char& c : result) {
    if (static_cast<unsigned char>(c) >= 0x80 || (c < 0x20 && c != '\n' && c != '\t')) c = '?';
  }
  return result;
}

std::string Shortened(absl::string_view text, size_t limit) {
  std::string result = PrintableOnly(text);
  if (result.size() > limit) {
    result.resize(limit - 3);
    result.append("...");
  }
  return result;
}

v1::RpcStatus Pack(const Error& error, size_t limit, size_t ranks) {
  v1::ErrorInfo info;
  info.set_reason(std::string(ReasonName(error.reason)));
  info.set_domain(kDomain);
  Metadata* metadata = info.mutable_metadata();
  SetNumber(metadata, "error_id", error.id.value(), 1);
  SetNumber(metadata, "rank", error.culprit.rank, 0);
  SetNumber(metadata, "pid", error.culprit.pid, 0);
  Set(metadata, "node", Shortened(error.culprit.node, limit));
  Set(metadata, "instance", Shortened(error.instance, limit));
  Set(metadata, "op", Shortened(error.op, limit));
  Set(metadata, "source", Shortened(error.source, limit));
  Set(metadata, "expected", Shortened(error.expected, limit));
  Set(metadata, "got", Shortened(error.got, limit));
  for (size_t i = 0; i < error.ranks.size() && i < ranks; ++i) {
    const std::string prefix = absl::StrCat("rank_", i, "_");
    SetNumber(metadata, prefix + "number", error.ranks[i].rank, 0);
    Set(metadata, prefix + "what", Shortened(error.ranks[i].what, limit));
    Set(metadata, prefix + "source", Shortened(error.ranks[i].source, limit));
  }
  // A client that is told goes on by these: they are never left out.
  for (size_t i = 0; i < error.ended.size() && i < Error::kMaxRanks; ++i) {
    const std::string prefix = absl::StrCat("ended_", i, "_");
    SetNumber(metadata, prefix + "world", error.ended[i].world.value(), 0);
    SetNumber(metadata, prefix + "epoch", error.ended[i].open.value(), 0);
  }
  if (error.alone) Set(metadata, "alone", "true");

  v1::RpcStatus status;
  status.set_code(static_cast<int>(error.code));
  // Shortened before the remedy, which stays whole. Other languages' stubs show this text.
  status.set_message(Shortened(error.message, limit * 2) + RemedyText(error));
  google::protobuf::Any* any = status.add_details();
  any->set_type_url(kErrorInfoUrl);
  any->set_value(info.SerializeAsString());
  if (error.code == absl::StatusCode::kUnavailable) {
    v1::RetryInfo retry;
    retry.mutable_retry_delay()->set_seconds(kRetrySeconds);
    google::protobuf::Any* retry_detail = status.add_details();
    retry_detail->set_type_url(kRetryInfoUrl);
    retry_detail->set_value(retry.SerializeAsString());
  }
  return status;
}

Error Unpack(const v1::ErrorInfo& info) {
  const Metadata& metadata = info.metadata();
  Error error;
  error.reason = ReasonFromName(info.reason());
  error.id = ErrorId(GetNumber<int64_t>(metadata, "error_id", 0));
  error.culprit.rank = GetNumber<int32_t>(metadata, "rank", -1);
  error.culprit.pid = GetNumber<int32_t>(metadata, "pid", -1);
  error.culprit.node = Get(metadata, "node");
  error.instance = Get(metadata, "instance");
  error.op = Get(metadata, "op");
  error.source = Get(metadata, "source");
  error.expected = Get(metadata, "expected");
  error.got = Get(metadata, "got");
  for (size_t i = 0; i < Error::kMaxRanks; ++i) {
    const std::string prefix = absl::StrCat("rank_", i, "_");
    Error::Version version;
    version.rank = GetNumber<int32_t>(metadata, prefix + "number", -1);
    version.what = Get(metadata, prefix + "what");
    version.source = Get(metadata, prefix + "source");
    if (version.rank < 0 && version.what.empty()) break;
    error.ranks.push_back(std::move(version));
  }
  for (size_t i = 0; i < Error::kMaxRanks; ++i) {
    const std::string prefix = absl::StrCat("ended_", i, "_");
    const auto world = GetNumber<int64_t>(metadata, prefix + "world", -1);
    const auto epoch = GetNumber<int64_t>(metadata, prefix + "epoch", -1);
    if (world < 0 || epoch < 0) break;
    error.ended.push_back({WorldId(world), Epoch(epoch)});
  }
  error.alone = Get(metadata, "alone") == "true";
  return error;
}

// A status code as it comes over the wire.
absl::StatusCode CodeFrom(int code) {
  constexpr int kLast = static_cast<int>(absl::StatusCode::kUnauthenticated);
  return code < 0 || code > kLast ? absl::StatusCode::kUnknown
                                  : static_cast<absl::StatusCode>(code);
}

Reason ReasonOfTransport(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kUnavailable:
      return Reason::kDaemonLost;
    case absl::StatusCode::kDeadlineExceeded:
      return Reason::kTransportTimeout;
    default:
      return Reason::kUnspecified;
  }
}

// `text`, which is ASCII, or its beginning, such that it takes at most kMaxTrailerBytes as gRPC
// encodes it: three bytes for each that is not printable, and for '%'.
std::string InTrailers(absl::string_view text) {
  constexpr absl::string_view kCut = "...";
  size_t encoded = 0;
  size_t fits = 0;  // with kCut behind it
  for (size_t i = 0; i < text.size(); ++i) {
    encoded += text[i] >= ' ' && text[i] <= '~' && text[i] != '%' ? 1 : 3;
    if (encoded > kMaxTrailerBytes) return absl::StrCat(text.substr(0, fits), kCut);
    if (encoded + kCut.size() <= kMaxTrailerBytes) fits = i + 1;
  }
  return std::string(text);
}

}  // namespace

v1::RpcStatus ToRpcStatus(const absl::Status& status) {
  if (status.ok()) return v1::RpcStatus();
  const Error error = ErrorOf(status);
  size_t limit = 2048;
  size_t ranks = Error::kMaxRanks;
  for (;;) {
    v1::RpcStatus packed = Pack(error, limit, ranks);
    // 8 texts of 32 bytes with their keys fit; the ranks may be the rest.
    if (packed.ByteSizeLong() <= kMaxErrorBytes || (limit <= 32 && ranks == 0)) {
      return packed;
    }
    if (limit > 32) {
      limit /= 2;
    } else {
      ranks /= 2;
    }
  }
}

absl::Status FromRpcStatus(const v1::RpcStatus& message) {
  if (message.code() == 0) return absl::OkStatus();
  Error error;
  for (const google::protobuf::Any& any : message.details()) {
    v1::ErrorInfo info;
    if (any.type_url() != kErrorInfoUrl || !info.ParseFromString(any.value())) continue;
    if (info.domain() == kDomain) error = Unpack(info);
  }
  error.code = CodeFrom(message.code());
  error.message = std::string(WithoutRemedyText(message.message(), error.reason));
  return ToStatus(error);
}

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const v1::RpcStatus message = ToRpcStatus(status);
  return grpc::Status(static_cast<grpc::StatusCode>(message.code()), InTrailers(message.message()),
                      message.SerializeAsString());
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  v1::RpcStatus message;
  if (!status.error_details().empty() && message.ParseFromString(status.error_details()) &&
      message.code() == status.error_code()) {
    return FromRpcStatus(message);
  }
  const absl::StatusCode code = CodeFrom(status.error_code());
  // A daemon that is stopped cancels what still waits there and what comes late, the one in these
  // words of gRPC's. (Nobody reads a call that he cancelled.)
  if (code == absl::StatusCode::kCancelled || (code == absl::StatusCode::kUnavailable &&
                                               status.error_message() == "Cancelling all calls")) {
    return MakeError(Reason::kDraining, "the daemon is shutting down, and has ended the call");
  }
  Error error(ReasonOfTransport(code), status.error_message());
  error.code = code;
  return ToStatus(error);
}

}  // namespace chorus
