// What elements of each dtype are computed and compared in, for kernels of the host and of GPUs.
//
// Threads: types. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_OPS_ARITHMETIC_H_
#define CHORUS_CORE_OPS_ARITHMETIC_H_

#include <cstdint>
#include <type_traits>

#include "core/base/device.h"
#include "core/tensor/half.h"

namespace chorus {

// Half types are computed in float and rounded once; integers wrap, so they are computed as
// unsigned, and in 32 bits at least, since smaller ones would be promoted to int.
template <typename T, bool = std::is_integral<T>::value>
struct ArithmeticOf {
  using type = typename std::conditional<sizeof(T) == 8, uint64_t, uint32_t>::type;
};
template <typename T>
struct ArithmeticOf<T, false> {
  using type = T;
};
template <>
struct ArithmeticOf<F16, false> {
  using type = float;
};
template <>
struct ArithmeticOf<BF16, false> {
  using type = float;
};
template <typename T>
using Arithmetic = typename ArithmeticOf<T>::type;

// An element of bool, which may hold any byte: all but 0 are true.
struct Bool {
  uint8_t byte = 0;
  Bool() = default;
  CHORUS_DEVICE explicit Bool(bool value) : byte(value ? 1 : 0) {}
  CHORUS_DEVICE operator bool() const { return byte != 0; }
};

template <typename T>
struct ComparedAs {
  using type = typename std::conditional<std::is_integral<T>::value, T, Arithmetic<T>>::type;
};
template <>
struct ComparedAs<Bool> {
  using type = bool;
};

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_ARITHMETIC_H_
