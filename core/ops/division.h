// Division of indices by a number that is known before a launch, which GPUs have no instruction
// for: the high part of a product, where dividends have 31 bits.
//
// Threads: plain data and pure functions. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_OPS_DIVISION_H_
#define CHORUS_CORE_OPS_DIVISION_H_

#include <cstdint>

#include "core/base/device.h"

namespace chorus {
namespace cuda {

struct Division {
  Division() = default;
  // By `divisor`, of what is from 0 to `most`. By 1, if it is 0 because there is nothing.
  Division(int64_t divisor, int64_t most) : by(divisor < 1 ? 1 : divisor) {
    constexpr int64_t kSmall = int64_t{1} << 31;
    if (most >= kSmall || by >= kSmall) return;
    int bits = 0;
    while ((int64_t{1} << bits) < by) ++bits;
    // 2^shift / by, rounded up: too much by less than 1. What that adds to a quotient is less than
    // 2^31 / 2^shift, so at most 1 / by: too little to reach the next whole number.
    shift = 31 + bits;
    factor = static_cast<uint32_t>(((uint64_t{1} << shift) + static_cast<uint64_t>(by) - 1) /
                                   static_cast<uint64_t>(by));
  }

  CHORUS_DEVICE int64_t Of(int64_t n) const {
    if (factor == 0) return n / by;
    return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * factor >> shift);
  }

  int64_t by = 1;
  uint32_t factor = 0;  // 0: there is none
  int32_t shift = 0;
};

// The quotient and the remainder, as an index of what is [.., by].
struct DividedIndex {
  CHORUS_DEVICE DividedIndex(int64_t n, const Division& division)
      : outer(division.Of(n)), inner(n - outer * division.by) {}
  int64_t outer;
  int64_t inner;
};

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_DIVISION_H_
