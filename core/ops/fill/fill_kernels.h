// What each thread of fill's kernel does.
//
// Threads: each call is one thread of a launch. Ownership: all memory is the caller's. Errors:
// none.
#ifndef CHORUS_CORE_OPS_FILL_FILL_KERNELS_H_
#define CHORUS_CORE_OPS_FILL_FILL_KERNELS_H_

#include <cstdint>

#include "core/base/device.h"

namespace chorus {
namespace cuda {

// Elements of any dtype, as the bits of an unsigned number of their width.
template <typename T>
struct FillArgs {
  static constexpr int kScratchPacks = 0;
  T* out = nullptr;
  int64_t count = 0;
  T value = 0;
};
template <typename T>
CHORUS_DEVICE void Fill(const FillArgs<T>& args, const Lane& lane) {
  for (int64_t i = lane.index; i < args.count; i += lane.count) args.out[i] = args.value;
}

#define CHORUS_KERNELS_OF_Fill(X)               \
  X(fill_1, FillArgs<uint8_t>, Fill<uint8_t>)   \
  X(fill_2, FillArgs<uint16_t>, Fill<uint16_t>) \
  X(fill_4, FillArgs<uint32_t>, Fill<uint32_t>) \
  X(fill_8, FillArgs<uint64_t>, Fill<uint64_t>)

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_FILL_FILL_KERNELS_H_
