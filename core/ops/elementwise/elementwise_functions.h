// What elementwise ops make of an element, for kernels of the host and of GPUs.
//
// Threads: pure functions. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_OPS_ELEMENTWISE_ELEMENTWISE_FUNCTIONS_H_
#define CHORUS_CORE_OPS_ELEMENTWISE_ELEMENTWISE_FUNCTIONS_H_

#include <cmath>
#include <type_traits>

#include "core/base/device.h"
#include "core/ops/arithmetic.h"

namespace chorus {
namespace elementwise {

// What elements are compared in: half types in float, integers as they are.
template <typename T>
using Ordered = typename std::conditional<std::is_integral<T>::value, T, Arithmetic<T>>::type;

#define CHORUS_UNARY(Name, expression)     \
  struct Name {                            \
    template <typename T>                  \
    CHORUS_DEVICE static T Of(T element) { \
      using A = Arithmetic<T>;             \
      const A x = static_cast<A>(element); \
      return static_cast<T>(expression);   \
    }                                      \
  };
#define CHORUS_BINARY(Name, expression)            \
  struct Name {                                    \
    template <typename T>                          \
    CHORUS_DEVICE static T Of(T first, T second) { \
      using A = Arithmetic<T>;                     \
      const A a = static_cast<A>(first);           \
      const A b = static_cast<A>(second);          \
      return static_cast<T>(expression);           \
    }                                              \
  };

CHORUS_BINARY(Add, a + b)
CHORUS_BINARY(Sub, a - b)
CHORUS_BINARY(Mul, a* b)
CHORUS_BINARY(Div, a / b)
CHORUS_BINARY(Pow, std::pow(a, b))
CHORUS_UNARY(Neg, -x)
CHORUS_UNARY(Sin, std::sin(x))
CHORUS_UNARY(Cos, std::cos(x))
CHORUS_UNARY(Exp, std::exp(x))
CHORUS_UNARY(Expm1, std::expm1(x))
CHORUS_UNARY(Log, std::log(x))
CHORUS_UNARY(Log1p, std::log1p(x))
CHORUS_UNARY(Sqrt, std::sqrt(x))
CHORUS_UNARY(Rsqrt, 1 / std::sqrt(x))
CHORUS_UNARY(Tanh, std::tanh(x))
CHORUS_UNARY(Erf, std::erf(x))
CHORUS_UNARY(Floor, std::floor(x))
CHORUS_UNARY(Ceil, std::ceil(x))
#undef CHORUS_UNARY
#undef CHORUS_BINARY

struct Sigmoid {
  template <typename T>
  CHORUS_DEVICE static T Of(T element) {
    using A = Arithmetic<T>;
    const A x = static_cast<A>(element);
    const A small = std::exp(-std::abs(x));  // never overflows
    return static_cast<T>((x < 0 ? small : 1) / (1 + small));
  }
};

// The derivative of sigmoid is even, and has its digits where sigmoid is nearly 1.
template <typename A>
CHORUS_DEVICE A SigmoidSlope(A x) {
  const A small = std::exp(-std::abs(x));
  return small / ((1 + small) * (1 + small));
}
struct SigmoidGrad {
  template <typename T>
  CHORUS_DEVICE static T Of(T x, T g) {
    using A = Arithmetic<T>;
    return static_cast<T>(static_cast<A>(g) * SigmoidSlope(static_cast<A>(x)));
  }
};
// tanh(x) is 2 sigmoid(2 x) - 1.
struct TanhGrad {
  template <typename T>
  CHORUS_DEVICE static T Of(T x, T g) {
    using A = Arithmetic<T>;
    return static_cast<T>(static_cast<A>(g) * (4 * SigmoidSlope(2 * static_cast<A>(x))));
  }
};

// Selections: what comes out is an operand, bit by bit. NaN is larger than nothing and not itself.
struct Maximum {
  template <typename T>
  CHORUS_DEVICE static T Of(T first, T second) {
    const auto a = static_cast<Ordered<T>>(first);
    const auto b = static_cast<Ordered<T>>(second);
    return a >= b || a != a ? first : second;
  }
};
struct Minimum {
  template <typename T>
  CHORUS_DEVICE static T Of(T first, T second) {
    const auto a = static_cast<Ordered<T>>(first);
    const auto b = static_cast<Ordered<T>>(second);
    return a <= b || a != a ? first : second;
  }
};
struct ReluGrad {
  template <typename T>
  CHORUS_DEVICE static T Of(T x, T g) {
    return x > 0 ? g : T{};
  }
};
struct Relu {
  template <typename T>
  CHORUS_DEVICE static T Of(T x) {
    return x > 0 ? x : T{};
  }
};
struct Abs {
  template <typename T>
  CHORUS_DEVICE static T Of(T x) {
    if constexpr (std::is_unsigned<T>::value) {
      return x;
    } else if constexpr (std::is_integral<T>::value) {
      return x < 0 ? Neg::Of(x) : x;
    } else {
      return static_cast<T>(std::abs(static_cast<Arithmetic<T>>(x)));
    }
  }
};
struct Sign {
  template <typename T>
  CHORUS_DEVICE static T Of(T x) {
    using O = Ordered<T>;
    if (x > 0) return static_cast<T>(O{1});
    if constexpr (!std::is_unsigned<T>::value) {
      if (x < 0) return static_cast<T>(static_cast<O>(-1));
    }
    return x;
  }
};

// Of integers, truncated; the divisor is not 0. The least one by -1, which is no value of its type,
// wraps.
struct Quotient {
  template <typename T>
  CHORUS_DEVICE static T Of(T dividend, T divisor) {
    if constexpr (std::is_signed<T>::value) {
      if (divisor == -1) return Neg::Of(dividend);
    }
    return static_cast<T>(dividend / divisor);
  }
};

}  // namespace elementwise
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_ELEMENTWISE_ELEMENTWISE_FUNCTIONS_H_
