// The C++ types of dtypes, for kernels.
//
// Threads: pure functions. Ownership: none. Errors: none; other dtypes are for `otherwise`.
#ifndef CHORUS_CORE_OPS_HOST_ARITHMETIC_H_
#define CHORUS_CORE_OPS_HOST_ARITHMETIC_H_

#include <cstdint>

#include "core/ops/arithmetic.h"
#include "core/tensor/half.h"
#include "core/tensor/type.h"

namespace chorus {

// Calls `f` with a value of the C++ type of a floating-point dtype, for others `otherwise` with
// nothing. Both return the same.
template <typename F, typename Otherwise>
auto VisitFloating(DType dtype, const F& f, const Otherwise& otherwise) {
  switch (dtype) {
    case DType::kF16:
      return f(F16());
    case DType::kBF16:
      return f(BF16());
    case DType::kF32:
      return f(float());
    case DType::kF64:
      return f(double());
    default:
      return otherwise();
  }
}

// The same of floating-point and integer dtypes, which leaves bool.
template <typename F, typename Otherwise>
auto VisitNumbers(DType dtype, const F& f, const Otherwise& otherwise) {
  switch (dtype) {
    case DType::kI8:
      return f(int8_t());
    case DType::kU8:
      return f(uint8_t());
    case DType::kI16:
      return f(int16_t());
    case DType::kI32:
      return f(int32_t());
    case DType::kI64:
      return f(int64_t());
    default:
      return VisitFloating(dtype, f, otherwise);
  }
}

// The same with an unsigned type as wide as an element, for what only moves.
template <typename F, typename Otherwise>
auto VisitWidth(DType dtype, const F& f, const Otherwise& otherwise) {
  switch (DTypeBytes(dtype)) {
    case 1:
      return f(uint8_t());
    case 2:
      return f(uint16_t());
    case 4:
      return f(uint32_t());
    case 8:
      return f(uint64_t());
    default:
      return otherwise();
  }
}

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_HOST_ARITHMETIC_H_
