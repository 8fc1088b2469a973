#include "core/base/utf8.h"

#include <algorithm>

#include "absl/strings/str_format.h"

namespace chorus {
namespace {

// What a terminal or a reader of lines takes for a command or the end of a line.
bool IsControl(uint32_t code) {
  return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x2028 || code == 0x2029;
}

}  // namespace

Utf8Character FirstCharacter(absl::string_view text) {
  constexpr uint32_t kLeast[] = {0, 0x80, 0x800, 0x10000};  // that needs so many more bytes
  const auto lead = static_cast<uint8_t>(text[0]);
  const int continuation_bytes = lead < 0x80             ? 0
                                 : (lead & 0xe0) == 0xc0 ? 1
                                 : (lead & 0xf0) == 0xe0 ? 2
                                 : (lead & 0xf8) == 0xf0 ? 3
                                                         : -1;
  const auto bytes = static_cast<size_t>(continuation_bytes + 1);
  if (bytes == 0 || text.size() < bytes) return {};
  uint32_t code = bytes == 1 ? lead : lead & (0x3fu >> continuation_bytes);
  for (size_t i = 1; i < bytes; ++i) {
    const auto byte = static_cast<uint8_t>(text[i]);
    if ((byte & 0xc0) != 0x80) return {};
    code = code << 6 | (byte & 0x3f);
  }
  const bool is_surrogate = code >= 0xd800 && code < 0xe000;
  if (code < kLeast[continuation_bytes] || is_surrogate || code > 0x10ffff) return {};
  return {bytes, code};
}

bool IsUtf8(absl::string_view text) {
  while (!text.empty()) {
    const size_t bytes = FirstCharacter(text).bytes;
    if (bytes == 0) return false;
    text.remove_prefix(bytes);
  }
  return true;
}

std::string OneLine(absl::string_view text, size_t most) {
  std::string line;
  line.reserve(std::min(text.size(), most));
  size_t whole = 0;  // of the line, before what would be cut off if it came to that
  while (!text.empty()) {
    const Utf8Character character = FirstCharacter(text);
    const absl::string_view bytes = text.substr(0, std::max<size_t>(character.bytes, 1));
    if (character.bytes == 0 || IsControl(character.code)) {
      for (const char byte : bytes) {
        absl::StrAppendFormat(&line, "\\x%02x", static_cast<unsigned char>(byte));
      }
    } else {
      line.append(bytes.data(), bytes.size());
    }
    text.remove_prefix(bytes.size());
    if (line.size() > most) {
      line.resize(whole);
      return line + "...";
    }
    if (line.size() + 3 <= most) whole = line.size();
  }
  return line;
}

}  // namespace chorus
