// An operand that one of NVIDIA's libraries is promised to find at an aligned address, while a
// caller may have it anywhere that suits its elements: there it goes by way of the workspace.
//
// Threads: plain values; the copies come on the stream that they are given, in its order.
// Ownership: all memory is the caller's. Errors: the driver's.
#ifndef CHORUS_CORE_CUDA_ALIGNED_OPERAND_H_
#define CHORUS_CORE_CUDA_ALIGNED_OPERAND_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "core/base/error.h"
#include "core/cuda/cuda_api.h"
#include "core/cuda/room.h"

namespace chorus {

class AlignedOperand {
 public:
  AlignedOperand() = default;
  AlignedOperand(int64_t bytes, uint32_t alignment) : bytes_(bytes), alignment_(alignment) {}

  uint32_t alignment() const { return alignment_; }
  bool LiesBadly(cuda::DevicePtr at) const { return at % alignment_ != 0; }

  // Keeps room for it behind the first `end` bytes of the workspace, which it moves.
  void KeepRoom(int64_t* end) {
    room_ = RoomFrom(*end);
    *end = room_ + bytes_;
  }
  // Where the library has it: `at`, or the room. `rooms`: the workspace's first aligned byte.
  cuda::DevicePtr LocationOf(cuda::DevicePtr at, cuda::DevicePtr rooms) const {
    return LiesBadly(at) ? rooms + static_cast<cuda::DevicePtr>(room_) : at;
  }
  // Between both addresses, where they differ: before the library reads it, behind what it writes.
  absl::Status Copy(const cuda::Api& driver, cuda::DevicePtr to, cuda::DevicePtr from,
                    cuda::Stream stream) const {
    if (to == from) return absl::OkStatus();
    CHORUS_CUDA(driver, MemcpyDtoDAsync, to, from, static_cast<size_t>(bytes_), stream);
    return absl::OkStatus();
  }

 private:
  int64_t bytes_ = 0;
  uint32_t alignment_ = 1;
  int64_t room_ = 0;
};

}  // namespace chorus

#endif  // CHORUS_CORE_CUDA_ALIGNED_OPERAND_H_
