#include "chorus/math.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/internal/access.h"
#include "client/internal/local.h"
#include "client/internal/record.h"
#include "client/internal/session_core.h"
#include "client/internal/tape.h"
#include "core/base/error.h"

namespace chorus {
namespace {

using internal::ApplyLocal;
using internal::Axis;
using internal::BroadcastShapes;
using internal::Elementwise;
using internal::Fail;
using internal::ImplOf;
using internal::IsUsable;
using internal::Operate;
using internal::ReduceAxes;
using internal::SessionOf;
using internal::SiteOf;
using internal::Spec;
using internal::TypeText;

}  // namespace

Tensor Add(const Tensor& a, const Tensor& b, CallSite site) {
  return Elementwise("add", {a, b}, site);
}
Tensor Sub(const Tensor& a, const Tensor& b, CallSite site) {
  return Elementwise("sub", {a, b}, site);
}
Tensor Mul(const Tensor& a, const Tensor& b, CallSite site) {
  return Elementwise("mul", {a, b}, site);
}
Tensor Neg(const Tensor& x, CallSite site) { return ApplyLocal(Spec("neg", site), {x}); }
Tensor MatMul(const Tensor& a, const Tensor& b, CallSite site) {
  const auto is_matrix = [](const Tensor& x) { return IsUsable(x) && x.shape().size() >= 2; };
  const auto one_by_one = [&] { return ApplyLocal(Spec("matmul", site), {a, b}); };
  if (!is_matrix(a) || !is_matrix(b)) return one_by_one();
  Shape leading(a.shape().begin(), a.shape().end() - 2);
  const Shape of_b(b.shape().begin(), b.shape().end() - 2);
  if (leading == of_b) return one_by_one();
  if (of_b.empty()) {
    // The rows of all matrices of a are those of one.
    Shape shape = a.shape();
    int64_t rows = 1;
    for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
    shape.back() = b.shape().back();
    return Reshape(MatMul(Reshape(a, {rows, a.shape().back()}, site), b, site), shape, site);
  }
  if (!BroadcastShapes(of_b, &leading)) {
    return Fail(a,
                BadType(absl::StrCat("matmul: expected leading dimensions that broadcast, got ",
                                     TypeText(a), " and ", TypeText(b))),
                site);
  }
  const auto stretched = [&](const Tensor& x) {
    Shape shape = leading;
    shape.insert(shape.end(), x.shape().end() - 2, x.shape().end());
    return x.shape() == shape ? x : Expand(x, shape, site);
  };
  return ApplyLocal(Spec("matmul", site), {stretched(a), stretched(b)});
}
Tensor Relu(const Tensor& x, CallSite site) { return ApplyLocal(Spec("relu", site), {x}); }
Tensor Sin(const Tensor& x, CallSite site) { return ApplyLocal(Spec("sin", site), {x}); }
Tensor Cos(const Tensor& x, CallSite site) { return ApplyLocal(Spec("cos", site), {x}); }
Tensor Sum(const Tensor& x, const Axes& axes, bool keep_dims, CallSite site) {
  return ReduceAxes("sum", x, axes, keep_dims, site);
}

Tensor Expand(const Tensor& x, const Shape& shape, CallSite site) {
  return ApplyLocal(Spec("expand", site, {{"dims", shape}}), {x});
}

Tensor Reshape(const Tensor& x, const Shape& shape, CallSite site) {
  return ApplyLocal(Spec("reshape", site, {{"dims", shape}}), {x});
}

Tensor Transpose(const Tensor& x, CallSite site) {
  std::vector<int64_t> permutation(x.shape().size());
  for (size_t i = 0; i < permutation.size(); ++i) permutation[i] = static_cast<int64_t>(i);
  if (IsUsable(x) && permutation.size() < 2) {
    return Fail(
        x, BadType(absl::StrCat("transpose: expected at least two dimensions, got ", TypeText(x))),
        site);
  }
  if (permutation.size() >= 2) std::swap(permutation.end()[-1], permutation.end()[-2]);
  return Transpose(x, permutation, site);
}

Tensor Transpose(const Tensor& x, const std::vector<int64_t>& permutation, CallSite site) {
  return ApplyLocal(Spec("transpose", site, {{"perm", permutation}}), {x});
}

Tensor Slice(const Tensor& x, int64_t axis, int64_t begin, int64_t end, CallSite site) {
  if (!IsUsable(x)) return ApplyLocal(Spec("slice", site), {x});
  const absl::StatusOr<int64_t> checked = Axis("slice", x, axis);
  if (!checked.ok()) return Fail(x, checked.status(), site);
  return ApplyLocal(Spec("slice", site, {{"axis", *checked}, {"begin", begin}, {"end", end}}), {x});
}

Tensor Concat(const std::vector<Tensor>& xs, int64_t axis, CallSite site) {
  int64_t axis_index = axis;
  if (!xs.empty() && IsUsable(xs[0])) {
    const absl::StatusOr<int64_t> checked = Axis("concat", xs[0], axis);
    if (!checked.ok()) return Fail(xs[0], checked.status(), site);
    axis_index = *checked;
  }
  return ApplyLocal(Spec("concat", site, {{"axis", axis_index}}), xs);
}

Tensor CopyTo(const Tensor& x, const DeviceRef& device, CallSite site) {
  NodeSpec spec = Spec("copy", site);
  spec.device_slot = device.slot();
  if (IsUsable(x) && (SessionOf(device) != ImplOf(x)->data->session || device.slot() < 0 ||
                      device.slot() >= SessionOf(device)->device_count())) {
    return Fail(x, BadType("copy: expected a device of the tensor's session"), site);
  }
  return ApplyLocal(std::move(spec), {x}, &device);
}

Tensor operator+(const Operand& a, const Operand& b) {
  const CallSite site = SiteOf(a, b);
  return Operate(a, b, site, [&](const Tensor& x, const Tensor& y) { return Add(x, y, site); });
}
Tensor operator-(const Operand& a, const Operand& b) {
  const CallSite site = SiteOf(a, b);
  return Operate(a, b, site, [&](const Tensor& x, const Tensor& y) { return Sub(x, y, site); });
}
Tensor operator*(const Operand& a, const Operand& b) {
  const CallSite site = SiteOf(a, b);
  return Operate(a, b, site, [&](const Tensor& x, const Tensor& y) { return Mul(x, y, site); });
}
Tensor operator-(const Operand& x) { return Neg(x.tensor(), x.site()); }

}  // namespace chorus
