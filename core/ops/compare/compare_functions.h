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
#include "core/tensor/rounding.h"

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
