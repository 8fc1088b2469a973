#include "core/base/utf8.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

TEST(Utf8Test, ACharacterIsInItsShortestForm) {
  const struct {
    std::string text;
    size_t bytes;
    uint32_t code;
  } cases[] = {
      {"a", 1, 'a'},
      {std::string(1, '\0'), 1, 0},
      {"\x7f", 1, 0x7f},
      {"\u0080", 2, 0x80},
      {"\u07ff", 2, 0x7ff},
      {"\u0800", 3, 0x800},
      {"\ud7ff", 3, 0xd7ff},
      {"\ue000", 3, 0xe000},
      {"\uffff", 3, 0xffff},
      {"\U00010000", 4, 0x10000},
      {"\U0010ffff", 4, 0x10ffff},
      {"\x80", 0, 0},
      {"\xbf", 0, 0},
      {"\xc2", 0, 0},
      {"\xc2z", 0, 0},
      {"\xc1\xbf", 0, 0},
      {"\xe0\x9f\xbf", 0, 0},
      {"\xed\xa0\x80", 0, 0},
      {"\xed\xbf\xbf", 0, 0},
      {"\xe2\x80", 0, 0},
      {"\xf0\x8f\xbf\xbf", 0, 0},
      {"\xf4\x90\x80\x80", 0, 0},
      {"\xf8\x88\x80\x80\x80", 0, 0},
      {"\xff", 0, 0},
  };
  for (const auto& c : cases) {
    for (const std::string behind : {"", "z", "\x80", "\xc2\x80"}) {
      // What is cut short may be whole with what comes.
      if (c.bytes == 0 && behind == "\x80") continue;
      const std::string text = c.text + behind;
      SCOPED_TRACE(OneLine(text));
      EXPECT_EQ(FirstCharacter(text).bytes, c.bytes);
      EXPECT_EQ(FirstCharacter(text).code, c.code);
    }
    EXPECT_EQ(IsUtf8(absl::StrCat("z\u00fc", c.text, "z")), c.bytes > 0) << OneLine(c.text);
  }
  EXPECT_TRUE(IsUtf8(""));
}

TEST(OneLineTest, EscapesWhatIsNoTextAndLeavesTheRest) {
  EXPECT_EQ(OneLine("Zeile über 0..9 \"quoted\" \\"), "Zeile über 0..9 \"quoted\" \\");
  EXPECT_EQ(OneLine(absl::string_view("a\0b\r\n\t\x1b[2J\x7f", 11)),
            "a\\x00b\\x0d\\x0a\\x09\\x1b[2J\\x7f");
  EXPECT_EQ(OneLine("\xc2\x9b"
                    "31m \xc2\xa0"),
            "\\xc2\\x9b31m \xc2\xa0");
  EXPECT_EQ(OneLine("a\u2028b\u2029c\u2027"), "a\\xe2\\x80\\xa8b\\xe2\\x80\\xa9c\u2027");
  EXPECT_EQ(OneLine(""), "");
}

// A terminal with characters of 8 bits takes 0x80 to 0x9f for C1, wherever they stand.
TEST(OneLineTest, EscapesBytesThatAreNoUtf8) {
  for (int byte = 0x80; byte < 0x100; ++byte) {
    const std::string escape = absl::StrCat("\\x", absl::Hex(byte));
    const std::string text(1, static_cast<char>(byte));
    EXPECT_EQ(OneLine(text), escape);
    EXPECT_EQ(OneLine(absl::StrCat("a", text, "31m\u00fc")),
              absl::StrCat("a", escape, "31m\u00fc"));
  }
  EXPECT_EQ(OneLine("\xed\xa0\x80 \xf0\x9f\x98"), "\\xed\\xa0\\x80 \\xf0\\x9f\\x98");
  EXPECT_EQ(OneLine("\u00fc\x9b\u00fc\xc3"), "\u00fc\\x9b\u00fc\\xc3");
  // What it gives is one already.
  for (const std::string text : {"\x9b\n\u00fc", "\\x0a"}) {
    EXPECT_EQ(OneLine(OneLine(text)), OneLine(text));
  }
}

TEST(OneLineTest, CutsBetweenCharactersAndEscapes) {
  EXPECT_EQ(OneLine("abcdefgh", 8), "abcdefgh");
  EXPECT_EQ(OneLine("abcdefghi", 8), "abcde...");
  EXPECT_EQ(OneLine("abc\n\n\n", 8), "abc...") << "no part of an escape";
  EXPECT_EQ(OneLine("ab\n\n", 10), "ab\\x0a\\x0a") << "it fits";
  EXPECT_EQ(OneLine("abcd\u00fc\u00fcgh", 8), "abcd...") << "no part of a character";
  EXPECT_EQ(OneLine("abc\u00fc\u00fcgh", 8), "abc\u00fc...");
}

}  // namespace
}  // namespace chorus
