// What each thread of the elementwise ops' kernels does.
//
// Threads: each call is one thread of a launch. Ownership: all memory is the caller's. Errors: none
// but that div tells of an integer divisor of 0 by a word.
#ifndef CHORUS_CORE_OPS_ELEMENTWISE_ELEMENTWISE_KERNELS_H_
#define CHORUS_CORE_OPS_ELEMENTWISE_ELEMENTWISE_KERNELS_H_

#include <cstdint>

#include "core/base/device.h"
#include "core/ops/device_elements.h"
#include "core/ops/elementwise/elementwise_functions.h"
#include "core/tensor/half.h"

namespace chorus {
namespace cuda {

// Division of integers. Elements with a divisor of 0 become 0, and the first of them is told.
struct IntegerDivArgs {
  static constexpr int kScratchPacks = 0;
  ElementsArgs elements;
  uint64_t* fault_word = nullptr;
  uint64_t fault_first = 0;
};
template <typename T>
CHORUS_DEVICE void IntegerDiv(const IntegerDivArgs& args, const Lane& lane) {
  const Operand<T> dividends(args.elements, 0);
  const Operand<T> divisors(args.elements, 1);
  T* const out = static_cast<T*>(args.elements.out);
  int64_t first_fault = -1;  // of this thread, which has its elements in order
  CHORUS_KEEP_LOOP
  for (int64_t i = lane.index; i < args.elements.count; i += lane.count) {
    const T divisor = divisors.At(i);
    if (divisor == 0 && first_fault < 0) first_fault = i;
    out[i] = divisor == 0 ? T{0} : elementwise::Quotient::Of(dividends.At(i), divisor);
  }
  if (first_fault >= 0) {
    StoreLeast(args.fault_word, args.fault_first + static_cast<uint64_t>(first_fault));
  }
}

#define CHORUS_ELEMENTWISE_UNARY(X, kernel, F, T) \
  X(kernel, ElementsArgs, (EachElement<elementwise::F, T, T>))
#define CHORUS_ELEMENTWISE_BINARY(X, kernel, F, T) \
  X(kernel, ElementsArgs, (EachElement<elementwise::F, T, T, T>))
#define CHORUS_ELEMENTWISE_OF_FLOATING(X, Kernel, op, F)                                  \
  Kernel(X, op##_f16, F, F16) Kernel(X, op##_bf16, F, BF16) Kernel(X, op##_f32, F, float) \
      Kernel(X, op##_f64, F, double)
#define CHORUS_ELEMENTWISE_OF_NUMBERS(X, Kernel, op, F)                                        \
  CHORUS_ELEMENTWISE_OF_FLOATING(X, Kernel, op, F)                                             \
  Kernel(X, op##_i8, F, int8_t) Kernel(X, op##_u8, F, uint8_t) Kernel(X, op##_i16, F, int16_t) \
      Kernel(X, op##_i32, F, int32_t) Kernel(X, op##_i64, F, int64_t)

#define CHORUS_KERNELS_OF_Elementwise(X)                                                  \
  CHORUS_ELEMENTWISE_OF_NUMBERS(X, CHORUS_ELEMENTWISE_UNARY, abs, Abs)                    \
  CHORUS_ELEMENTWISE_OF_NUMBERS(X, CHORUS_ELEMENTWISE_BINARY, add, Add)                   \
  CHORUS_ELEMENTWISE_OF_FLOATING(X, CHORUS_ELEMENTWISE_UNARY, ceil, Ceil)                 \
  CHORUS_ELEMENTWISE_OF_FLOATING(X, CHORUS_ELEMENTWISE_UNARY, cos, Cos)                   \
  CHORUS_ELEMENTWISE_OF_FLOATING(X, CHORUS_ELEMENTWISE_BINARY, div, Div)                  \
  X(div_i8, IntegerDivArgs, IntegerDiv<int8_t>)                                           \
  X(div_u8, IntegerDivArgs, IntegerDiv<uint8_t>)                                          \
  X(div_i16, IntegerDivArgs, IntegerDiv<int16_t>)                                         \
  X(div_i32, IntegerDivArgs, IntegerDiv<int32_t>)                                         \
  X(div_i64, IntegerDivArgs, IntegerDiv<int64_t>)                                         \
  CHORUS_ELEMENTWISE_OF_FLOATING(X, CHORUS_ELEMENTWISE_UNARY, erf, Erf)                   \
  CHORUS_ELEMENTWISE_OF_FLOATING(X, CHORUS_ELEMENTWISE_UNARY, exp, Exp)                   \
  CHORUS_ELEMENTWISE_OF_FLOATING(X, CHORUS_ELEMENTWISE_UNARY, expm1, Expm1)               \
  CHORUS_ELEMENTWISE_OF_FLOATING(X, CHORUS_ELEMENTWISE_UNARY, floor, Floor)               \
  CHORUS_ELEMENTWISE_OF_FLOATING(X, CHORUS_ELEMENTWISE_UNARY, log, Log)                   \
  CHORUS_ELEMENTWISE_OF_FLOATING(X, CHORUS_ELEMENTWISE_UNARY, log1p, Log1p)               \
  CHORUS_ELEMENTWISE_OF_NUMBERS(X, CHORUS_ELEMENTWISE_BINARY, maximum, Maximum)           \
  CHORUS_ELEMENTWISE_OF_NUMBERS(X, CHORUS_ELEMENTWISE_BINARY, minimum, Minimum)           \
  CHORUS_ELEMENTWISE_OF_NUMBERS(X, CHORUS_ELEMENTWISE_BINARY, mul, Mul)                   \
  CHORUS_ELEMENTWISE_OF_NUMBERS(X, CHORUS_ELEMENTWISE_UNARY, neg, Neg)                    \
  CHORUS_ELEMENTWISE_OF_FLOATING(X, CHORUS_ELEMENTWISE_BINARY, pow, Pow)                  \
  CHORUS_ELEMENTWISE_OF_NUMBERS(X, CHORUS_ELEMENTWISE_UNARY, relu, Relu)                  \
  CHORUS_ELEMENTWISE_OF_FLOATING(X, CHORUS_ELEMENTWISE_BINARY, relu_grad, ReluGrad)       \
  CHORUS_ELEMENTWISE_OF_FLOATING(X, CHORUS_ELEMENTWISE_UNARY, rsqrt, Rsqrt)               \
  CHORUS_ELEMENTWISE_OF_FLOATING(X, CHORUS_ELEMENTWISE_UNARY, sigmoid, Sigmoid)           \
  CHORUS_ELEMENTWISE_OF_FLOATING(X, CHORUS_ELEMENTWISE_BINARY, sigmoid_grad, SigmoidGrad) \
  CHORUS_ELEMENTWISE_OF_NUMBERS(X, CHORUS_ELEMENTWISE_UNARY, sign, Sign)                  \
  CHORUS_ELEMENTWISE_OF_FLOATING(X, CHORUS_ELEMENTWISE_UNARY, sin, Sin)                   \
  CHORUS_ELEMENTWISE_OF_FLOATING(X, CHORUS_ELEMENTWISE_UNARY, sqrt, Sqrt)                 \
  CHORUS_ELEMENTWISE_OF_NUMBERS(X, CHORUS_ELEMENTWISE_BINARY, sub, Sub)                   \
  CHORUS_ELEMENTWISE_OF_FLOATING(X, CHORUS_ELEMENTWISE_UNARY, tanh, Tanh)                 \
  CHORUS_ELEMENTWISE_OF_FLOATING(X, CHORUS_ELEMENTWISE_BINARY, tanh_grad, TanhGrad)

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_ELEMENTWISE_ELEMENTWISE_KERNELS_H_
