// Random numbers out of the words of a block of Philox, for kernels of the host and of GPUs: the
// same bits on both.
//
// Logarithm, sine and cosine are therefore not those of a C library, but products, sums, quotients
// and square roots, each of which rounds alike everywhere where none are fused (-ffp-contract=off,
// -fmad=false). They are within two units of the last place.
//
// Threads: pure functions. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_OPS_RANDOM_NUMBERS_H_
#define CHORUS_CORE_OPS_RANDOM_NUMBERS_H_

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "core/base/device.h"
#include "core/ops/arithmetic.h"
#include "core/ops/random/philox.h"
#include "core/tensor/half.h"

namespace chorus {

// Elements of a block.
template <typename T>
constexpr int kPerBlock = sizeof(T) == 8 ? 2 : 4;

// How many random bits a number in [0, 1) takes: as many as are exact right below 1.
template <typename T>
constexpr int kUniformBits = 24;
template <>
inline constexpr int kUniformBits<double> = 53;
template <>
inline constexpr int kUniformBits<F16> = 11;
template <>
inline constexpr int kUniformBits<BF16> = 8;

// Block n of those of a seed and an offset.
CHORUS_DEVICE PhiloxBlock WordsOf(uint64_t seed, uint64_t offset, uint64_t n) {
  return Philox4x32({static_cast<uint32_t>(n), static_cast<uint32_t>(n >> 32),
                     static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)},
                    static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

CHORUS_DEVICE uint64_t TwoWords(const PhiloxBlock& words, int i) {
  return uint64_t{words[static_cast<size_t>(2 * i + 1)]} << 32 | words[static_cast<size_t>(2 * i)];
}

// Of x = 2^exponent (1 + f) that is positive and normal, where 1 + f is from about sqrt(1/2) to
// about sqrt(2): exponent log 2 + 2 atanh(f / (2 + f)), by the series of atanh.
CHORUS_DEVICE float LogarithmOf(float x) {
  constexpr uint32_t kRoot = 0x3f3504f3;  // sqrt(1/2)
  const uint32_t bits = cuda::BitsOf(x) + (0x3f800000 - kRoot);
  const float exponent = static_cast<float>(static_cast<int32_t>(bits >> 23) - 127);
  const float f = cuda::FloatOf((bits & 0x007fffff) + kRoot) - 1;
  const float s = f / (2 + f);
  const float z = s * s;
  const float series =
      z * (1.0f / 3 + z * (1.0f / 5 + z * (1.0f / 7 + z * (1.0f / 9 + z * (1.0f / 11)))));
  // log 2 in two parts, whose first has few enough digits for exact products.
  return exponent * 0x1.62ep-1f + (2 * s + (2 * s * series + exponent * 0x1.0bfbe8p-15f));
}
CHORUS_DEVICE double LogarithmOf(double x) {
  constexpr uint64_t kRoot = 0x3fe6a09e667f3bcd;
  const uint64_t bits = cuda::BitsOf(x) + (0x3ff0000000000000 - kRoot);
  const double exponent = static_cast<double>(static_cast<int64_t>(bits >> 52) - 1023);
  const double f = cuda::DoubleOf((bits & 0x000fffffffffffff) + kRoot) - 1;
  const double s = f / (2 + f);
  const double z = s * s;
  double series = 0;
  CHORUS_UNROLL
  for (int n = 23; n >= 3; n -= 2) series = z * (1.0 / n + series);
  return exponent * 0x1.62e42feep-1 + (2 * s + (2 * s * series + exponent * 0x1.a39ef35793c76p-33));
}

// Cosine and sine of so many turns, from 0 to below 1, which is a multiple of its type's precision:
// by the series of what is left of the nearest quarter.
template <typename A>
struct Direction {
  A cosine = 0;
  A sine = 0;
};
template <typename A>
CHORUS_DEVICE Direction<A> DirectionOf(A turns) {
  constexpr int kTerms = sizeof(A) == 8 ? 18 : 10;  // powers of x
  const int quarter = static_cast<int>(4 * turns + static_cast<A>(0.5));
  const A x = (turns - quarter * static_cast<A>(0.25)) * static_cast<A>(6.283185307179586477);
  const A square = x * x;
  A even = 1;
  A odd = 1;
  CHORUS_UNROLL
  for (int n = kTerms; n > 0; n -= 2) {
    even = 1 - square * even * (static_cast<A>(1) / static_cast<A>(n * (n - 1)));
    odd = 1 - square * odd * (static_cast<A>(1) / static_cast<A>(n * (n + 1)));
  }
  const A sine = x * odd;
  switch (quarter % 4) {
    case 0:
      return {even, sine};
    case 1:
      return {-sine, even};
    case 2:
      return {-even, -sine};
    default:
      return {sine, -even};
  }
}

// Each gives kPerBlock<T> elements.
struct RandomBits {
  template <typename T>
  static CHORUS_DEVICE void Of(const PhiloxBlock& words, T* out) {
    CHORUS_UNROLL
    for (int i = 0; i < kPerBlock<T>; ++i) {
      if constexpr (sizeof(T) == 8) {
        out[i] = static_cast<T>(TwoWords(words, i));
      } else {
        out[i] = static_cast<T>(words[static_cast<size_t>(i)]);
      }
    }
  }
};

struct RandomUniform {
  template <typename T>
  static CHORUS_DEVICE void Of(const PhiloxBlock& words, T* out) {
    using A = Arithmetic<T>;
    constexpr A kStep = static_cast<A>(1) / static_cast<A>(uint64_t{1} << kUniformBits<T>);
    CHORUS_UNROLL
    for (int i = 0; i < kPerBlock<T>; ++i) {
      if constexpr (sizeof(T) == 8) {
        out[i] = static_cast<A>(TwoWords(words, i) >> (64 - kUniformBits<T>)) * kStep;
      } else {
        out[i] = static_cast<T>(
            static_cast<A>(words[static_cast<size_t>(i)] >> (32 - kUniformBits<T>)) * kStep);
      }
    }
  }
};

struct RandomNormal {
  template <typename T>
  static CHORUS_DEVICE void Of(const PhiloxBlock& words, T* out) {
    using A = Arithmetic<T>;
    CHORUS_UNROLL
    for (int i = 0; i < kPerBlock<T>; i += 2) {
      A u;
      A v;
      // From half a step to 1, never 0; the angle is a multiple of 2^-53 or 2^-24 turns.
      if constexpr (sizeof(T) == 8) {
        u = (static_cast<double>(TwoWords(words, i) >> 11) + 0.5) * 0x1p-53;
        v = static_cast<double>(TwoWords(words, i + 1) >> 11) * 0x1p-53;
      } else {
        u = (static_cast<float>(words[static_cast<size_t>(i)]) + 0.5f) * 0x1p-32f;
        v = static_cast<float>(words[static_cast<size_t>(i + 1)] >> 8) * 0x1p-24f;
      }
      const A radius = std::sqrt(-2 * LogarithmOf(u));
      const Direction<A> direction = DirectionOf(v);
      out[i] = static_cast<T>(radius * direction.cosine);
      out[i + 1] = static_cast<T>(radius * direction.sine);
    }
  }
};

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_RANDOM_NUMBERS_H_
