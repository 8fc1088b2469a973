#include "core/node/requests.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus::node {
namespace {

constexpr size_t kMaxLabelBytes = 256;
constexpr size_t kMaxWorldNameBytes = 256;
constexpr int32_t kMaxWorldSize = 1024;
constexpr size_t kMaxAbortBytes = 1024;
constexpr int64_t kDefaultFlightEvents = 100;
constexpr int64_t kMaxFlightEvents = 10000;

absl::Status AtMost(absl::string_view field, size_t most, size_t got) {
  if (got <= most) return absl::OkStatus();
  return Malformed(absl::StrCat(field, ": expected at most ", most, " bytes, got ", got));
}

absl::Status NotNegative(absl::string_view field, int64_t got) {
  if (got >= 0) return absl::OkStatus();
  return Malformed(absl::StrCat(field, ": expected a number >= 0, got ", got));
}

absl::Status CheckCallNumber(absl::string_view field, int64_t got) {
  if (got >= 0 && got < kMaxCallNumber) return absl::OkStatus();
  return Malformed(
      absl::StrCat(field, ": expected a number from 0 to ", kMaxCallNumber - 1, ", got ", got));
}

}  // namespace

absl::Status OpenSessionRequest::Check() const {
  CHORUS_RETURN_IF_ERROR(AtMost("label", kMaxLabelBytes, label.size()));
  for (const DeviceIndex device : devices) {
    CHORUS_RETURN_IF_ERROR(NotNegative("devices", device.value()));
  }
  CHORUS_RETURN_IF_ERROR(NotNegative("device_count", device_count));
  if (attached || may_open) return absl::OkStatus();
  return MakeError(Reason::kNotAttached,
                   absl::StrCat("a caller of ", tenant,
                                ", which is not the daemon's, may only read until it has attached "
                                "(attach_token)"));
}

absl::Status JoinRequest::Check() const {
  if (name.empty() || name.size() > kMaxWorldNameBytes) {
    return Malformed(
        absl::StrCat("a world's name has 1 to ", kMaxWorldNameBytes, " bytes, not ", name.size()));
  }
  if (size < 1 || size > kMaxWorldSize) {
    return Malformed(absl::StrCat("a world has 1 to ", kMaxWorldSize, " ranks, not ", size));
  }
  if (rank.value() < 0 || rank.value() >= size) {
    return Malformed(absl::StrCat("ranks of a world of ", size, " go from 0 to ", size - 1,
                                  ", not ", rank.value()));
  }
  if (device.has_value()) CHORUS_RETURN_IF_ERROR(NotNegative("device", device->value()));
  return not_understood.empty() ? absl::OkStatus() : Malformed(not_understood);
}

absl::Status CreateGroupRequest::Check() const {
  if (step.has_value() != number.has_value()) {
    return Malformed("step, number: expected both or none, got one");
  }
  if (!step.has_value()) return absl::OkStatus();
  CHORUS_RETURN_IF_ERROR(CheckCallNumber("step", *step));
  return CheckCallNumber("number", *number);
}

absl::Status AbortWorldRequest::Check() const {
  CHORUS_RETURN_IF_ERROR(AtMost("message", kMaxAbortBytes, message.size()));
  return NotNegative("epoch", epoch.value());
}

absl::Status ReformWorldRequest::Check() const {
  if (!grow_to.has_value()) return absl::OkStatus();
  return Unsupported(
      "grow_to: this daemon shrinks worlds, but cannot grow them again; make a new world");
}

absl::Status WriteStagingRequest::Check() const {
  const int64_t size = static_cast<int64_t>(bytes.size());
  if (size <= kMaxChunkBytes && offset >= 0) return absl::OkStatus();
  return Malformed(absl::StrCat("expected at most ", kMaxChunkBytes,
                                " bytes from offset_bytes >= 0, got ", size, " bytes from ",
                                offset));
}

absl::Status DownloadRequest::Check() const {
  if (offset >= 0 && size >= 0) return absl::OkStatus();
  return Malformed(
      absl::StrCat("offset_bytes, size_bytes: expected numbers >= 0, got ", offset, " and ", size));
}

absl::StatusOr<int64_t> DownloadRequest::EndIn(int64_t tensor_bytes) const {
  if (offset > tensor_bytes) {
    return Malformed(absl::StrCat("offset_bytes: expected at most the tensor's ", tensor_bytes,
                                  " bytes, got ", offset));
  }
  return size == 0 ? tensor_bytes : offset + std::min(size, tensor_bytes - offset);
}

absl::StatusOr<int64_t> FlightEventLimit(int64_t limit) {
  if (limit >= 0 && limit <= kMaxFlightEvents) return limit == 0 ? kDefaultFlightEvents : limit;
  return Malformed(absl::StrCat("limit: expected 0 to ", kMaxFlightEvents, ", got ", limit));
}

absl::Status CheckSequence(Sequence sequence) {
  if (sequence.value() >= 1) return absl::OkStatus();
  return Malformed(absl::StrCat("sequence: expected a number >= 1, got ", sequence.value()));
}

}  // namespace chorus::node
