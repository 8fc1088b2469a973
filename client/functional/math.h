// Arithmetic and functions of tensors, comparisons, selection, conversion, reductions and random
// numbers: more local ops (see chorus/math.h, which has the first ones and all operators).
// docs/ops.md has them all.
//
// Shapes of operands broadcast as usual; dtypes and devices must be equal. An Operand is a tensor,
// or a number, which takes the dtype of the tensor beside it and is no part of the graph: another
// one is no other graph. At least one operand is a tensor.
//
// Threads: any, as chorus/chorus.h says.
// Ownership: results are handles. An operand's handle may go as soon as the call has returned.
// Errors: in the results, with the line of the call: INVALID_ARGUMENT kBadType where shapes, dtypes
//   or devices do not fit, or a number is none of the dtype's; UNIMPLEMENTED kUnsupported for a
//   dtype that the op has no kernels for.
#ifndef CHORUS_CLIENT_FUNCTIONAL_MATH_H_
#define CHORUS_CLIENT_FUNCTIONAL_MATH_H_

#include <cstdint>

#include "chorus/call_site.h"
#include "chorus/math.h"
#include "chorus/session.h"
#include "chorus/tensor.h"

namespace chorus {

// --- Arithmetic ---------------------------------------------------------------------------------

// a / b.
Tensor Div(const Operand& a, const Operand& b, CallSite site = CallSite::Here());
Tensor Pow(const Operand& a, const Operand& b, CallSite site = CallSite::Here());
// NaN wins; where both are equal, each gets half of the gradient.
Tensor Maximum(const Operand& a, const Operand& b, CallSite site = CallSite::Here());
Tensor Minimum(const Operand& a, const Operand& b, CallSite site = CallSite::Here());
// x, or the bound that it is beyond; `high` where low > high. The gradient is that of what is
// taken, at a bound x's. NaN of x stays, and a bound that is NaN is taken.
Tensor Clamp(const Tensor& x, const Operand& low, const Operand& high,
             CallSite site = CallSite::Here());
Tensor ClampMin(const Tensor& x, const Operand& low, CallSite site = CallSite::Here());
Tensor ClampMax(const Tensor& x, const Operand& high, CallSite site = CallSite::Here());

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
Tensor Equal(const Operand& a, const Operand& b, CallSite site = CallSite::Here());
Tensor NotEqual(const Operand& a, const Operand& b, CallSite site = CallSite::Here());
Tensor Less(const Operand& a, const Operand& b, CallSite site = CallSite::Here());
Tensor LessEqual(const Operand& a, const Operand& b, CallSite site = CallSite::Here());
Tensor Greater(const Operand& a, const Operand& b, CallSite site = CallSite::Here());
Tensor GreaterEqual(const Operand& a, const Operand& b, CallSite site = CallSite::Here());

// Of bool.
Tensor LogicalAnd(const Tensor& a, const Tensor& b, CallSite site = CallSite::Here());
Tensor LogicalOr(const Tensor& a, const Tensor& b, CallSite site = CallSite::Here());
Tensor LogicalXor(const Tensor& a, const Tensor& b, CallSite site = CallSite::Here());
Tensor LogicalNot(const Tensor& x, CallSite site = CallSite::Here());

// --- Selection and conversion -------------------------------------------------------------------

// condition ? a : b, element by element. What is not taken stays out of the gradient, whatever it
// is: only the operands themselves can bring a NaN into it.
Tensor Where(const Tensor& condition, const Operand& a, const Operand& b,
             CallSite site = CallSite::Here());
// Rounds once; to integers it truncates and gives the nearest in range, 0 for NaN; to bool x != 0.
Tensor Cast(const Tensor& x, DType dtype, CallSite site = CallSite::Here());

// --- Reductions ---------------------------------------------------------------------------------
// Over all axes, one or a list of them, like Sum. The last four are of floating dtypes and compute
// half types in f32.

// Divides by the number of elements when it runs. Of nothing NaN.
Tensor Mean(const Tensor& x, const Axes& axes = Axes(), bool keep_dims = false,
            CallSite site = CallSite::Here());
// NaN wins; the gradient is split evenly over the elements that hold the result.
Tensor Max(const Tensor& x, const Axes& axes = Axes(), bool keep_dims = false,
           CallSite site = CallSite::Here());
Tensor Min(const Tensor& x, const Axes& axes = Axes(), bool keep_dims = false,
           CallSite site = CallSite::Here());
Tensor Product(const Tensor& x, const Axes& axes = Axes(), bool keep_dims = false,
               CallSite site = CallSite::Here());
// Of |x|: the sum (p = 1), the largest (infinity), or the root of the sum of squares (2), whose
// gradient at 0 is 0. Of nothing 0. INVALID_ARGUMENT: another p.
Tensor Norm(const Tensor& x, double p = 2, const Axes& axes = Axes(), bool keep_dims = false,
            CallSite site = CallSite::Here());
// log(sum(exp(x))), which does not overflow. Of nothing, and of what is all -inf, -inf; the
// gradient of the latter is NaN, and so may be that of all that stands beside +inf.
Tensor LogSumExp(const Tensor& x, const Axes& axes = Axes(), bool keep_dims = false,
                 CallSite site = CallSite::Here());
// The mean of the squared distances from the mean; or `unbiased`, their sum by one less than their
// number, which is no function of a batch that varies (CompileOptions). Of nothing NaN, unbiased of
// one element too. Std is its root, whose gradient at 0 is 0. Squares are of x's dtype, f32 for
// half types: of distances beyond 1e19 or below 1e-22 they are no f32.
Tensor Var(const Tensor& x, const Axes& axes = Axes(), bool keep_dims = false, bool unbiased = true,
           CallSite site = CallSite::Here());
Tensor Std(const Tensor& x, const Axes& axes = Axes(), bool keep_dims = false, bool unbiased = true,
           CallSite site = CallSite::Here());

// The sum of the elements up to each one along an axis, itself included, in their order; with
// `reverse` from the last one on. Negative axes count from the end.
Tensor CumSum(const Tensor& x, int64_t axis = -1, bool reverse = false,
              CallSite site = CallSite::Here());

// --- Random numbers -----------------------------------------------------------------------------
// Functions of the seed, the offset and an element's index alone: the same on every rank and
// device. `seed` and `offset` are 0-dim i64 tensors, of any device of the session, or numbers:
// other ones are no other graph. Take the step as the offset, and another seed for each line that
// wants numbers of its own; a rank that wants its own adds its rank to the seed.

class RandomNumber {
 public:
  RandomNumber(const Tensor& tensor) : tensor_(tensor) {}          // implicit
  RandomNumber(int64_t value) : value_(value), is_value_(true) {}  // implicit
  // Beside tensors of a device: a copy, if it is on another.
  Tensor On(const DeviceRef& device, CallSite site = CallSite::Here()) const;

 private:
  Tensor tensor_;
  int64_t value_ = 0;
  bool is_value_ = false;
};

// Evenly in [0, 1).
Tensor RandomUniform(const DeviceRef& device, DType dtype, const Shape& shape,
                     const RandomNumber& seed, const RandomNumber& offset = 0,
                     CallSite site = CallSite::Here());
// Mean 0, variance 1.
Tensor RandomNormal(const DeviceRef& device, DType dtype, const Shape& shape,
                    const RandomNumber& seed, const RandomNumber& offset = 0,
                    CallSite site = CallSite::Here());
// Integers of which every bit is random.
Tensor RandomBits(const DeviceRef& device, DType dtype, const Shape& shape,
                  const RandomNumber& seed, const RandomNumber& offset = 0,
                  CallSite site = CallSite::Here());

}  // namespace chorus

#endif  // CHORUS_CLIENT_FUNCTIONAL_MATH_H_
