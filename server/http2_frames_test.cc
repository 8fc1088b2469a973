#include "server/http2_frames.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "server/testing/http2_client.h"

namespace chorus::server {
namespace {

constexpr Http2Frames::Limits kLimits = {4, 1000, 8, 50, 2, 10};
// In any pieces.
constexpr Http2Frames::Limits kPatient = {4, 1000, 1 << 20, 50, 2, 1 << 20};

using server::Frame;
std::string Frame(FrameType type, uint8_t flags, uint32_t stream, size_t size) {
  // What looks like frames when it is taken for them.
  return Frame(type, flags, stream, std::string(size, '\1'));
}

// A message of gRPC's, which declares `declared` bytes and has `size`.
std::string Message(uint32_t declared, size_t size) {
  return BigEndian(0, 1) + BigEndian(declared, 4) + std::string(size, '\xff');
}
std::string Message(uint32_t size) { return Message(size, size); }

constexpr uint64_t kSeed = 20261123;

// In pieces of 1 to `most` bytes.
Http2Frames::Counts Take(const std::string& bytes, size_t most,
                         const Http2Frames::Limits& limits = kPatient) {
  static std::mt19937_64 random(kSeed);
  Http2Frames frames(limits);
  Http2Frames::Counts sum;
  for (size_t at = 0; at < bytes.size();) {
    const size_t size = std::min(bytes.size() - at, 1 + random() % most);
    sum += frames.Take(absl::string_view(bytes).substr(at, size));
    at += size;
  }
  return sum;
}

TEST(Http2FramesTest, CountsWhatIsAskedHoweverItsBytesCome) {
  const std::string bytes =
      kPreface + Frame(kSettings, 0, 0, 12) + Frame(kSettings, kAck, 0, 0) +
      Frame(kHeaders, kEndHeaders, 1, 300) + Frame(kData, kEndStream, 1, 70000) +
      Frame(kHeaders, 0, 3, 16384) + Frame(kContinuation, kEndHeaders, 3, 20) +
      Frame(kPing, 0, 0, 8) + Frame(kPing, kAck, 0, 8) + Frame(kWindowUpdate, 0, 0, 4) +
      Frame(kReset, 0, 3, 4) +
      Frame(kHeaders, kEndHeaders | kEndStream, 1, 10) +           // of a stream that is open
      Frame(kHeaders, kEndHeaders | kEndStream, 0x80000005, 10) +  // with a bit that says nothing
      Frame(kHeaders, kEndHeaders | kEndStream, 0x80000005, 0);
  for (const size_t most : {size_t{1}, size_t{2}, size_t{10}, size_t{100}, bytes.size()}) {
    for (int round = 0; round < 20; ++round) {
      const Http2Frames::Counts counts = Take(bytes, most);
      EXPECT_EQ(counts.calls, 3) << most;
      EXPECT_EQ(counts.requests, 7) << most;  // with one PING and one SETTINGS
    }
  }
}

// By hand, where the others go by what writes frames for tests.
TEST(Http2FramesTest, ReadsWhatTheRfcSays) {
  const std::string bytes(
      "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
      "\x00\x00\x06\x04\x00\x00\x00\x00\x00"  // SETTINGS
      "\x00\x03\x00\x00\x00\x64"
      "\x00\x00\x03\x01\x04\x00\x00\x00\x01"  // HEADERS, which end here
      "\x83\x86\x84"
      "\x00\x00\x07\x00\x01\x00\x00\x00\x01"  // DATA, the last
      "\x00\x00\x00\x00\x02\x08\x01"
      "\x00\x00\x08\x06\x00\x00\x00\x00\x00"  // PING
      "12345678",
      24 + 9 + 6 + 9 + 3 + 9 + 7 + 9 + 8);
  const Http2Frames::Counts counts = Take(bytes, 5);
  EXPECT_EQ(counts.calls, 1);
  EXPECT_EQ(counts.requests, 3);
  EXPECT_EQ(counts.broken, "");
  // A message of 1001 bytes in a stream that is open.
  const std::string longer(
      "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
      "\x00\x00\x00\x01\x04\x00\x00\x00\x01"
      "\x00\x00\x05\x00\x00\x00\x00\x00\x01"
      "\x00\x00\x00\x03\xe9",
      24 + 9 + 9 + 5);
  EXPECT_EQ(Take(longer, 5).broken, "it declares a message of 1001 bytes; expected at most 1000");
}

// A stream of an even number is none of a client's, and whatever comes behind it counts.
TEST(Http2FramesTest, NumbersOfTheServersStreamsDoNotEndTheCount) {
  const std::string bytes = kPreface + Frame(kHeaders, kEndHeaders, 0x7ffffffe, 0) +
                            Frame(kHeaders, kEndHeaders, 1, 0) +
                            Frame(kHeaders, kEndHeaders, 2, 0) + Frame(kHeaders, kEndHeaders, 3, 0);
  EXPECT_EQ(Take(bytes, 7).calls, 2);
  EXPECT_EQ(Take(bytes, 7).requests, 4);
}

TEST(Http2FramesTest, WhatIsNotWholeCountsForNothing) {
  const std::string bytes = kPreface + Frame(kHeaders, kEndHeaders, 1, 0);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(Take(bytes.substr(0, size), 7).requests, 0) << size;
  }
  EXPECT_EQ(Take(bytes, 7).requests, 1);
}

// What is said of `frames`, which come behind a preface and in pieces of any size.
std::string Broken(const std::string& frames) {
  const std::string bytes = kPreface + frames;
  const std::string broken = Take(bytes, bytes.size()).broken;
  for (const size_t most : {size_t{1}, size_t{3}, size_t{100}, bytes.size()}) {
    for (int round = 0; round < 3; ++round) {
      EXPECT_EQ(Take(bytes, most).broken, broken) << most << ", seed " << kSeed;
    }
  }
  return broken;
}

TEST(Http2FramesTest, AMessageMayBeAsLongAsTheLongest) {
  const std::string open =
      Frame(kHeaders, kEndHeaders, 1, 10) + Frame(kHeaders, kEndHeaders, 3, 10);
  const std::string messages = Message(1000) + Message(0) + Message(7) + Message(1000);
  EXPECT_EQ(Broken(open + Frame(kData, kEndStream, 1, messages) + Frame(kData, 0, 3, messages)),
            "");
  // Those of two streams in pieces, by turns.
  std::string frames = open;
  for (size_t at = 0; at < messages.size(); at += 3) {
    frames += Frame(kData, 0, 1, messages.substr(at, 3));
    frames += Frame(kPing, 0, 0, 8);
    frames += Frame(kData, 0, 3, messages.substr(at, 3)) + Frame(kData, 0, 3, 0);
  }
  EXPECT_EQ(Broken(frames + Frame(kData, kEndStream, 3, 0)), "");
}

TEST(Http2FramesTest, AMessageThatIsDeclaredLongerBreaksTheConnection) {
  const std::string open =
      Frame(kHeaders, kEndHeaders, 1, 10) + Frame(kHeaders, kEndHeaders, 3, 10);
  const std::string said = "it declares a message of 1001 bytes; expected at most 1000";
  EXPECT_EQ(Broken(open + Frame(kData, 0, 1, Message(1001, 0))), said);
  EXPECT_EQ(Broken(open + Frame(kData, 0, 1, Message(1000) + Message(1001, 500))), said);
  EXPECT_EQ(Broken(open + Frame(kData, 0, 1, Message(uint32_t{1} << 30, 0))),
            "it declares a message of 1073741824 bytes; expected at most 1000");
  EXPECT_EQ(Broken(open + Frame(kData, 0, 1, Message(UINT32_MAX, 0))),
            "it declares a message of 4294967295 bytes; expected at most 1000");
  // Its length in several frames, between those of another stream.
  std::string frames = open;
  for (const char byte : Message(1000) + Message(1001, 0)) {
    EXPECT_EQ(Broken(frames), "");
    frames += Frame(kData, 0, 3, std::string(1, byte)) + Frame(kData, 0, 1, Message(0));
  }
  EXPECT_EQ(Broken(frames), said);
}

TEST(Http2FramesTest, WhatFillsAFrameUpIsOfNoMessage) {
  const std::string open = Frame(kHeaders, kEndHeaders, 1, 10);
  const auto padded = [](const std::string& data, size_t padding, unsigned char flags) {
    return Frame(kData, kPadded | flags, 1,
                 static_cast<char>(padding) + data + std::string(padding, '\1'));
  };
  std::string frames = open;
  for (const char byte : Message(5) + Message(60)) {
    frames += padded(std::string(1, byte), 7, 0) + padded("", 255, 0);
  }
  EXPECT_EQ(Broken(frames), "");
  EXPECT_EQ(Broken(frames + padded(Message(8), 3, kEndStream)), "");
  EXPECT_NE(Broken(frames + padded(Message(2000, 0), 3, kEndStream)), "");
  // More than there is: all of it. No room for the byte that says so: nothing.
  EXPECT_EQ(Broken(open + Frame(kData, kPadded, 1, std::string(1, '\x09') + Message(2000, 0))), "");
  EXPECT_EQ(Broken(open + Frame(kData, kPadded, 1, 0) + Frame(kData, 0, 1, Message(8))), "");
}

TEST(Http2FramesTest, DataOfAStreamThatIsNotOpenBreaksTheConnection) {
  const std::string open = Frame(kHeaders, kEndHeaders, 1, 10);
  const std::string data = Frame(kData, 0, 1, Message(8));
  const std::string said = "it sends data in stream 1, which is not open";
  EXPECT_EQ(Broken(data), said);
  EXPECT_EQ(Broken(open + data + data), "");
  EXPECT_EQ(Broken(open + Frame(kData, 0, 2, Message(8))),
            "it sends data in stream 2, which is not open");
  // What comes in one that has ended is as if it had just begun: gRPC passes it by.
  for (const std::string& ended :
       {data + Frame(kReset, 0, 1, 4), Frame(kData, kEndStream, 1, Message(8)),
        Frame(kHeaders, kEndHeaders | kEndStream, 1, 10)}) {
    EXPECT_EQ(Broken(open + ended + data), "");
    EXPECT_NE(Broken(open + ended + Frame(kData, 0, 1, Message(2000, 0))), "");
  }
}

// What is said of `frames`, which come at once.
std::string BrokenAtOnce(const std::string& frames) {
  Http2Frames taker(kLimits);
  return taker.Take(kPreface + frames).broken;
}

TEST(Http2FramesTest, AMessageMayComeInSoManyPieces) {
  const std::string open = Frame(kHeaders, kEndHeaders, 1, 10);
  const std::string message = Message(100);
  std::string frames = open;
  for (size_t at = 0; at < 8; ++at) {
    frames += Frame(kData, 0, 1, message.substr(at, 1));
    EXPECT_EQ(BrokenAtOnce(frames), "") << at;
  }
  EXPECT_EQ(BrokenAtOnce(frames + Frame(kData, 0, 1, message.substr(8, 1))),
            "it has sent 9 bytes of a message in 9 pieces; expected at most 8");
  EXPECT_EQ(BrokenAtOnce(frames + Frame(kData, 0, 1, 0)),
            "it has sent 8 bytes of a message in 9 pieces; expected at most 8");
  // With 50 and 100 bytes, one more each.
  frames += Frame(kData, 0, 1, message.substr(8, 42)) + Frame(kData, 0, 1, message.substr(50, 50));
  EXPECT_EQ(BrokenAtOnce(frames), "");
  EXPECT_NE(BrokenAtOnce(frames + Frame(kData, 0, 1, message.substr(100, 1))), "");
  // Each message has its own: two, and one for each 50 bytes.
  std::string whole = open;
  for (int i = 0; i < 100; ++i) {
    for (size_t at = 0; at < message.size(); at += 30) {
      whole += Frame(kData, 0, 1, message.substr(at, 30));
    }
  }
  EXPECT_EQ(BrokenAtOnce(whole), "");
}

// Two each, and eight more in all.
TEST(Http2FramesTest, SmallMessagesMayComeInSoManyPieces) {
  for (const size_t pieces : {1, 2, 3}) {
    Http2Frames frames(kLimits);
    frames.Take(kPreface + Frame(kHeaders, 0, 1, 5));
    const std::string message = Message(pieces - 1);
    Http2Frames::Counts sum;
    for (int i = 0; i < 100; ++i) {
      sum += frames.Take(Frame(kData, 0, 1, message.substr(0, 5)));
      for (size_t at = 5; at < message.size(); ++at) {
        sum += frames.Take(Frame(kData, 0, 1, message.substr(at, 1)));
      }
    }
    EXPECT_EQ(sum.later_messages, 99);
    EXPECT_EQ(sum.broken, pieces < 3 ? ""
                                     : "it has sent 7 bytes of a message in 3 pieces; expected at "
                                       "most 2");
  }
}

// As when room for it comes with each message before it that is taken.
TEST(Http2FramesTest, AMessageMayComeInThePiecesThatThoseBeforeItDidNotUse) {
  // Of what comes behind `messages` in a piece each.
  const auto broken_after = [&](int messages, size_t pieces) {
    Http2Frames frames(kLimits);
    Http2Frames::Counts sum = frames.Take(kPreface + Frame(kHeaders, 0, 1, 5));
    for (int i = 0; i < messages; ++i) sum += frames.Take(Frame(kData, 0, 1, Message(1)));
    const std::string message = Message(20);
    for (size_t at = 0; at < pieces; ++at) {
      sum += frames.Take(Frame(kData, 0, 1, message.substr(at, 1)));
    }
    return sum.broken;
  };
  for (const int messages : {0, 1, 2, 3, 100}) {
    // Two came with each, of which one was used; ten are kept.
    const size_t most = 8 + static_cast<size_t>(std::min(messages, 2));
    EXPECT_EQ(broken_after(messages, most), "") << messages;
    EXPECT_EQ(broken_after(messages, most + 1),
              absl::StrCat("it has sent ", most + 1, " bytes of a message in ", most + 1,
                           " pieces; expected at most ", most))
        << messages;
  }
}

TEST(Http2FramesTest, WhatIsReadInPiecesCountsAsThat) {
  const std::string bytes =
      kPreface + Frame(kHeaders, kEndHeaders, 1, 100) + Frame(kData, 0, 1, Message(100));
  EXPECT_EQ(Take(bytes, bytes.size(), kLimits).broken, "");
  EXPECT_EQ(Take(bytes, 1, kLimits).broken,
            "it has sent 9 bytes of a message in 9 pieces; expected at most 8");
}

TEST(Http2FramesTest, EmptyFramesAreSoMany) {
  const std::string open = Frame(kHeaders, kEndHeaders, 1, 10);
  std::string frames = open;
  for (int i = 0; i < 8; ++i) frames += Frame(kData, 0, 1, 0);
  EXPECT_EQ(BrokenAtOnce(frames), "");
  EXPECT_EQ(BrokenAtOnce(frames + Frame(kData, 0, 1, 0)),
            "it has sent 0 bytes of a message in 9 pieces; expected at most 8");
}

TEST(Http2FramesTest, KnowsWhatItsClientHasNotEnded) {
  Http2Frames frames(kLimits);
  const auto open_after = [&frames](const std::string& bytes) {
    EXPECT_EQ(frames.Take(bytes).broken, "");
    return frames.open();
  };
  EXPECT_EQ(open_after(kPreface + Frame(kHeaders, kEndHeaders, 1, 10)), 1u);
  EXPECT_EQ(open_after(Frame(kHeaders, kEndHeaders | kEndStream, 3, 10)), 1u);
  EXPECT_EQ(open_after(Frame(kHeaders, kEndHeaders, 5, 10) + Frame(kHeaders, kEndHeaders, 7, 10)),
            3u);
  EXPECT_EQ(open_after(Frame(kData, 0, 7, Message(8))), 3u);
  EXPECT_EQ(open_after(Frame(kData, kEndStream, 7, Message(8))), 2u);
  EXPECT_EQ(open_after(Frame(kReset, 0, 5, 4) + Frame(kReset, 0, 3, 4)), 1u);
  EXPECT_EQ(open_after(Frame(kData, kEndStream, 1, 0)), 0u);
}

// The daemon may have ended more of them than may be open: those that are used go on.
TEST(Http2FramesTest, OfStreamsThatAreNotUsedOnlySoManyAreKept) {
  const std::string half = Frame(kData, 0, 1, Message(1000, 10));
  std::string frames = Frame(kHeaders, kEndHeaders, 1, 10) + half;
  for (uint32_t stream = 3; stream < 99; stream += 2) {
    frames += Frame(kHeaders, kEndHeaders, stream, 10) + Frame(kData, 0, stream, Message(9, 3));
    // What is still missing of that message is none that begins.
    frames += Frame(kData, 0, 1, std::string(20, '\xff'));
  }
  EXPECT_EQ(Broken(frames), "");
  EXPECT_EQ(Broken(frames + Frame(kData, 0, 93, 6)), "");
  EXPECT_EQ(Broken(frames + Frame(kData, 0, 91, 6)),
            "it sends data in stream 91, which is not open");
}

// One that lives and has been quiet for long must not end its connection.
TEST(Http2FramesTest, AQuietStreamIsFollowedAgain) {
  for (const bool whole : {true, false}) {
    SCOPED_TRACE(whole);
    std::string frames = Frame(kHeaders, kEndHeaders, 1, 10) + Frame(kData, 0, 1, Message(8));
    for (uint32_t stream = 3; stream < 99; stream += 2) {
      frames += Frame(kHeaders, kEndHeaders, stream, 10) +
                Frame(kData, 0, stream, whole ? Message(9) : Message(9, 3));
    }
    EXPECT_EQ(Broken(frames), "");
    // Where there are others whose messages are not whole it is given up before them.
    EXPECT_EQ(Broken(frames + Frame(kData, 0, 1, Message(8))),
              whole ? "" : "it sends data in stream 1, which is not open");
    EXPECT_NE(Broken(frames + Frame(kData, 0, 1, Message(2000, 0))), "");
    EXPECT_EQ(Broken(frames + Frame(kData, 0, 97, Message(8).substr(0, 6))), "");
  }
}

}  // namespace
}  // namespace chorus::server
