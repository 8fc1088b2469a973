// What elements of each dtype are computed in, for kernels of the host and of GPUs.
//
// Threads: types. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_OPS_ARITHMETIC_H_
#define CHORUS_CORE_OPS_ARITHMETIC_H_

#include <cstdint>
#include <type_traits>

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

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_ARITHMETIC_H_
