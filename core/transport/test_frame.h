// Frames with a body that shows whether it arrived whole, for tests of the ring.
//
// Threads: plain functions. Ownership: plain values. Errors: none.
#ifndef CHORUS_CORE_TRANSPORT_TEST_FRAME_H_
#define CHORUS_CORE_TRANSPORT_TEST_FRAME_H_

#include <cstdint>
#include <cstring>
#include <string>

#include "absl/strings/string_view.h"
#include "core/transport/frame_format.h"

namespace chorus {

// A frame of `size` bytes (at least kFrameHeaderBytes) whose bytes follow from its sequence.
inline std::string MakeTestFrame(int64_t sequence, size_t size) {
  std::string frame(size, '\0');
  for (size_t i = 0; i < size; ++i) {
    frame[i] = static_cast<char>(static_cast<uint64_t>(sequence) * 31 + i * 7);
  }
  const FrameStart start{static_cast<uint32_t>(size), static_cast<uint16_t>(CommandKind::kRun),
                         kFrameVersion};
  std::memcpy(&frame[0], &start, sizeof(start));
  std::memcpy(&frame[sizeof(start)], &sequence, sizeof(sequence));
  return frame;
}

inline int64_t TestFrameSequence(absl::string_view frame) {
  int64_t sequence = 0;
  std::memcpy(&sequence, frame.data() + sizeof(FrameStart), sizeof(sequence));
  return sequence;
}

// Whether it is what MakeTestFrame made.
inline bool IsWholeTestFrame(absl::string_view frame) {
  return frame.size() >= kFrameHeaderBytes &&
         frame == MakeTestFrame(TestFrameSequence(frame), frame.size());
}

}  // namespace chorus

#endif  // CHORUS_CORE_TRANSPORT_TEST_FRAME_H_
