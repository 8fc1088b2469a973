// Elementwise ops: add, sub, mul, neg, relu, relu_grad, sin, cos.
//
// Shapes: all inputs and the output have one type, but any input may be 0-dim instead and then
// stands for all elements; its gradient is the sum over them. Nothing else is broadcast (`expand`
// does that). All dtypes but bool; sin, cos and relu_grad take floating point only. Integers wrap; half
// types are computed in f32 and rounded once.
//
//   op               forward          VJP for output gradient g         second order
//   add(a, b)        a + b            g; g                              none of its own
//   sub(a, b)        a - b            g; -g                             none of its own
//   mul(a, b)        a * b            g b; g a                          through mul
//   neg(a)           -a               -g                                through neg
//   relu(x)          x > 0 ? x : 0    relu_grad(x, g)                   through relu_grad
//   relu_grad(x, g)  x > 0 ? g : 0    for g: relu_grad(x, gg); for x: zero almost everywhere, so
//                                     absent. It selects and does not multiply: an infinite or NaN
//                                     g stays out where x <= 0.
//   sin(x)           sin x            g cos x                           through cos and mul
//   cos(x)           cos x            -(g sin x)                        through sin, mul and neg
//
// relu: the derivative at 0 is taken as 0; a NaN input gives 0 (NaN > 0 is false).
#ifndef CHORUS_CORE_OPS_ELEMENTWISE_ELEMENTWISE_H_
#define CHORUS_CORE_OPS_ELEMENTWISE_ELEMENTWISE_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> ElementwiseOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_ELEMENTWISE_ELEMENTWISE_H_
