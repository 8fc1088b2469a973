#include "server/http2_frames.h"

#include <string.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace chorus::server {
namespace {

// Sections 6.1 to 6.7.
constexpr unsigned char kData = 0;
constexpr unsigned char kHeaders = 1;
constexpr unsigned char kReset = 3;
constexpr unsigned char kSettings = 4;
constexpr unsigned char kPing = 6;
constexpr unsigned char kAck = 1;
constexpr unsigned char kEndStream = 1;
constexpr unsigned char kPadded = 8;

void Break(Http2Frames::Counts* counts, std::string why) {
  if (counts->broken.empty()) counts->broken = std::move(why);
}

}  // namespace

Http2Frames::Counts Http2Frames::Take(absl::string_view bytes) {
  Counts counts;
  while (!bytes.empty()) {
    if (padded_) {
      padded_ = false;
      --data_;
      skip_ = std::min<size_t>(data_, static_cast<unsigned char>(bytes[0]));
      data_ -= skip_;
      bytes.remove_prefix(1);
    } else if (data_ > 0) {
      const size_t size = std::min(data_, bytes.size());
      TakeData(bytes.substr(0, size), &counts);
      data_ -= size;
      bytes.remove_prefix(size);
    } else if (skip_ > 0) {
      const size_t size = std::min(skip_, bytes.size());
      skip_ -= size;
      bytes.remove_prefix(size);
    } else {
      const size_t size = std::min(kHeadBytes - have_, bytes.size());
      memcpy(head_ + have_, bytes.data(), size);
      have_ += size;
      bytes.remove_prefix(size);
      if (have_ == kHeadBytes) TakeHead(&counts);
    }
  }
  return counts;
}

// Section 4.1: 24 bits of length, 8 of type, 8 of flags, 31 of the stream's number.
void Http2Frames::TakeHead(Counts* counts) {
  have_ = 0;
  const size_t size = size_t{head_[0]} << 16 | size_t{head_[1]} << 8 | head_[2];
  const unsigned char type = head_[3];
  const unsigned char flags = head_[4];
  const bool is_answer = (flags & kAck) != 0;
  const uint32_t stream =
      (uint32_t{head_[5]} << 24 | uint32_t{head_[6]} << 16 | uint32_t{head_[7]} << 8 | head_[8]) &
      0x7fffffff;
  if (ends_ != 0) Close(std::exchange(ends_, 0));
  if (type == kData) return BeginData(stream, size, flags, counts);
  skip_ = size;
  // A stream has a higher number than those before it, and a client's are odd: gRPC passes others
  // by (section 5.1.1).
  if (type == kHeaders && stream % 2 == 1 && stream > last_stream_) {
    last_stream_ = stream;
    ++counts->calls;
    Open(stream);
  }
  if (type == kReset || (type == kHeaders && (flags & kEndStream) != 0)) Close(stream);
  if (type == kHeaders || ((type == kPing || type == kSettings) && !is_answer)) ++counts->requests;
}

void Http2Frames::BeginData(uint32_t id, size_t size, unsigned char flags, Counts* counts) {
  auto stream = Find(id);
  if (stream == streams_.end()) {
    if (id % 2 == 0 || id > last_stream_ || id <= given_up_) {
      skip_ = size;
      return Break(counts, absl::StrCat("it sends data in stream ", id, ", which is not open"));
    }
    // It had no message that was not whole when it was given up: so one begins.
    stream = Open(id);
    stream->is_later = true;
  }
  stream->last_used = ++used_;
  current_ = id;
  data_ = size;
  padded_ = (flags & kPadded) != 0 && size > 0;
  if ((flags & kEndStream) != 0) ends_ = id;
  if (size == 0) CountPiece(&*stream, counts);
}

void Http2Frames::TakeData(absl::string_view bytes, Counts* counts) {
  Stream& stream = *Find(current_);
  while (!bytes.empty()) {
    // Of each message that is in them.
    while (stream.bytes_received < kPrefixBytes && !bytes.empty()) {
      TakePrefix(&stream, static_cast<unsigned char>(bytes[0]), counts);
      bytes.remove_prefix(1);
    }
    if (stream.bytes_received >= kPrefixBytes) {
      const auto size = static_cast<uint32_t>(std::min<size_t>(stream.bytes_missing, bytes.size()));
      stream.bytes_missing -= size;
      stream.bytes_received += size;
      bytes.remove_prefix(size);
    }
    CountPiece(&stream, counts);
    if (stream.bytes_received >= kPrefixBytes && stream.bytes_missing == 0) EndMessage(&stream);
  }
}

void Http2Frames::TakePrefix(Stream* stream, unsigned char byte, Counts* counts) const {
  if (stream->bytes_received == 0 && stream->is_later) ++counts->later_messages;
  // The first one says how the message is compressed.
  stream->bytes_missing = stream->bytes_received == 0 ? 0 : stream->bytes_missing << 8 | byte;
  if (++stream->bytes_received == kPrefixBytes && stream->bytes_missing > limits_.message_bytes) {
    Break(counts, absl::StrCat("it declares a message of ", stream->bytes_missing,
                               " bytes; expected at most ", limits_.message_bytes));
  }
}

uint32_t Http2Frames::MostPieces(const Stream& stream) const {
  return stream.most_pieces + stream.bytes_received / limits_.bytes_a_piece;
}

void Http2Frames::EndMessage(Stream* stream) const {
  const uint32_t most = MostPieces(*stream);
  const uint32_t unused = most - std::min(stream->pieces, most);
  stream->most_pieces = std::min(unused + limits_.pieces_a_message, limits_.most_pieces);
  stream->pieces = 0;
  stream->bytes_received = 0;
  stream->is_later = true;
}

void Http2Frames::CountPiece(Stream* stream, Counts* counts) const {
  const uint32_t most = MostPieces(*stream);
  if (++stream->pieces <= most) return;
  Break(counts, absl::StrCat("it has sent ", stream->bytes_received, " bytes of a message in ",
                             stream->pieces, " pieces; expected at most ", most));
}

std::vector<Http2Frames::Stream>::iterator Http2Frames::Open(uint32_t id) {
  if (streams_.size() >= limits_.streams) {
    // Of one whose message is not whole nobody could tell where the next one begins.
    const auto victim =
        std::min_element(streams_.begin(), streams_.end(), [](const Stream& a, const Stream& b) {
          if ((a.bytes_received == 0) != (b.bytes_received == 0)) return a.bytes_received == 0;
          return a.last_used < b.last_used;
        });
    if (victim->bytes_received > 0) given_up_ = std::max(given_up_, victim->id);
    streams_.erase(victim);
  }
  Stream stream;
  stream.id = id;
  stream.last_used = ++used_;
  stream.most_pieces = limits_.pieces;
  return streams_.insert(LowerBound(id), stream);
}

void Http2Frames::Close(uint32_t id) {
  const auto stream = Find(id);
  if (stream != streams_.end()) streams_.erase(stream);
}

std::vector<Http2Frames::Stream>::iterator Http2Frames::Find(uint32_t id) {
  const auto stream = LowerBound(id);
  return stream != streams_.end() && stream->id == id ? stream : streams_.end();
}

std::vector<Http2Frames::Stream>::iterator Http2Frames::LowerBound(uint32_t id) {
  return std::lower_bound(streams_.begin(), streams_.end(), id,
                          [](const Stream& stream, uint32_t wanted) { return stream.id < wanted; });
}

}  // namespace chorus::server
