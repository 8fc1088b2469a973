#include "server/testing/http2_client.h"

#include "absl/strings/str_cat.h"

namespace chorus::server {
namespace {

// A length and that many bytes (RFC 7541, sections 5.1 and 5.2): 7 bits, or all of them set and
// the rest in groups of 7, the lowest first.
std::string Text(absl::string_view text) {
  constexpr size_t kAllBits = 127;
  std::string length = BigEndian(text.size() < kAllBits ? text.size() : kAllBits, 1);
  if (text.size() >= kAllBits) {
    size_t rest = text.size() - kAllBits;
    for (; rest >= 128; rest /= 128) length += BigEndian(128 + rest % 128, 1);
    length += BigEndian(rest, 1);
  }
  return absl::StrCat(length, text);
}

}  // namespace

std::string BigEndian(uint64_t number, int bytes) {
  std::string out;
  for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) {
    out.push_back(static_cast<char>(number >> shift));
  }
  return out;
}

// Section 4.1.
std::string FrameHead(size_t size, FrameType type, uint8_t flags, uint32_t stream) {
  return BigEndian(size, 3) + BigEndian(type, 1) + BigEndian(flags, 1) + BigEndian(stream, 4);
}

std::string Frame(FrameType type, uint8_t flags, uint32_t stream, absl::string_view payload) {
  return absl::StrCat(FrameHead(payload.size(), type, flags, stream), payload);
}

// RFC 7541, section 6.2.2.
std::string HeaderField(absl::string_view name, absl::string_view value) {
  return BigEndian(0, 1) + Text(name) + Text(value);
}

std::string HeadersOf(absl::string_view method) {
  return HeaderField(":method", "POST") + HeaderField(":scheme", "http") +
         HeaderField(":path", method) + HeaderField(":authority", "localhost") +
         HeaderField("content-type", "application/grpc") + HeaderField("te", "trailers");
}

}  // namespace chorus::server
