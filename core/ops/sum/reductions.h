// What reductions do with elements, on the host and on GPUs. `A`: what it is computed in; elements
// of T in any order that a shape decides; `Finish` sees how many there were.
//
// Threads: pure functions. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_OPS_SUM_REDUCTIONS_H_
#define CHORUS_CORE_OPS_SUM_REDUCTIONS_H_

#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/base/device.h"
#include "core/ops/arithmetic.h"

namespace chorus {

// Integers wrap: T is unsigned.
template <typename T>
struct SumReduction {
  using A = Arithmetic<T>;
  CHORUS_DEVICE static A Nothing() { return A{}; }
  CHORUS_DEVICE static A Of(A a, A b) { return a + b; }
  CHORUS_DEVICE static A Finish(A a, int64_t) { return a; }
  static constexpr bool finishes = false;
  static constexpr bool adds = true;
};
template <typename T>
struct MeanReduction : SumReduction<T> {
  using A = Arithmetic<T>;
  CHORUS_DEVICE static A Finish(A a, int64_t size) { return a / static_cast<A>(size); }
  static constexpr bool finishes = true;
};
template <typename T>
struct ProdReduction {
  using A = Arithmetic<T>;
  CHORUS_DEVICE static A Nothing() { return A{1}; }
  CHORUS_DEVICE static A Of(A a, A b) { return a * b; }
  CHORUS_DEVICE static A Finish(A a, int64_t) { return a; }
  static constexpr bool finishes = false;
  static constexpr bool adds = false;
};
// Whether it is -0, of numbers that are 0.
template <typename A>
CHORUS_DEVICE bool IsNegativeZero(A a) {
  if constexpr (std::is_integral<A>::value) {
    return false;
  } else {
    return cuda::BitsOf(a) >> (8 * sizeof(a) - 1) != 0;
  }
}
// NaN wins, and of both zeros 0, in whatever order they come.
template <typename T>
struct MaxReduction {
  using A = typename std::conditional<std::is_integral<T>::value, T, Arithmetic<T>>::type;
  using Limits = std::numeric_limits<A>;
  CHORUS_DEVICE static A Nothing() {
    return Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
  }
  CHORUS_DEVICE static A Of(A a, A b) {
    return a > b || a != a || (a == b && !IsNegativeZero(a)) ? a : b;
  }
  CHORUS_DEVICE static A Finish(A a, int64_t) { return a; }
  static constexpr bool finishes = false;
  static constexpr bool adds = false;
};
// NaN wins, and of both zeros -0.
template <typename T>
struct MinReduction {
  using A = typename MaxReduction<T>::A;
  using Limits = std::numeric_limits<A>;
  CHORUS_DEVICE static A Nothing() {
    return Limits::has_infinity ? Limits::infinity() : Limits::max();
  }
  CHORUS_DEVICE static A Of(A a, A b) {
    return a < b || a != a || (a == b && IsNegativeZero(a)) ? a : b;
  }
  CHORUS_DEVICE static A Finish(A a, int64_t) { return a; }
  static constexpr bool finishes = false;
  static constexpr bool adds = false;
};

// An element's part where it is repeated so many times.
template <typename T>
struct Divided {
  CHORUS_DEVICE static T Of(T x, int64_t times) {
    using A = Arithmetic<T>;
    return static_cast<T>(static_cast<A>(x) / static_cast<A>(times));
  }
};

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SUM_REDUCTIONS_H_
