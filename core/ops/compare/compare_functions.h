// What comparisons, logic and cast make of an element, for kernels of the host and of GPUs.
//
// Threads: pure functions. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_OPS_COMPARE_COMPARE_FUNCTIONS_H_
#define CHORUS_CORE_OPS_COMPARE_COMPARE_FUNCTIONS_H_

#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/base/device.h"
#include "core/ops/arithmetic.h"
#include "core/tensor/half.h"

namespace chorus {
namespace compare {

struct Eq {
  template <typename T>
  CHORUS_DEVICE static bool Of(T a, T b) {
    return a == b;
  }
};
struct Ne {
  template <typename T>
  CHORUS_DEVICE static bool Of(T a, T b) {
    return a != b;
  }
};
struct Lt {
  template <typename T>
  CHORUS_DEVICE static bool Of(T a, T b) {
    return a < b;
  }
};
struct Le {
  template <typename T>
  CHORUS_DEVICE static bool Of(T a, T b) {
    return a <= b;
  }
};
struct And {
  CHORUS_DEVICE static bool Of(bool a, bool b) { return a && b; }
};
struct Or {
  CHORUS_DEVICE static bool Of(bool a, bool b) { return a || b; }
};
struct Not {
  CHORUS_DEVICE static bool Of(bool a, bool = false) { return !a; }
};

// F of elements as they lie in memory.
template <typename F>
struct OfElements {
  template <typename... T>
  CHORUS_DEVICE static Bool Of(T... elements) {
    return Bool(F::Of(static_cast<typename ComparedAs<T>::type>(elements)...));
  }
};

// To float such that rounding that once more, to a half type, gives what rounding the number itself
// gives: where it is not exact, to the neighbour whose last bit is 1.
CHORUS_DEVICE float ToOdd(double x) {
  const float nearest = static_cast<float>(x);
  const double back = static_cast<double>(nearest);
  if (back == x || x != x) return nearest;
  const uint32_t bits = FloatBits(nearest);
  if ((bits & 1) != 0) return nearest;
  const bool too_large = (back < 0 ? -back : back) > (x < 0 ? -x : x);
  return FloatOfBits(too_large ? bits - 1 : bits + 1);
}
CHORUS_DEVICE float ToOdd(int64_t x) {
  const bool negative = x < 0;
  uint64_t magnitude = negative ? 0 - static_cast<uint64_t>(x) : static_cast<uint64_t>(x);
  // What a double cannot hold is put into the last bit that it can.
  if (magnitude >> 53 != 0) {
    magnitude = (magnitude & ~uint64_t{0x7ff}) | ((magnitude & 0x7ff) != 0 ? 0x800 : 0);
  }
  const double exact = static_cast<double>(magnitude);
  return ToOdd(negative ? -exact : exact);
}

template <typename To, typename From>
CHORUS_DEVICE To ToInteger(From x) {
  using Limits = std::numeric_limits<To>;
  if (x != x) return 0;
  // One beyond the largest is a power of two, which every dtype that gets here holds.
  const From beyond = static_cast<From>(Limits::max() / 2 + 1) * 2;
  if (x >= beyond) return Limits::max();
  if (x <= static_cast<From>(Limits::min())) return Limits::min();
  return static_cast<To>(x);
}

template <typename To, typename From>
CHORUS_DEVICE To Convert(From element) {
  const auto x = static_cast<typename ComparedAs<From>::type>(element);
  using X = std::remove_const_t<decltype(x)>;
  if constexpr (std::is_same<To, Bool>::value) {
    return Bool(x != 0);
  } else if constexpr (std::is_integral<To>::value && std::is_floating_point<X>::value) {
    return ToInteger<To>(x);
  } else if constexpr (std::is_integral<X>::value && !std::is_arithmetic<To>::value) {
    return To(ToOdd(static_cast<int64_t>(x)));
  } else if constexpr (std::is_same<X, double>::value && !std::is_arithmetic<To>::value) {
    return To(ToOdd(x));
  } else if constexpr (std::is_arithmetic<To>::value) {
    return static_cast<To>(x);
  } else {
    return To(static_cast<float>(x));
  }
}

}  // namespace compare
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_COMPARE_COMPARE_FUNCTIONS_H_
