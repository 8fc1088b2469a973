#include "chorus/functional/math.h"

#include <string>
#include <utility>

#include "client/internal/access.h"
#include "client/internal/local.h"
#include "client/internal/record.h"

namespace chorus {
namespace {

using internal::ApplyLocal;
using internal::Elementwise;
using internal::IntegerOf;
using internal::Operate;
using internal::ReduceAxes;
using internal::SessionOf;
using internal::Spec;

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

// --- Random numbers -----------------------------------------------------------------------------

Tensor RandomNumber::On(const DeviceRef& device) const {
  if (!is_value_ || SessionOf(device) == nullptr) return tensor_;
  return IntegerOf(value_, SessionOf(device), device.slot());
}

namespace {

Tensor Random(const char* op, const DeviceRef& device, DType dtype, const Shape& shape,
              const RandomNumber& seed, const RandomNumber& offset, CallSite site) {
  TensorType type(dtype, {});
  for (const int64_t size : shape) type.dims.emplace_back(size);
  NodeSpec spec = Spec(op, site, TypeAttributes(type));
  spec.device_slot = device.slot();
  return ApplyLocal(std::move(spec), {seed.On(device), offset.On(device)}, &device);
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
