#include "chorus/functional/math.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/internal/access.h"
#include "client/internal/errors.h"
#include "client/internal/local.h"
#include "client/internal/record.h"
#include "core/base/error.h"

namespace chorus {
namespace {

using internal::Along;
using internal::ApplyLocal;
using internal::Axis;
using internal::Elementwise;
using internal::Fail;
using internal::InFunction;
using internal::IntegerOf;
using internal::IsUsable;
using internal::NumberLike;
using internal::Operate;
using internal::ReduceAxes;
using internal::SessionOf;
using internal::Spec;
using internal::TypeText;

Tensor Unary(const char* op, const Tensor& x, CallSite site) {
  return ApplyLocal(Spec(op, site), {x});
}

Tensor Binary(const char* op, const Operand& a, const Operand& b, CallSite site) {
  return Operate(a, b, site, [&](const Tensor& x, const Tensor& y) {
    return Elementwise(op, {x, y}, site);
  });
}

}  // namespace

// --- Arithmetic ---------------------------------------------------------------------------------

Tensor Div(const Operand& a, const Operand& b, CallSite site) { return Binary("div", a, b, site); }
Tensor Pow(const Operand& a, const Operand& b, CallSite site) { return Binary("pow", a, b, site); }
Tensor Maximum(const Operand& a, const Operand& b, CallSite site) {
  return Binary("maximum", a, b, site);
}
Tensor Minimum(const Operand& a, const Operand& b, CallSite site) {
  return Binary("minimum", a, b, site);
}

namespace {

// x, or the bound where `compare` says so or it is NaN: selected, so that at a bound the gradient
// is not shared.
Tensor Bounded(const char* name, const char* compare, const Tensor& x, const Operand& bound,
               CallSite site) {
  Tensor is_bound = Binary(compare, x, bound, site);
  // Of a number it is known here.
  if (!bound.is_number() || std::isnan(bound.number().value())) {
    const Tensor limit = bound.is_number() ? NumberLike(bound.number(), x, site) : bound.tensor();
    is_bound = LogicalOr(is_bound, NotEqual(limit, limit, site), site);
  }
  const Tensor y = Where(is_bound, bound, x, site);
  const bool usable = IsUsable(x) && (bound.is_number() || IsUsable(bound.tensor()));
  return y.status().ok() || !usable ? y : Fail(x, InFunction(name, y.status()), site);
}

}  // namespace

Tensor Clamp(const Tensor& x, const Operand& low, const Operand& high, CallSite site) {
  return ClampMax(ClampMin(x, low, site), high, site);
}
Tensor ClampMin(const Tensor& x, const Operand& low, CallSite site) {
  return Bounded("ClampMin", "lt", x, low, site);
}
Tensor ClampMax(const Tensor& x, const Operand& high, CallSite site) {
  return Bounded("ClampMax", "gt", x, high, site);
}

// --- Functions, element by element --------------------------------------------------------------

Tensor Abs(const Tensor& x, CallSite site) { return Unary("abs", x, site); }
Tensor Ceil(const Tensor& x, CallSite site) { return Unary("ceil", x, site); }
Tensor Erf(const Tensor& x, CallSite site) { return Unary("erf", x, site); }
Tensor Exp(const Tensor& x, CallSite site) { return Unary("exp", x, site); }
Tensor Expm1(const Tensor& x, CallSite site) { return Unary("expm1", x, site); }
Tensor Floor(const Tensor& x, CallSite site) { return Unary("floor", x, site); }
Tensor Log(const Tensor& x, CallSite site) { return Unary("log", x, site); }
Tensor Log1p(const Tensor& x, CallSite site) { return Unary("log1p", x, site); }
Tensor Rsqrt(const Tensor& x, CallSite site) { return Unary("rsqrt", x, site); }
Tensor Sigmoid(const Tensor& x, CallSite site) { return Unary("sigmoid", x, site); }
Tensor Sign(const Tensor& x, CallSite site) { return Unary("sign", x, site); }
Tensor Sqrt(const Tensor& x, CallSite site) { return Unary("sqrt", x, site); }
Tensor Tanh(const Tensor& x, CallSite site) { return Unary("tanh", x, site); }

// --- Comparisons and logic ----------------------------------------------------------------------

Tensor Equal(const Operand& a, const Operand& b, CallSite site) { return Binary("eq", a, b, site); }
Tensor NotEqual(const Operand& a, const Operand& b, CallSite site) {
  return Binary("ne", a, b, site);
}
Tensor Less(const Operand& a, const Operand& b, CallSite site) { return Binary("lt", a, b, site); }
Tensor LessEqual(const Operand& a, const Operand& b, CallSite site) {
  return Binary("le", a, b, site);
}
Tensor Greater(const Operand& a, const Operand& b, CallSite site) {
  return Binary("gt", a, b, site);
}
Tensor GreaterEqual(const Operand& a, const Operand& b, CallSite site) {
  return Binary("ge", a, b, site);
}

Tensor LogicalAnd(const Tensor& a, const Tensor& b, CallSite site) {
  return Elementwise("logical_and", {a, b}, site);
}
Tensor LogicalOr(const Tensor& a, const Tensor& b, CallSite site) {
  return Elementwise("logical_or", {a, b}, site);
}
Tensor LogicalXor(const Tensor& a, const Tensor& b, CallSite site) {
  return Elementwise("logical_xor", {a, b}, site);
}
Tensor LogicalNot(const Tensor& x, CallSite site) { return Unary("logical_not", x, site); }

// --- Selection and conversion -------------------------------------------------------------------

Tensor Where(const Tensor& condition, const Operand& a, const Operand& b, CallSite site) {
  return Operate(a, b, site, [&](const Tensor& x, const Tensor& y) {
    return Elementwise("where", {condition, x, y}, site);
  });
}

Tensor Cast(const Tensor& x, DType dtype, CallSite site) {
  const absl::string_view name = DTypeName(dtype);
  return ApplyLocal(Spec("cast", site, {{"dtype", std::string(name.data(), name.size())}}), {x});
}

// --- Reductions ---------------------------------------------------------------------------------

Tensor Mean(const Tensor& x, const Axes& axes, bool keep_dims, CallSite site) {
  return ReduceAxes("mean", x, axes, keep_dims, site);
}
Tensor Max(const Tensor& x, const Axes& axes, bool keep_dims, CallSite site) {
  return ReduceAxes("max", x, axes, keep_dims, site);
}
Tensor Min(const Tensor& x, const Axes& axes, bool keep_dims, CallSite site) {
  return ReduceAxes("min", x, axes, keep_dims, site);
}
Tensor Product(const Tensor& x, const Axes& axes, bool keep_dims, CallSite site) {
  return ReduceAxes("prod", x, axes, keep_dims, site);
}

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// How many elements each result of a reduction of a usable x is made of. INVALID_ARGUMENT: x is not
// floating, or an axis none of its.
absl::StatusOr<int64_t> CountReduced(const char* name, const Tensor& x, const Axes& axes) {
  if (!IsFloating(x.dtype())) {
    return BadType(absl::StrCat(name, ": expected a floating-point tensor, got ", TypeText(x)));
  }
  if (axes.all()) return x.num_elements();
  int64_t count = 1;
  for (const int64_t axis : axes.list()) {
    CHORUS_ASSIGN_OR_RETURN(const int64_t checked, Axis(name, x, axis));
    count *= x.shape()[static_cast<size_t>(checked)];
  }
  return count;
}

// Half types as f32, and back.
Tensor Widened(const Tensor& x, CallSite site) {
  const bool half = x.dtype() == DType::kF16 || x.dtype() == DType::kBF16;
  return half ? Cast(x, DType::kF32, site) : x;
}
Tensor NarrowedTo(DType dtype, const Tensor& x, CallSite site) {
  return x.dtype() == dtype || !IsUsable(x) ? x : Cast(x, dtype, site);
}

// Of what is not negative. The root's slope at 0 is infinite: there it is a constant.
Tensor RootFlatAtZero(const Tensor& x, CallSite site) {
  const Tensor is_zero = Equal(x, 0, site);
  return Where(is_zero, 0, Sqrt(Where(is_zero, 1, x, site), site), site);
}

// Var in the dtype that it is computed in.
Tensor WideVar(const char* name, const Tensor& x, const Axes& axes, bool keep_dims, bool unbiased,
               CallSite site) {
  if (!IsUsable(x)) return ApplyLocal(Spec(name, site), {x});
  const absl::StatusOr<int64_t> count = CountReduced(name, x, axes);
  if (!count.ok()) return Fail(x, count.status(), site);
  const Tensor wide = Widened(x, site);
  // One mean for all stays 0-dim, which costs no memory.
  const Tensor distance = Sub(wide, Mean(wide, axes, !axes.all(), site), site);
  const Tensor squares = Mul(distance, distance, site);
  if (!unbiased) return Mean(squares, axes, keep_dims, site);
  const int64_t others = std::max<int64_t>(*count - 1, 0);
  return Div(Sum(squares, axes, keep_dims, site), static_cast<double>(others), site);
}

}  // namespace

Tensor Norm(const Tensor& x, double p, const Axes& axes, bool keep_dims, CallSite site) {
  if (!IsUsable(x)) return ApplyLocal(Spec("Norm", site), {x});
  const absl::StatusOr<int64_t> count = CountReduced("Norm", x, axes);
  if (!count.ok()) return Fail(x, count.status(), site);
  if (p == 1 || (p == kInfinity && *count == 0)) return Sum(Abs(x, site), axes, keep_dims, site);
  if (p == kInfinity) return Max(Abs(x, site), axes, keep_dims, site);
  if (p != 2) {
    return Fail(x, BadType(absl::StrCat("Norm: expected p of 1, 2 or infinity, got ", p)), site);
  }
  const Tensor wide = Widened(x, site);
  const Tensor squares = Sum(Mul(wide, wide, site), axes, keep_dims, site);
  return NarrowedTo(x.dtype(), RootFlatAtZero(squares, site), site);
}

Tensor LogSumExp(const Tensor& x, const Axes& axes, bool keep_dims, CallSite site) {
  if (!IsUsable(x)) return ApplyLocal(Spec("LogSumExp", site), {x});
  const absl::StatusOr<int64_t> count = CountReduced("LogSumExp", x, axes);
  if (!count.ok()) return Fail(x, count.status(), site);
  const Tensor wide = Widened(x, site);
  if (*count == 0) {
    const Tensor sum = Sum(Exp(wide, site), axes, keep_dims, site);
    return NarrowedTo(x.dtype(), Log(sum, site), site);
  }
  // The result does not depend on what is taken off and added again, and so needs no gradient of
  // it.
  const Tensor largest = Max(wide.Detach(), axes, !axes.all(), site);
  const Tensor off = Where(Less(Abs(largest, site), kInfinity, site), largest, 0, site);
  const Tensor sum = Sum(Exp(Sub(wide, off, site), site), axes, keep_dims, site);
  const Tensor on = off.shape() == sum.shape() ? off : Reshape(off, sum.shape(), site);
  return NarrowedTo(x.dtype(), Add(Log(sum, site), on, site), site);
}

Tensor Var(const Tensor& x, const Axes& axes, bool keep_dims, bool unbiased, CallSite site) {
  return NarrowedTo(x.dtype(), WideVar("Var", x, axes, keep_dims, unbiased, site), site);
}
Tensor Std(const Tensor& x, const Axes& axes, bool keep_dims, bool unbiased, CallSite site) {
  const Tensor variance = WideVar("Std", x, axes, keep_dims, unbiased, site);
  return NarrowedTo(x.dtype(), RootFlatAtZero(variance, site), site);
}

Tensor CumSum(const Tensor& x, int64_t axis, bool reverse, CallSite site) {
  return Along("cum_sum", {x}, axis, reverse ? Attributes{{"reverse", int64_t{1}}} : Attributes(),
               site);
}

// --- Random numbers -----------------------------------------------------------------------------

Tensor RandomNumber::On(const DeviceRef& device, CallSite site) const {
  if (is_value_ && SessionOf(device) != nullptr) {
    return IntegerOf(value_, SessionOf(device), device.slot());
  }
  if (!IsUsable(tensor_) || SessionOf(tensor_.device()) != SessionOf(device)) return tensor_;
  return tensor_.device() == device ? tensor_ : CopyTo(tensor_, device, site);
}

namespace {

Tensor Random(const char* op, const DeviceRef& device, DType dtype, const Shape& shape,
              const RandomNumber& seed, const RandomNumber& offset, CallSite site) {
  TensorType type(dtype, {});
  for (const int64_t size : shape) type.dims.emplace_back(size);
  NodeSpec spec = Spec(op, site, TypeAttributes(type));
  spec.device_slot = device.slot();
  return ApplyLocal(std::move(spec), {seed.On(device, site), offset.On(device, site)}, &device);
}

}  // namespace

Tensor RandomUniform(const DeviceRef& device, DType dtype, const Shape& shape,
                     const RandomNumber& seed, const RandomNumber& offset, CallSite site) {
  return Random("random_uniform", device, dtype, shape, seed, offset, site);
}
Tensor RandomNormal(const DeviceRef& device, DType dtype, const Shape& shape,
                    const RandomNumber& seed, const RandomNumber& offset, CallSite site) {
  return Random("random_normal", device, dtype, shape, seed, offset, site);
}
Tensor RandomBits(const DeviceRef& device, DType dtype, const Shape& shape,
                  const RandomNumber& seed, const RandomNumber& offset, CallSite site) {
  return Random("random_bits", device, dtype, shape, seed, offset, site);
}

}  // namespace chorus
