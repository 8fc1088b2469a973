// Elementwise ops: arithmetic and functions of one or two tensors.
//
// Shapes: all inputs and the output have one type, but any input may be 0-dim instead and then
// stands for all elements; its gradient is the sum over them. Nothing else is broadcast (`expand`
// does that). Integers wrap; half types are computed in f32 and rounded once.
//
//   op               forward            dtypes    VJP for output gradient g, with output y
//   add(a, b)        a + b              numbers   g; g
//   sub(a, b)        a - b              numbers   g; -g
//   mul(a, b)        a b                numbers   g b; g a
//   div(a, b)        a / b              numbers   g / b; -(g / b) y
//   pow(a, b)        a^b                floating  g b a^(b - 1); g y log a
//   maximum(a, b)    the larger one     numbers   share(g, holders) each, see below
//   minimum(a, b)    the smaller one    numbers   the same
//   neg(x)           -x                 numbers   -g
//   abs(x)           |x|                numbers   g sign x
//   sign(x)          -1, 0 or 1         numbers   none: zero almost everywhere
//   relu(x)          x > 0 ? x : 0      numbers   relu_grad(x, g)
//   relu_grad(x, g)  x > 0 ? g : 0      floating  for g: relu_grad(x, gg); for x: none
//   floor(x), ceil(x)                   floating  none
//   exp(x)                              floating  g y
//   expm1(x)         exp(x) - 1         floating  g exp x
//   log(x)                              floating  g / x
//   log1p(x)         log(1 + x)         floating  g / (1 + x)
//   sqrt(x)                             floating  g / (y + y)
//   rsqrt(x)         1 / sqrt x         floating  g (-1/2 y^3)
//   sin(x), cos(x)   of radians         floating  g cos x; -(g sin x)
//   tanh(x)                             floating  tanh_grad(x, g)
//   tanh_grad(x, g)  g / cosh(x)^2      floating  -2 gg tanh_grad(x, g) tanh x; tanh_grad(x, gg)
//   sigmoid(x)       1 / (1 + exp(-x))  floating  sigmoid_grad(x, g)
//   sigmoid_grad(x, g)                  floating  -gg sigmoid_grad(x, g) tanh(x / 2);
//                    g y (1 - y)                  sigmoid_grad(x, gg)
//   erf(x)                              floating  g 2 / sqrt(pi) exp(-x^2)
//
// The second order comes through the ops that the first is made of. Sources: any calculus; where
// there is a choice, it is the following.
//
// relu: the derivative at 0 is taken as 0; a NaN input gives 0 (NaN > 0 is false). relu_grad
//   selects and does not multiply: an infinite or NaN g stays out where x <= 0.
// tanh_grad, sigmoid_grad: of x, for where y is nearly 1 the digits of 1 - y are lost.
// div of integers truncates towards zero and wraps (the least one by -1 is itself). By zero it is
//   INVALID_ARGUMENT when it runs, naming the element.
// pow is std::pow: of a negative base NaN unless b is whole; x^0 is 1. At a = 0 the gradient by b
//   is 0 where b >= 0 (the limit for b > 0); that by a is 0 where b = 0, for a NaN and for an a
//   whose 1 / a overflows too. Both are 0 there whatever g is, infinite or NaN.
// maximum, minimum: NaN wins; of +0 and -0 they give the first operand. The gradient goes to the
//   operand that holds the result (equals it, or is NaN where it is) and is split evenly where both
//   do, like that of an all_reduce MAX; it selects (see share and holds in core/ops/reduction).
// abs, sign: of NaN NaN; the derivative of abs at 0 is 0.
// sqrt of a negative number and log of one are NaN; log(0) is -infinity.
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError), and from the run where an integer is divided
// by zero.
#ifndef CHORUS_CORE_OPS_ELEMENTWISE_ELEMENTWISE_H_
#define CHORUS_CORE_OPS_ELEMENTWISE_ELEMENTWISE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> ElementwiseOps();

// INVALID_ARGUMENT kBadType: what kernels of div answer where that element of the output, of that
// type, has an integer divisor of 0.
absl::Status DividedByZero(const TensorType& output, int64_t element);

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_ELEMENTWISE_ELEMENTWISE_H_
