// Arithmetic and functions of tensors, comparisons, selection, conversion, reductions and random
// numbers: more local ops (see client/chorus.h, which has the first ones). docs/ops.md has them
// all.
//
// Shapes of operands broadcast as usual; dtypes and devices must be equal. An Operand is a tensor,
// or a number, which takes the dtype of the tensor beside it and is no part of the graph: another
// one is no other graph. At least one operand is a tensor.
#ifndef CHORUS_CLIENT_FUNCTIONAL_MATH_H_
#define CHORUS_CLIENT_FUNCTIONAL_MATH_H_

#include <cstdint>
#include <vector>

#include "client/chorus.h"

namespace chorus {
inline namespace sdk {

// --- Arithmetic ---------------------------------------------------------------------------------

// Of integers truncated; by zero it is INVALID_ARGUMENT when it runs.
Tensor Div(const Operand& a, const Operand& b);
Tensor operator/(const Operand& a, const Operand& b);
Tensor Pow(const Operand& a, const Operand& b);
// NaN wins; where both are equal, each gets half of the gradient.
Tensor Maximum(const Operand& a, const Operand& b);
Tensor Minimum(const Operand& a, const Operand& b);

// --- Functions, element by element --------------------------------------------------------------
Tensor Abs(const Tensor& x, CallSite site = CallSite::Here());
Tensor Ceil(const Tensor& x, CallSite site = CallSite::Here());
Tensor Erf(const Tensor& x, CallSite site = CallSite::Here());
Tensor Exp(const Tensor& x, CallSite site = CallSite::Here());
Tensor Expm1(const Tensor& x, CallSite site = CallSite::Here());
Tensor Floor(const Tensor& x, CallSite site = CallSite::Here());
Tensor Log(const Tensor& x, CallSite site = CallSite::Here());
Tensor Log1p(const Tensor& x, CallSite site = CallSite::Here());
Tensor Rsqrt(const Tensor& x, CallSite site = CallSite::Here());
Tensor Sigmoid(const Tensor& x, CallSite site = CallSite::Here());
Tensor Sign(const Tensor& x, CallSite site = CallSite::Here());
Tensor Sqrt(const Tensor& x, CallSite site = CallSite::Here());
Tensor Tanh(const Tensor& x, CallSite site = CallSite::Here());

// --- Comparisons and logic ----------------------------------------------------------------------
// To bool. With NaN all but NotEqual are false.
Tensor Equal(const Operand& a, const Operand& b);
Tensor NotEqual(const Operand& a, const Operand& b);
Tensor Less(const Operand& a, const Operand& b);
Tensor LessEqual(const Operand& a, const Operand& b);
Tensor Greater(const Operand& a, const Operand& b);
Tensor GreaterEqual(const Operand& a, const Operand& b);
Tensor operator<(const Operand& a, const Operand& b);
Tensor operator<=(const Operand& a, const Operand& b);
Tensor operator>(const Operand& a, const Operand& b);
Tensor operator>=(const Operand& a, const Operand& b);

// Of bool.
Tensor LogicalAnd(const Tensor& a, const Tensor& b, CallSite site = CallSite::Here());
Tensor LogicalOr(const Tensor& a, const Tensor& b, CallSite site = CallSite::Here());
Tensor LogicalXor(const Tensor& a, const Tensor& b, CallSite site = CallSite::Here());
Tensor LogicalNot(const Tensor& x, CallSite site = CallSite::Here());

// --- Selection and conversion -------------------------------------------------------------------

// condition ? a : b, element by element. What is not taken stays out of the gradient, whatever it
// is: only the operands themselves can bring a NaN into it.
Tensor Where(const Tensor& condition, const Operand& a, const Operand& b);
// Rounds once; to integers it truncates and gives the nearest in range, 0 for NaN; to bool x != 0.
Tensor Cast(const Tensor& x, DType dtype, CallSite site = CallSite::Here());

}  // namespace sdk
}  // namespace chorus

#endif  // CHORUS_CLIENT_FUNCTIONAL_MATH_H_
