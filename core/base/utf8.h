// Texts as characters: what clients send may be any bytes.
//
// Threads: pure functions. Ownership: the caller's text. Errors: none.
#ifndef CHORUS_CORE_BASE_UTF8_H_
#define CHORUS_CORE_BASE_UTF8_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace chorus {

struct Utf8Character {
  size_t bytes = 0;  // 0: it is none
  uint32_t code = 0;
};
// That at the beginning of `text`, which is not empty: in the shortest form, below U+110000 and no
// surrogate.
Utf8Character FirstCharacter(absl::string_view text);

bool IsUtf8(absl::string_view text);

// `text` as one line that a terminal, and a reader of lines, takes for nothing else: bytes that are
// no UTF-8, control characters (C0, DEL, C1) and line separators (U+2028, U+2029) are escapes, byte
// by byte ("\x0a"); other characters stay. Of more than `most` bytes as many as fit whole before
// "...".
std::string OneLine(absl::string_view text, size_t most = std::string::npos);

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_UTF8_H_
