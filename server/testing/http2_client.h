// What a client of HTTP/2 says, as bytes (RFC 9113 and 7541), for tests that say what no library of
// HTTP/2 would: halves, too much, or nothing behind it.
//
// Threads: pure functions. Ownership: copies. Errors: none.
#ifndef CHORUS_SERVER_TESTING_HTTP2_CLIENT_H_
#define CHORUS_SERVER_TESTING_HTTP2_CLIENT_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace chorus::server {

// A client's first bytes. A frame of settings comes next.
inline constexpr char kPreface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

// RFC 9113, section 6.
enum FrameType : uint8_t {
  kData = 0,
  kHeaders = 1,
  kReset = 3,
  kSettings = 4,
  kPing = 6,
  kGoAway = 7,
  kWindowUpdate = 8,
  kContinuation = 9,
};
inline constexpr uint8_t kEndStream = 1;  // of kData and kHeaders
inline constexpr uint8_t kAck = 1;        // of kSettings and kPing
inline constexpr uint8_t kEndHeaders = 4;
inline constexpr uint8_t kPadded = 8;
inline constexpr uint16_t kInitialWindowSize = 4;  // in a payload of kSettings (6.5.2)
inline constexpr size_t kFrameHead = 9;            // bytes before the payload

// The last `bytes` bytes of `number`.
std::string BigEndian(uint64_t number, int bytes);

// Whether `flags` and `stream` go with the type, and how long the payload is, nobody checks.
std::string Frame(FrameType type, uint8_t flags, uint32_t stream, absl::string_view payload);
// The head alone, of a frame whose payload of `size` bytes may come or not.
std::string FrameHead(size_t size, FrameType type, uint8_t flags, uint32_t stream);

// A field that stands in no table, nor is put there, as a payload of kHeaders has it.
std::string HeaderField(absl::string_view name, absl::string_view value);
// All those of a call of gRPC's, whose method is "/PACKAGE.SERVICE/NAME".
std::string HeadersOf(absl::string_view method);

}  // namespace chorus::server

#endif  // CHORUS_SERVER_TESTING_HTTP2_CLIENT_H_
