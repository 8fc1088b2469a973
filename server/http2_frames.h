// What a client of HTTP/2 asks for, counted from the bytes that it sends (RFC 9113).
//
// Threads: one at a time. Ownership: it keeps no bytes but of a frame's head. Errors: none.
#ifndef CHORUS_SERVER_HTTP2_FRAMES_H_
#define CHORUS_SERVER_HTTP2_FRAMES_H_

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace chorus::server {

class Http2Frames {
 public:
  struct Counts {
    int calls = 0;  // streams that it has opened
    int asked = 0;  // what is answered: these, PING and SETTINGS
  };
  // Takes the next bytes of a connection, from its preface on, and says what has begun in them.
  // Bytes that are no HTTP/2 count as something, or nothing.
  Counts Take(absl::string_view bytes);

 private:
  static constexpr size_t kHeadBytes = 9;

  void Count(Counts* counts);

  size_t skip_ = 24;  // bytes that say nothing: the preface, a frame's content
  unsigned char head_[kHeadBytes] = {};
  size_t have_ = 0;  // of the next frame's head
  uint32_t last_stream_ = 0;
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_HTTP2_FRAMES_H_
