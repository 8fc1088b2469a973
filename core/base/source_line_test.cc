#include "core/base/source_line.h"

#include <string>

#include "gtest/gtest.h"

namespace chorus {
namespace {

TEST(SourceLineTest, KeepsTheEndOfALongOne) {
  const std::string longest(kMaxSourceLineBytes, 'a');
  EXPECT_EQ(ShortSourceLine(""), "");
  EXPECT_EQ(ShortSourceLine("train.cc:12"), "train.cc:12");
  EXPECT_EQ(ShortSourceLine(longest), longest);
  const std::string longer = "/" + longest.substr(3) + ":12";
  EXPECT_EQ(ShortSourceLine(longer), longest.substr(3) + ":12");
}

TEST(SourceLineTest, CutsNoCharacterInTwo) {
  const std::string rest(kMaxSourceLineBytes - 2, 'a');
  EXPECT_EQ(ShortSourceLine("\xc3\xa4" + rest), "\xc3\xa4" + rest);
  EXPECT_EQ(ShortSourceLine("\xe2\x82\xac" + rest), rest);
  EXPECT_EQ(ShortSourceLine("train.cc:12", 5), "cc:12");
  EXPECT_EQ(ShortSourceLine(std::string(2 * kMaxSourceLineBytes, '\x80')), "");
}

}  // namespace
}  // namespace chorus
