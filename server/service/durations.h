// google.protobuf.Duration <-> absl::Duration.
//
// Threads: any; pure functions. Ownership: copies. Errors: said at DurationFrom().
#ifndef CHORUS_SERVER_SERVICE_DURATIONS_H_
#define CHORUS_SERVER_SERVICE_DURATIONS_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/base/error.h"
#include "google/protobuf/duration.pb.h"

namespace chorus::server {

// INVALID_ARGUMENT, naming `field`: negative, more than a hundred years, or not normal.
inline absl::StatusOr<absl::Duration> DurationFrom(const google::protobuf::Duration& message,
                                                   absl::string_view field) {
  constexpr int64_t kMaxSeconds = int64_t{100} * 366 * 86400;
  if (message.seconds() < 0 || message.seconds() > kMaxSeconds || message.nanos() < 0 ||
      message.nanos() > 999'999'999) {
    return Malformed(absl::StrCat(field, ": expected 0 s to ", kMaxSeconds, " s, got ",
                                  message.seconds(), " s and ", message.nanos(), " ns"));
  }
  return absl::Seconds(message.seconds()) + absl::Nanoseconds(message.nanos());
}

inline void DurationTo(absl::Duration duration, google::protobuf::Duration* message) {
  const int64_t seconds = absl::IDivDuration(duration, absl::Seconds(1), &duration);
  message->set_seconds(seconds);
  message->set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(duration)));
}

}  // namespace chorus::server

#endif  // CHORUS_SERVER_SERVICE_DURATIONS_H_
