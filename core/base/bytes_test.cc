#include "core/base/bytes.h"

#include <limits>

#include "gtest/gtest.h"

namespace chorus {
namespace {

TEST(BytesTest, NumbersRoundTrip) {
  const int64_t values[] = {0,
                            1,
                            -1,
                            63,
                            64,
                            -64,
                            -65,
                            std::numeric_limits<int64_t>::max(),
                            std::numeric_limits<int64_t>::min()};
  ByteWriter out;
  for (int64_t value : values) {
    out.PutSigned(value);
    out.PutVarint(static_cast<uint64_t>(value));
    out.Put(value);
  }
  ByteReader in(out.bytes());
  for (int64_t value : values) {
    EXPECT_EQ(in.GetSigned(), value);
    EXPECT_EQ(in.GetVarint(), static_cast<uint64_t>(value));
    EXPECT_EQ(in.Get<int64_t>(), value);
  }
  EXPECT_TRUE(in.Done());
}

TEST(BytesTest, AReadPastTheEndFailsAndStaysFailed) {
  ByteReader in("abc");
  EXPECT_EQ(in.Get<uint32_t>(), 0u);
  EXPECT_FALSE(in.ok());
  EXPECT_EQ(in.Get<uint8_t>(), 0u);
  EXPECT_FALSE(in.Done());
}

TEST(BytesTest, ACountThatCannotBeTrueFails) {
  ByteWriter out;
  out.PutVarint(1u << 30);
  out.PutRaw("xxxx", 4);
  ByteReader in(out.bytes());
  EXPECT_EQ(in.GetCount(4), 0u);
  EXPECT_FALSE(in.ok());
}

TEST(BytesTest, AVarintOfMoreThan64BitsFails) {
  ByteReader in("\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02");
  in.GetVarint();
  EXPECT_FALSE(in.ok());
}

TEST(BytesTest, AVarintThatCouldBeShorterFails) {
  for (absl::string_view bytes :
       {absl::string_view("\x80\x00", 2), absl::string_view("\xff\x80\x00", 3)}) {
    ByteReader in(bytes);
    in.GetVarint();
    EXPECT_FALSE(in.ok());
  }
  ByteReader zero(absl::string_view("\x00", 1));
  EXPECT_EQ(zero.GetVarint(), 0u);
  EXPECT_TRUE(zero.Done());
}

TEST(BytesTest, OverwriteReplacesInPlace) {
  ByteWriter out;
  out.Put(uint32_t{1});
  out.Put(uint32_t{2});
  out.Overwrite(0, uint32_t{7});
  ByteReader in(out.bytes());
  EXPECT_EQ(in.Get<uint32_t>(), 7u);
  EXPECT_EQ(in.Get<uint32_t>(), 2u);
}

}  // namespace
}  // namespace chorus
