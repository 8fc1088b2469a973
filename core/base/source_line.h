// The trainer's file:line, by which errors say where something was asked for.
//
// It travels with graphs and tensors, goes into errors, and stays in records that outlive their
// session: so it is bounded, wherever it comes in.
//
// Threads: pure functions. Ownership: the caller's text. Errors: none.
#ifndef CHORUS_CORE_BASE_SOURCE_LINE_H_
#define CHORUS_CORE_BASE_SOURCE_LINE_H_

#include <cstddef>

#include "absl/strings/string_view.h"

namespace chorus {

// Decoders refuse more; a sender cuts it before.
inline constexpr size_t kMaxSourceLineBytes = 512;

// The end of `source`, where the file's name and the line are: at most `most` bytes, and no part of
// a UTF-8 character before them.
inline absl::string_view ShortSourceLine(absl::string_view source,
                                         size_t most = kMaxSourceLineBytes) {
  if (source.size() <= most) return source;
  source.remove_prefix(source.size() - most);
  while (!source.empty() && (static_cast<unsigned char>(source[0]) & 0xc0) == 0x80) {
    source.remove_prefix(1);
  }
  return source;
}

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_SOURCE_LINE_H_
