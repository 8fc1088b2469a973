#include "server/http2_frames.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>

#include "absl/strings/string_view.h"
#include "gtest/gtest.h"

namespace chorus::server {
namespace {

constexpr unsigned char kData = 0;
constexpr unsigned char kHeaders = 1;
constexpr unsigned char kReset = 3;
constexpr unsigned char kSettings = 4;
constexpr unsigned char kPing = 6;
constexpr unsigned char kWindowUpdate = 8;
constexpr unsigned char kContinuation = 9;
constexpr unsigned char kAck = 1;

const char kPreface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

std::string Frame(unsigned char type, unsigned char flags, uint32_t stream, size_t size) {
  std::string out;
  for (const int shift : {16, 8, 0}) out.push_back(static_cast<char>(size >> shift));
  out.push_back(static_cast<char>(type));
  out.push_back(static_cast<char>(flags));
  for (const int shift : {24, 16, 8, 0}) out.push_back(static_cast<char>(stream >> shift));
  // What looks like frames when it is taken for them.
  return out + std::string(size, '\1');
}

// In pieces of 1 to `most` bytes.
Http2Frames::Counts Take(const std::string& bytes, size_t most) {
  static std::mt19937_64 random(20261123);
  Http2Frames frames;
  Http2Frames::Counts sum;
  for (size_t at = 0; at < bytes.size();) {
    const size_t size = std::min(bytes.size() - at, 1 + random() % most);
    const Http2Frames::Counts counts = frames.Take(absl::string_view(bytes).substr(at, size));
    sum.calls += counts.calls;
    sum.asked += counts.asked;
    at += size;
  }
  return sum;
}

TEST(Http2FramesTest, CountsWhatIsAskedHoweverItsBytesCome) {
  const std::string bytes = kPreface + Frame(kSettings, 0, 0, 12) + Frame(kSettings, kAck, 0, 0) +
                            Frame(kHeaders, 4, 1, 300) + Frame(kData, 1, 1, 70000) +
                            Frame(kHeaders, 0, 3, 16384) + Frame(kContinuation, 4, 3, 20) +
                            Frame(kPing, 0, 0, 8) + Frame(kPing, kAck, 0, 8) +
                            Frame(kWindowUpdate, 0, 0, 4) + Frame(kReset, 0, 3, 4) +
                            Frame(kHeaders, 5, 1, 10) +           // of a stream that is open
                            Frame(kHeaders, 5, 0x80000005, 10) +  // with a bit that says nothing
                            Frame(kHeaders, 5, 0x80000005, 0);
  for (const size_t most : {size_t{1}, size_t{2}, size_t{10}, size_t{100}, bytes.size()}) {
    for (int round = 0; round < 20; ++round) {
      const Http2Frames::Counts counts = Take(bytes, most);
      EXPECT_EQ(counts.calls, 3) << most;
      EXPECT_EQ(counts.asked, 7) << most;  // with one PING and one SETTINGS
    }
  }
}

// A stream of an even number is none of a client's, and whatever comes behind it counts.
TEST(Http2FramesTest, NumbersOfTheServersStreamsDoNotEndTheCount) {
  const std::string bytes = kPreface + Frame(kHeaders, 4, 0x7ffffffe, 0) +
                            Frame(kHeaders, 4, 1, 0) + Frame(kHeaders, 4, 2, 0) +
                            Frame(kHeaders, 4, 3, 0);
  EXPECT_EQ(Take(bytes, 7).calls, 2);
  EXPECT_EQ(Take(bytes, 7).asked, 4);
}

TEST(Http2FramesTest, WhatIsNotWholeCountsForNothing) {
  const std::string bytes = kPreface + Frame(kHeaders, 4, 1, 0);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(Take(bytes.substr(0, size), 7).asked, 0) << size;
  }
  EXPECT_EQ(Take(bytes, 7).asked, 1);
}

}  // namespace
}  // namespace chorus::server
