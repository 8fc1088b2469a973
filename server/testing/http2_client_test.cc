#include "server/testing/http2_client.h"

#include <string>

#include "gtest/gtest.h"

namespace chorus::server {
namespace {

// Spelled out, beside the RFCs.
TEST(Http2ClientTest, AFrameIsItsHeadAndItsPayload) {
  EXPECT_EQ(Frame(kSettings, 0, 0, ""), std::string("\0\0\0\4\0\0\0\0\0", 9));
  EXPECT_EQ(Frame(kReset, 0, 7, BigEndian(8, 4)), std::string("\0\0\4\3\0\0\0\0\7\0\0\0\10", 13));
  EXPECT_EQ(FrameHead(0x123456, kContinuation, kEndHeaders, 0x89abcdef),
            "\x12\x34\x56\x09\x04\x89\xab\xcd\xef");
  EXPECT_EQ(FrameHead(1, kHeaders, kEndHeaders | kEndStream, 1),
            std::string("\0\0\1\1\5\0\0\0\1", kFrameHead));
  EXPECT_EQ(Frame(kData, kPadded, 1, "abc").substr(kFrameHead), "abc");
}

TEST(Http2ClientTest, AFieldSaysHowLongItsPartsAre) {
  EXPECT_EQ(HeaderField("te", "trailers"), std::string("\0\2te\10trailers", 13));
  EXPECT_EQ(HeaderField("", std::string(126, 'x')).substr(0, 4), std::string("\0\0\x7ex", 4));
  EXPECT_EQ(HeaderField("", std::string(127, 'x')).substr(0, 5), std::string("\0\0\x7f\0x", 5));
  EXPECT_EQ(HeaderField("", std::string(254, 'x')).substr(0, 5), std::string("\0\0\x7f\x7fx", 5));
  // RFC 7541, section C.1.2, in 7 bits: 1337 is 127 and 1210, which is 58 and 9 times 128.
  EXPECT_EQ(HeaderField("", std::string(1337, 'x')).substr(0, 6),
            std::string("\0\0\x7f\xba\x09x", 6));
}

}  // namespace
}  // namespace chorus::server
