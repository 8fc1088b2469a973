// Tensors of the daemon: from the trainer's values, and back.
//
// Threads: any; one Tensor object as chorus.h says.
// Ownership: a Tensor is a handle of an immutable tensor, which goes with its last handle. FromHost
//   copies what it is given; a TensorView keeps the bytes that it shows; the memory of a
//   MappedTensor stays as long as a handle of its tensor.
// Errors: in the tensors: see Tensor::status and Wait. What waits returns them, and so does Map.
#ifndef CHORUS_CLIENT_TENSOR_H_
#define CHORUS_CLIENT_TENSOR_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "chorus/call_site.h"
#include "chorus/number.h"
#include "chorus/session.h"
#include "core/base/error.h"
#include "core/tensor/half.h"
#include "core/tensor/type.h"

namespace chorus {

namespace internal {
class TensorImpl;
}  // namespace internal

using Shape = std::vector<int64_t>;

// The dtype of a C++ type: DTypeOf<float>() is DType::kF32. Only the types below.
template <typename T>
constexpr DType DTypeOf();
template <>
constexpr DType DTypeOf<float>() {
  return DType::kF32;
}
template <>
constexpr DType DTypeOf<double>() {
  return DType::kF64;
}
template <>
constexpr DType DTypeOf<int64_t>() {
  return DType::kI64;
}
template <>
constexpr DType DTypeOf<int32_t>() {
  return DType::kI32;
}
template <>
constexpr DType DTypeOf<int16_t>() {
  return DType::kI16;
}
template <>
constexpr DType DTypeOf<int8_t>() {
  return DType::kI8;
}
template <>
constexpr DType DTypeOf<uint8_t>() {
  return DType::kU8;
}
// The half types of core/tensor/half.h: F16(1.5f) rounds, float(half) is exact.
template <>
constexpr DType DTypeOf<F16>() {
  return DType::kF16;
}
template <>
constexpr DType DTypeOf<BF16>() {
  return DType::kBF16;
}
template <>
constexpr DType DTypeOf<bool>() {
  return DType::kBool;
}
static_assert(sizeof(bool) == 1, "elements of a bool tensor are bytes");

// A tensor's bytes, mapped read-only where the daemon has them. Keeps them alive.
template <typename T>
class TensorView {
 public:
  TensorView() = default;
  TensorView(std::shared_ptr<const void> keep, const T* data, size_t size)
      : keep_(std::move(keep)), data_(data), size_(size) {}
  const T* data() const { return data_; }
  size_t size() const { return size_; }
  const T& operator[](size_t i) const { return data_[i]; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }

 private:
  std::shared_ptr<const void> keep_;
  const T* data_ = nullptr;
  size_t size_ = 0;
};

// A handle to an immutable tensor of the daemon: to what it is at once, to its bytes when they are
// computed. It is its own future: Wait.
class Tensor {
 public:
  Tensor() = default;  // no tensor: waits and ops give FAILED_PRECONDITION

  // Known at once, also while it is pending. kUnspecified and {} for a failed or absent one.
  DType dtype() const;
  const Shape& shape() const;
  int64_t num_elements() const;
  DeviceRef device() const;

  // True for a result that this rank does not get: of Send and Barrier, of Reduce and Gather off
  // their root. It can be waited for, and (but Barrier's) be a root of Backward: then this rank
  // takes part with nothing.
  bool absent() const;
  bool defined() const { return impl_ != nullptr; }  // false: Tensor()

  // What is known without waiting: an error that it carries, OK while it is pending or ready.
  absl::Status status() const;

  // Waits until it is computed, or failed: then the error of the op that failed, with the line that
  // called it. DEADLINE_EXCEEDED kTransportTimeout: the timeout passed; nothing has changed, the
  // outcome is still to be had. Without a timeout: SessionOptions::wait_timeout.
  absl::Status Wait() const;
  absl::Status Wait(Timeout timeout) const;

  // The elements, row-major; waits. INVALID_ARGUMENT kBadType: T is not its dtype.
  // FAILED_PRECONDITION kWrongState: it is absent. So say Item and View.
  template <typename T>
  absl::StatusOr<std::vector<T>> Read() const;
  // The one element of a tensor of one.
  template <typename T>
  absl::StatusOr<T> Item() const;
  // The elements in place, without a copy; waits. UNIMPLEMENTED by another transport than the ring,
  // so where the daemon is remote: Read.
  template <typename T>
  absl::StatusOr<TensorView<T>> View() const;

  // For readers: dtype, shape, device and values, as far as they fit on a screen; waits, as long as
  // Wait. "f32[2] on device 0: [1, 2.5]". Where there are no values, why: its error, or that it is
  // one of a function that is being compiled. Where the daemon is remote all of it is read.
  std::string ToString() const;

  // --- Gradients ---
  // Marks a tensor that was not computed from others (a leaf) as one whose gradient is wanted.
  // What was computed from it before took it as a constant. Returns itself. INVALID (status()
  // tells): not floating point, or a result.
  Tensor& RequireGrad();
  // True for such a leaf and for everything that is recorded as depending on one.
  bool requires_grad() const;
  // What Backward has added up so far; an undefined tensor when nothing has.
  Tensor grad() const;
  void ClearGrad() const;
  // The same tensor without its history.
  Tensor Detach() const;

 private:
  friend class internal::Access;
  explicit Tensor(std::shared_ptr<internal::TensorImpl> impl) : impl_(std::move(impl)) {}
  absl::Status ReadInto(DType dtype, std::function<char*(int64_t elements)> allocate) const;
  absl::StatusOr<std::pair<std::shared_ptr<const void>, const char*>> Map(DType dtype) const;

  std::shared_ptr<internal::TensorImpl> impl_;
};

// x.ToString(). GoogleTest prints tensors by it.
std::ostream& operator<<(std::ostream& out, const Tensor& x);

// Memory of the trainer's that the daemon reads in place: staging. Fill data(), then use tensor()
// as an operand: nothing is copied on this side, and a floating-point AllReduce reads it where it
// is. Do not write while an op that uses it is pending: only this rank's own contribution is
// undefined then, the ranks still agree on the result.
template <typename T>
class MappedTensor {
 public:
  MappedTensor() = default;
  T* data() const { return data_; }
  size_t size() const { return size_; }
  T& operator[](size_t i) const { return data_[i]; }
  const Tensor& tensor() const { return tensor_; }
  operator const Tensor&() const { return tensor_; }  // an operand

  MappedTensor(Tensor tensor, T* data, size_t size)
      : tensor_(std::move(tensor)), data_(data), size_(size) {}

 private:
  Tensor tensor_;
  T* data_ = nullptr;
  size_t size_ = 0;
};

// Internal: what the templates below are made of.
Tensor FromBytes(const DeviceRef& device, DType dtype, const Shape& shape, const char* bytes,
                 int64_t elements, CallSite site);
absl::StatusOr<std::pair<Tensor, char*>> MapBytes(const DeviceRef& device, DType dtype,
                                                  const Shape& shape, CallSite site);

// A tensor with a copy of `values`; as many as `shape` has elements, row-major. FromHost<bool>
// takes a std::vector<bool> or a bool*, and Read<bool> gives a std::vector<bool>. More than 64
// bytes pass through memory that the daemon makes: where there is none yet, or as much as may be is
// still being copied, it waits for that (status() then tells: RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED
// kTransportTimeout), and other threads of the session with it.
template <typename T>
Tensor FromHost(const DeviceRef& device, const std::vector<T>& values, const Shape& shape,
                CallSite site = CallSite::Here()) {
  const int64_t count = static_cast<int64_t>(values.size());
  if constexpr (std::is_same_v<T, bool>) {
    // Its elements are bits.
    const std::vector<char> bytes(values.begin(), values.end());
    return FromBytes(device, DType::kBool, shape, bytes.data(), count, site);
  } else {
    return FromBytes(device, DTypeOf<T>(), shape, reinterpret_cast<const char*>(values.data()),
                     count, site);
  }
}
template <typename T>
Tensor FromHost(const DeviceRef& device, const T* values, size_t count, const Shape& shape,
                CallSite site = CallSite::Here()) {
  return FromBytes(device, DTypeOf<T>(), shape, reinterpret_cast<const char*>(values),
                   static_cast<int64_t>(count), site);
}
// Of no dimensions.
template <typename T>
Tensor Scalar(const DeviceRef& device, T value, CallSite site = CallSite::Here()) {
  return FromBytes(device, DTypeOf<T>(), {}, reinterpret_cast<const char*>(&value), 1, site);
}
// INVALID_ARGUMENT (status() tells): `value` is none of the dtype's, which of an integer dtype are
// the whole numbers of its range.
Tensor Full(const DeviceRef& device, DType dtype, const Shape& shape, const Number& value,
            CallSite site = CallSite::Here());
Tensor Zeros(const DeviceRef& device, DType dtype, const Shape& shape,
             CallSite site = CallSite::Here());

// A tensor that carries an error (not OK), as a failed op gives: for a function that is being
// compiled and cannot go on.
Tensor FromError(const DeviceRef& device, const absl::Status& error);

// Waits for the daemon to make the memory. UNIMPLEMENTED by another transport than the ring.
// RESOURCE_EXHAUSTED.
template <typename T>
absl::StatusOr<MappedTensor<T>> Map(const DeviceRef& device, const Shape& shape,
                                    CallSite site = CallSite::Here()) {
  auto mapped = MapBytes(device, DTypeOf<T>(), shape, site);
  if (!mapped.ok()) return mapped.status();
  const size_t size = static_cast<size_t>(mapped->first.num_elements());
  return MappedTensor<T>(std::move(mapped->first), reinterpret_cast<T*>(mapped->second), size);
}

// --- Templates ----------------------------------------------------------------------------------

template <typename T>
absl::StatusOr<std::vector<T>> Tensor::Read() const {
  // The elements of a std::vector<bool> are bits.
  std::vector<std::conditional_t<std::is_same_v<T, bool>, char, T>> values;
  const absl::Status status = ReadInto(DTypeOf<T>(), [&values](int64_t elements) {
    values.resize(static_cast<size_t>(elements));
    return reinterpret_cast<char*>(values.data());
  });
  if (!status.ok()) return status;
  if constexpr (std::is_same_v<T, bool>) {
    return std::vector<bool>(values.begin(), values.end());
  } else {
    return values;
  }
}

template <typename T>
absl::StatusOr<T> Tensor::Item() const {
  absl::StatusOr<std::vector<T>> values = Read<T>();
  if (!values.ok()) return values.status();
  if (values->size() != 1) {
    return BadType("Item: expected a tensor of one element, got " + std::to_string(values->size()));
  }
  return values->front();
}

template <typename T>
absl::StatusOr<TensorView<T>> Tensor::View() const {
  auto mapped = Map(DTypeOf<T>());
  if (!mapped.ok()) return mapped.status();
  return TensorView<T>(std::move(mapped->first), reinterpret_cast<const T*>(mapped->second),
                       static_cast<size_t>(num_elements()));
}

}  // namespace chorus

#endif  // CHORUS_CLIENT_TENSOR_H_
