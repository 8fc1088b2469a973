#include "server/http2_frames.h"

#include <string.h>

#include <algorithm>

namespace chorus::server {
namespace {

// Sections 6.2, 6.5 and 6.7.
constexpr unsigned char kHeaders = 1;
constexpr unsigned char kSettings = 4;
constexpr unsigned char kPing = 6;
constexpr unsigned char kAck = 1;

}  // namespace

Http2Frames::Counts Http2Frames::Take(absl::string_view bytes) {
  Counts counts;
  while (!bytes.empty()) {
    const size_t skipped = std::min(skip_, bytes.size());
    skip_ -= skipped;
    bytes.remove_prefix(skipped);
    const size_t taken = std::min(kHeadBytes - have_, bytes.size());
    memcpy(head_ + have_, bytes.data(), taken);
    have_ += taken;
    bytes.remove_prefix(taken);
    if (have_ == kHeadBytes) Count(&counts);
  }
  return counts;
}

// Section 4.1: 24 bits of length, 8 of type, 8 of flags, 31 of the stream's number.
void Http2Frames::Count(Counts* counts) {
  have_ = 0;
  skip_ = size_t{head_[0]} << 16 | size_t{head_[1]} << 8 | head_[2];
  const unsigned char type = head_[3];
  const bool is_answer = (head_[4] & kAck) != 0;
  const uint32_t stream =
      (uint32_t{head_[5]} << 24 | uint32_t{head_[6]} << 16 | uint32_t{head_[7]} << 8 | head_[8]) &
      0x7fffffff;
  // A stream has a higher number than those before it, and a client's are odd: gRPC passes others
  // by (section 5.1.1).
  if (type == kHeaders && stream % 2 == 1 && stream > last_stream_) {
    last_stream_ = stream;
    ++counts->calls;
  }
  if (type == kHeaders || ((type == kPing || type == kSettings) && !is_answer)) ++counts->asked;
}

}  // namespace chorus::server
