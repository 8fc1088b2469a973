// Numbers to floating dtypes, rounded once, to the nearest value, ties to the even one.
//
// Constant expressions, so that kernels of a GPU are made of them as well.
//
// Threads: pure functions. Ownership: none. Errors: none; what is too large becomes infinite.
#ifndef CHORUS_CORE_TENSOR_ROUNDING_H_
#define CHORUS_CORE_TENSOR_ROUNDING_H_

#include <cstdint>
#include <type_traits>

#include "core/tensor/half.h"

namespace chorus {

// To float such that rounding that once more, to a half type, gives what rounding the number itself
// gives: where it is not exact, to the neighbour whose last bit is 1.
constexpr float ToOdd(double x) {
  const float nearest = static_cast<float>(x);
  const double back = static_cast<double>(nearest);
  if (back == x || x != x) return nearest;
  const uint32_t bits = FloatBits(nearest);
  if ((bits & 1) != 0) return nearest;
  const bool too_large = (back < 0 ? -back : back) > (x < 0 ? -x : x);
  return FloatOfBits(too_large ? bits - 1 : bits + 1);
}
constexpr float ToOdd(int64_t x) {
  const bool negative = x < 0;
  uint64_t magnitude = negative ? 0 - static_cast<uint64_t>(x) : static_cast<uint64_t>(x);
  // What a double cannot hold is put into the last bit that it can.
  if (magnitude >> 53 != 0) {
    magnitude = (magnitude & ~uint64_t{0x7ff}) | ((magnitude & 0x7ff) != 0 ? 0x800 : 0);
  }
  const double exact = static_cast<double>(magnitude);
  return ToOdd(negative ? -exact : exact);
}

// The nearest value of a floating dtype.
template <typename T>
constexpr T RoundTo(double x) {
  if constexpr (std::is_floating_point<T>::value) {
    return static_cast<T>(x);
  } else {
    return T(ToOdd(x));
  }
}

}  // namespace chorus

#endif  // CHORUS_CORE_TENSOR_ROUNDING_H_
