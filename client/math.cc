#include "chorus/math.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
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

// What stands for the -1 of `shape`, so that it has so many elements; -1 where nothing does.
int64_t OpenSize(const Shape& shape, int64_t elements) {
  int64_t others = 1;
  bool open = false;
  for (const int64_t size : shape) {
    if (size == -1 && !open) {
      open = true;
    } else if (size < 1 || size > std::numeric_limits<int64_t>::max() / others) {
      return -1;
    } else {
      others *= size;
    }
  }
  return elements % others == 0 ? elements / others : -1;
}

Tensor Binary(const char* op, const Operand& a, const Operand& b) {
  const CallSite site = SiteOf(a, b);
  return Operate(a, b, site, [&](const Tensor& x, const Tensor& y) {
    return Elementwise(op, {x, y}, site);
  });
}

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
  const auto open = std::find(shape.begin(), shape.end(), -1);
  if (open != shape.end() && IsUsable(x)) {
    Shape whole = shape;
    int64_t& size = whole[static_cast<size_t>(open - shape.begin())];
    size = OpenSize(shape, x.num_elements());
    if (size >= 0) return Reshape(x, whole, site);
    return Fail(
        x,
        BadType(absl::StrCat("reshape: expected dims with the ", x.num_elements(), " elements of ",
                             TypeText(x), ", one of which may be -1, got [",
                             absl::StrJoin(shape, ","), "]")),
        site);
  }
  return ApplyLocal(Spec("reshape", site, {{"dims", shape}}), {x});
}

Tensor Transpose(const Tensor& x, CallSite site) {
  std::vector<int64_t> permutation(x.shape().size());
  std::iota(permutation.begin(), permutation.end(), 0);
  if (IsUsable(x) && permutation.size() < 2) {
    return Fail(
        x, BadType(absl::StrCat("transpose: expected at least two dimensions, got ", TypeText(x))),
        site);
  }
  if (permutation.size() >= 2) std::swap(permutation.end()[-1], permutation.end()[-2]);
  return Transpose(x, permutation, site);
}

Tensor Transpose(const Tensor& x, const std::vector<int64_t>& permutation, CallSite site) {
  std::vector<int64_t> from_front = permutation;
  const int64_t rank = static_cast<int64_t>(x.shape().size());
  for (int64_t& axis : from_front) {
    if (axis < 0 && axis >= -rank) axis += rank;
  }
  return ApplyLocal(Spec("transpose", site, {{"perm", std::move(from_front)}}), {x});
}

Tensor Transpose(const Tensor& x, std::initializer_list<int64_t> permutation, CallSite site) {
  return Transpose(x, std::vector<int64_t>(permutation), site);
}

Tensor SwapAxes(const Tensor& x, int64_t a, int64_t b, CallSite site) {
  std::vector<int64_t> permutation(x.shape().size());
  std::iota(permutation.begin(), permutation.end(), 0);
  if (!IsUsable(x)) return Transpose(x, permutation, site);
  const absl::StatusOr<int64_t> first = Axis("SwapAxes", x, a);
  if (!first.ok()) return Fail(x, first.status(), site);
  const absl::StatusOr<int64_t> second = Axis("SwapAxes", x, b);
  if (!second.ok()) return Fail(x, second.status(), site);
  std::swap(permutation[static_cast<size_t>(*first)], permutation[static_cast<size_t>(*second)]);
  return Transpose(x, permutation, site);
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

Tensor operator+(const Operand& a, const Operand& b) { return Binary("add", a, b); }
Tensor operator-(const Operand& a, const Operand& b) { return Binary("sub", a, b); }
Tensor operator*(const Operand& a, const Operand& b) { return Binary("mul", a, b); }
Tensor operator-(const Operand& x) { return Neg(x.tensor(), x.site()); }
Tensor operator/(const Operand& a, const Operand& b) { return Binary("div", a, b); }
Tensor operator<(const Operand& a, const Operand& b) { return Binary("lt", a, b); }
Tensor operator<=(const Operand& a, const Operand& b) { return Binary("le", a, b); }
Tensor operator>(const Operand& a, const Operand& b) { return Binary("gt", a, b); }
Tensor operator>=(const Operand& a, const Operand& b) { return Binary("ge", a, b); }

// The line is that of `y`, which was made in it.
Tensor& operator+=(Tensor& x, const Operand& y) { return x = Operand(x, y.site()) + y; }
Tensor& operator-=(Tensor& x, const Operand& y) { return x = Operand(x, y.site()) - y; }
Tensor& operator*=(Tensor& x, const Operand& y) { return x = Operand(x, y.site()) * y; }
Tensor& operator/=(Tensor& x, const Operand& y) { return x = Operand(x, y.site()) / y; }

}  // namespace chorus
