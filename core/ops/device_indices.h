// Indices and labels of any integer dtype, for kernels of GPUs. They came from a client: each is
// checked where it is used.
//
// Threads: pure functions. Ownership: the memory is the caller's. Errors: none; a kernel tells of
// an index that is neither within nor ignored by its element (cuda::StoreLeast).
#ifndef CHORUS_CORE_OPS_DEVICE_INDICES_H_
#define CHORUS_CORE_OPS_DEVICE_INDICES_H_

#include <cstdint>

#include "core/base/device.h"

namespace chorus {
namespace cuda {

enum class IndexKind : int32_t { kI8, kU8, kI16, kI32, kI64 };

struct DeviceIndices {
  const void* memory = nullptr;
  int64_t limit = 0;    // values from 0 to limit - 1 count
  int64_t ignored = 0;  // if `ignores`: this one stands for nothing
  IndexKind kind = IndexKind::kI64;
  bool ignores = false;

  // All threads of a launch go the same way here, so this is cheaper than a kernel for each dtype.
  CHORUS_DEVICE int64_t At(int64_t i) const {
    switch (kind) {
      case IndexKind::kI8:
        return static_cast<const int8_t*>(memory)[i];
      case IndexKind::kU8:
        return static_cast<const uint8_t*>(memory)[i];
      case IndexKind::kI16:
        return static_cast<const int16_t*>(memory)[i];
      case IndexKind::kI32:
        return static_cast<const int32_t*>(memory)[i];
      default:
        return static_cast<const int64_t*>(memory)[i];
    }
  }
  CHORUS_DEVICE bool IsWithin(int64_t index) const { return index >= 0 && index < limit; }
  CHORUS_DEVICE bool IsIgnored(int64_t index) const { return ignores && index == ignored; }
};

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_DEVICE_INDICES_H_
