// Sizes in which memory is handed out: multiples of 64 B up to 512 B, then eight to each doubling,
// so that at most an eighth is wasted and a piece that comes back soon fits again.
//
// Threads: pure functions. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_RUNTIME_SIZE_CLASS_H_
#define CHORUS_CORE_RUNTIME_SIZE_CLASS_H_

#include <cstdint>

namespace chorus {

struct SizeClass {
  static constexpr int kPerDoubling = 8;
  static constexpr int64_t kLargestBytes = int64_t{1} << 40;
  static constexpr int kCount = 8 + kPerDoubling * (40 - 9);

  int index = 0;
  int64_t bytes = 0;  // >= what was asked for

  // 0 <= bytes <= kLargestBytes.
  static SizeClass Of(int64_t bytes) {
    if (bytes <= 512) {
      const int index = bytes == 0 ? 0 : static_cast<int>((bytes - 1) / 64);
      return {index, (index + 1) * int64_t{64}};
    }
    const int power = 63 - __builtin_clzll(static_cast<uint64_t>(bytes - 1));  // >= 9
    const int64_t step = int64_t{1} << (power - 3);
    const int64_t steps = (bytes - 1 - (int64_t{1} << power)) / step;  // 0..7
    return {8 + kPerDoubling * (power - 9) + static_cast<int>(steps),
            (int64_t{1} << power) + (steps + 1) * step};
  }
};

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_SIZE_CLASS_H_
