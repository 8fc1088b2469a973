// What each thread of the kernels of random numbers does: blocks of Philox.
//
// Threads: each call is one thread of a launch. Ownership: all memory is the caller's. Errors:
// none.
#ifndef CHORUS_CORE_OPS_RANDOM_RANDOM_KERNELS_H_
#define CHORUS_CORE_OPS_RANDOM_RANDOM_KERNELS_H_

#include <cstdint>

#include "core/base/device.h"
#include "core/ops/random/numbers.h"

namespace chorus {
namespace cuda {

template <typename T>
struct RandomArgs {
  static constexpr int kScratchPacks = 0;
  const int64_t* seed = nullptr;
  const int64_t* offset = nullptr;
  T* out = nullptr;
  int64_t count = 0;
};
template <typename Numbers, typename T>
CHORUS_DEVICE void Random(const RandomArgs<T>& args, const Lane& lane) {
  const auto seed = static_cast<uint64_t>(*args.seed);
  const auto offset = static_cast<uint64_t>(*args.offset);
  const int64_t blocks = (args.count + kPerBlock<T> - 1) / kPerBlock<T>;
  for (int64_t n = lane.index; n < blocks; n += lane.count) {
    T numbers[kPerBlock<T>];
    Numbers::Of(WordsOf(seed, offset, static_cast<uint64_t>(n)), numbers);
    const int64_t first = n * kPerBlock<T>;
    CHORUS_UNROLL
    for (int i = 0; i < kPerBlock<T>; ++i) {
      if (first + i < args.count) args.out[first + i] = numbers[i];
    }
  }
}

#define CHORUS_RANDOM_REALS(X, dtype, T)                             \
  X(random_normal_##dtype, RandomArgs<T>, (Random<RandomNormal, T>)) \
  X(random_uniform_##dtype, RandomArgs<T>, (Random<RandomUniform, T>))
#define CHORUS_KERNELS_OF_Random(X)                                      \
  X(random_bits_1, RandomArgs<uint8_t>, (Random<RandomBits, uint8_t>))   \
  X(random_bits_2, RandomArgs<uint16_t>, (Random<RandomBits, uint16_t>)) \
  X(random_bits_4, RandomArgs<uint32_t>, (Random<RandomBits, uint32_t>)) \
  X(random_bits_8, RandomArgs<uint64_t>, (Random<RandomBits, uint64_t>)) \
  CHORUS_RANDOM_REALS(X, f16, F16)                                       \
  CHORUS_RANDOM_REALS(X, bf16, BF16)                                     \
  CHORUS_RANDOM_REALS(X, f32, float)                                     \
  CHORUS_RANDOM_REALS(X, f64, double)

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_RANDOM_RANDOM_KERNELS_H_
