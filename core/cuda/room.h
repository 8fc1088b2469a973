// Where things lie behind each other in a workspace of the GPU.
//
// Threads: pure functions. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_CUDA_ROOM_H_
#define CHORUS_CORE_CUDA_ROOM_H_

#include <cstdint>

namespace chorus {

// A workspace is aligned to no more than that at a call. What is in it may want what memory of the
// driver has, and begins at the least multiple of that from there on.
constexpr int64_t kWorkspaceAlignment = 64;
constexpr int64_t kRoomAlignment = 256;
constexpr int64_t RoomFrom(int64_t bytes) {
  return (bytes + kRoomAlignment - 1) / kRoomAlignment * kRoomAlignment;
}
// What a workspace needs for so many bytes from its first room on.
constexpr int64_t WorkspaceOf(int64_t bytes) {
  return bytes == 0 ? 0 : bytes + kRoomAlignment - kWorkspaceAlignment;
}

}  // namespace chorus

#endif  // CHORUS_CORE_CUDA_ROOM_H_
