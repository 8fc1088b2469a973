// What a client of HTTP/2 asks for, counted from the bytes that it sends (RFC 9113), and whether
// the messages that it sends in its streams are such as gRPC has room for: five bytes stand before
// each, of which the last four say how long it is.
//
// Threads: one at a time. Ownership: it keeps no bytes but of a frame's head, and a row of 32 bytes
// for each stream that is open. Errors: said in Counts.
#ifndef CHORUS_SERVER_HTTP2_FRAMES_H_
#define CHORUS_SERVER_HTTP2_FRAMES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace chorus::server {

class Http2Frames {
 public:
  struct Limits {
    size_t streams = 0;  // open at a time, at least 1
    uint32_t message_bytes = 0;
    // A piece is what one frame brings of a message and one Take has, for each of which gRPC keeps
    // a slice; and an empty frame. A stream may bring so many, one more for each so many bytes of a
    // message, and so many for each message that was whole before; of what it does not use it keeps
    // `most_pieces`.
    uint32_t pieces = 0;
    uint32_t bytes_a_piece = 0;  // at least 1
    uint32_t pieces_a_message = 0;
    uint32_t most_pieces = 0;  // at least `pieces`
  };
  struct Counts {
    int calls = 0;           // streams that it has opened
    int requests = 0;        // what is answered: these, PING and SETTINGS
    int later_messages = 0;  // messages that have begun behind the first one of their stream
    // Why the connection may not go on, in words; empty: it may.
    std::string broken;
    // What comes behind.
    Counts& operator+=(const Counts& next) {
      calls += next.calls;
      requests += next.requests;
      later_messages += next.later_messages;
      if (broken.empty()) broken = next.broken;
      return *this;
    }
  };

  explicit Http2Frames(const Limits& limits) : limits_(limits) {}

  // Takes the next bytes of a connection, from its preface on, and says what has begun in them.
  // Bytes that are no HTTP/2 count as something, or nothing.
  Counts Take(absl::string_view bytes);
  // Streams that it has opened and not ended, of those that are followed.
  size_t open() const { return streams_.size() - (ends_ != 0 ? 1 : 0); }

 private:
  static constexpr size_t kHeadBytes = 9;
  static constexpr uint32_t kPrefixBytes = 5;

  // A stream that its client has opened and not ended. That the daemon has ended one is not seen
  // here: such a one stays until there are more than may be open. Then the one is given up for
  // which nothing has come for longest, of those whose messages are whole where there is one: if it
  // lives after all it is followed again when something comes.
  struct Stream {
    uint64_t last_used = 0;
    uint32_t id = 0;
    // Of the message that has begun, or is to come: bytes behind its prefix that are still to come,
    // those that have, prefix and all, in how many pieces, and in how many they may beside those
    // that its bytes allow.
    uint32_t bytes_missing = 0;
    uint32_t bytes_received = 0;
    uint32_t pieces = 0;
    uint32_t most_pieces = 0;
    bool is_later = false;  // behind another one
  };

  void TakeHead(Counts* counts);
  void BeginData(uint32_t id, size_t size, unsigned char flags, Counts* counts);
  // What stands in a DATA frame, without what fills it up.
  void TakeData(absl::string_view bytes, Counts* counts);
  void TakePrefix(Stream* stream, unsigned char byte, Counts* counts) const;
  // In which what has come of its message may have come.
  uint32_t MostPieces(const Stream& stream) const;
  void EndMessage(Stream* stream) const;
  void CountPiece(Stream* stream, Counts* counts) const;
  std::vector<Stream>::iterator Open(uint32_t id);
  void Close(uint32_t id);
  std::vector<Stream>::iterator Find(uint32_t id);
  // The first with this id, or a higher one.
  std::vector<Stream>::iterator LowerBound(uint32_t id);

  const Limits limits_;
  unsigned char head_[kHeadBytes] = {};
  size_t have_ = 0;  // of the next frame's head
  // Of the frame that has begun, in this order.
  bool padded_ = false;  // a byte that says how many fill it up
  size_t data_ = 0;      // bytes of messages, of the stream `current_`
  size_t skip_ = 24;     // bytes that say nothing: the preface, at first
  uint32_t current_ = 0;
  uint32_t ends_ = 0;  // a stream that is not open behind this frame; 0: none
  uint32_t last_stream_ = 0;
  uint32_t given_up_ = 0;  // the last stream that was with a message that was not whole
  uint64_t used_ = 0;
  std::vector<Stream> streams_;  // by id
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_HTTP2_FRAMES_H_
