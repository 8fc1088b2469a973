// What a frame looks like from outside: the part that the ring needs to know.
//
//   u32 size of the whole frame, u16 kind, u16 version, i64 sequence: little-endian,
//   kFrameHeaderBytes then the body, whose form command.cc knows
//
// Threads: plain data. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_TRANSPORT_FRAME_FORMAT_H_
#define CHORUS_CORE_TRANSPORT_FRAME_FORMAT_H_

#include <cstddef>
#include <cstdint>

namespace chorus {

inline constexpr size_t kFrameHeaderBytes = 16;
inline constexpr size_t kMaxFrameBytes = 64 * 1024;
inline constexpr uint16_t kFrameVersion = 2;

// Numbers of the wire: append only.
enum class CommandKind : uint16_t {
  kRegisterGraph = 1,
  kRun = 2,
  kCreateTensor = 3,
  kMakeReadable = 4,
  kRelease = 5,
  kDropTape = 6,
  kCancel = 7,
  kEnterEpoch = 8,
  kRefuse = 9,
};
// In the ring only: a record that is no frame (ring.h). No command has it.
inline constexpr uint16_t kSkipKind = 0xffff;

// The first bytes of a frame.
struct FrameStart {
  uint32_t size;
  uint16_t kind;
  uint16_t version;
};
static_assert(sizeof(FrameStart) == 8, "as on the wire");

}  // namespace chorus

#endif  // CHORUS_CORE_TRANSPORT_FRAME_FORMAT_H_
