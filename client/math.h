// Local ops on tensors: those that nearly every model has. More of them are in functional/math.h,
// functional/nn.h and functional/sort.h; docs/ops.md has them all.
//
// Threads: any, as chorus.h says.
// Ownership: results are handles. An operand's handle may go as soon as the call has returned.
// Errors: in the results, with the line of the call: INVALID_ARGUMENT kBadType where shapes, dtypes
//   or devices do not fit; UNIMPLEMENTED kUnsupported for a dtype that the op has no kernels for.
#ifndef CHORUS_CLIENT_MATH_H_
#define CHORUS_CLIENT_MATH_H_

#include <cstdint>
#include <initializer_list>
#include <type_traits>
#include <utility>
#include <vector>

#include "chorus/call_site.h"
#include "chorus/session.h"
#include "chorus/tensor.h"
#include "core/tensor/type.h"

namespace chorus {

// Recorded, and sent together when a result is needed: at a collective, a read, a limit, or the end
// of Backward. Shapes of two operands broadcast as usual (sizes 1 and missing leading dimensions
// stretch); dtypes and devices must be equal.
Tensor Add(const Tensor& a, const Tensor& b, CallSite site = CallSite::Here());
Tensor Sub(const Tensor& a, const Tensor& b, CallSite site = CallSite::Here());
Tensor Mul(const Tensor& a, const Tensor& b, CallSite site = CallSite::Here());
Tensor Neg(const Tensor& x, CallSite site = CallSite::Here());
// Of matrices: [..., m, k] and [..., k, n]. Leading dimensions broadcast; one matrix on the right
// for all on the left costs nothing more.
Tensor MatMul(const Tensor& a, const Tensor& b, CallSite site = CallSite::Here());
Tensor Relu(const Tensor& x, CallSite site = CallSite::Here());
Tensor Sin(const Tensor& x, CallSite site = CallSite::Here());
Tensor Cos(const Tensor& x, CallSite site = CallSite::Here());
// The axes of a reduction: all, one, or a list of them (negative: from the end), which as a vector
// may be empty. {} is Axes(), all.
class Axes {
 public:
  Axes() = default;
  template <typename T, typename = std::enable_if_t<std::is_integral_v<T>>>
  Axes(T axis) : all_(false), axes_{static_cast<int64_t>(axis)} {}  // implicit
  Axes(bool) = delete;                                              // keep_dims comes after them
  Axes(std::vector<int64_t> axes)                                   // implicit
      : all_(false), axes_(std::move(axes)) {}
  Axes(std::initializer_list<int64_t> axes) : all_(false), axes_(axes) {}  // implicit

  bool all() const { return all_; }
  const std::vector<int64_t>& list() const { return axes_; }

 private:
  bool all_ = true;
  std::vector<int64_t> axes_;
};
Tensor Sum(const Tensor& x, const Axes& axes = Axes(), bool keep_dims = false,
           CallSite site = CallSite::Here());
Tensor Expand(const Tensor& x, const Shape& shape, CallSite site = CallSite::Here());
// One size may be -1: what the others leave.
Tensor Reshape(const Tensor& x, const Shape& shape, CallSite site = CallSite::Here());
// Swaps the last two axes, or permutes all: axis i of the result is axis permutation[i] of x.
Tensor Transpose(const Tensor& x, CallSite site = CallSite::Here());
Tensor Transpose(const Tensor& x, const std::vector<int64_t>& permutation,
                 CallSite site = CallSite::Here());
Tensor Transpose(const Tensor& x, std::initializer_list<int64_t> permutation,
                 CallSite site = CallSite::Here());
Tensor SwapAxes(const Tensor& x, int64_t a, int64_t b, CallSite site = CallSite::Here());
// [begin, end) of one axis.
Tensor Slice(const Tensor& x, int64_t axis, int64_t begin, int64_t end,
             CallSite site = CallSite::Here());
Tensor Concat(const std::vector<Tensor>& xs, int64_t axis, CallSite site = CallSite::Here());
// To another device of the same session.
Tensor CopyTo(const Tensor& x, const DeviceRef& device, CallSite site = CallSite::Here());

// For operators: a tensor, or a number that takes the other side's dtype.
class Operand {
 public:
  Operand(const Tensor& tensor, CallSite site = CallSite::Here())  // implicit
      : tensor_(tensor), site_(site) {}
  template <typename T>
  Operand(const MappedTensor<T>& mapped, CallSite site = CallSite::Here())  // implicit
      : tensor_(mapped.tensor()), site_(site) {}
  template <typename T, typename = std::enable_if_t<std::is_convertible<T, Number>::value>>
  Operand(T number, CallSite site = CallSite::Here())  // implicit
      : number_(number), is_number_(true), site_(site) {}

  const Tensor& tensor() const { return tensor_; }
  const Number& number() const { return number_; }
  bool is_number() const { return is_number_; }
  CallSite site() const { return site_; }

 private:
  Tensor tensor_;
  Number number_ = 0;
  bool is_number_ = false;
  CallSite site_;
};
Tensor operator+(const Operand& a, const Operand& b);
Tensor operator-(const Operand& a, const Operand& b);
Tensor operator*(const Operand& a, const Operand& b);
Tensor operator-(const Operand& x);
// Of integers truncated; by zero it is INVALID_ARGUMENT when it runs.
Tensor operator/(const Operand& a, const Operand& b);
// To bool, false where one is NaN. Equal and NotEqual are in functional/math.h: == would be taken
// for one answer.
Tensor operator<(const Operand& a, const Operand& b);
Tensor operator<=(const Operand& a, const Operand& b);
Tensor operator>(const Operand& a, const Operand& b);
Tensor operator>=(const Operand& a, const Operand& b);

// x = x + y and so on: tensors do not change, the handle becomes one of the result. Copies of it
// from before are what they were. A leaf's handle is no leaf's then: after an update under NoGrad,
// RequireGrad makes it one again.
Tensor& operator+=(Tensor& x, const Operand& y);
Tensor& operator-=(Tensor& x, const Operand& y);
Tensor& operator*=(Tensor& x, const Operand& y);
Tensor& operator/=(Tensor& x, const Operand& y);

}  // namespace chorus

#endif  // CHORUS_CLIENT_MATH_H_
