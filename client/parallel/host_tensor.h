// Tensors in the trainer's own memory, scattered to devices and gathered from them.
//
// Threads: chorus/parallel.h, which also says what is recorded.
// Ownership: a HostTensor is a handle; what it refers to without holding it is the caller's.
// Errors: a HostTensor carries its own, as a tensor does; Scatter's are in the pieces.
#ifndef CHORUS_CLIENT_PARALLEL_HOST_TENSOR_H_
#define CHORUS_CLIENT_PARALLEL_HOST_TENSOR_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "chorus/call_site.h"
#include "chorus/parallel/device_group.h"
#include "chorus/session.h"
#include "chorus/tensor.h"

namespace chorus {
namespace parallel {

struct HostTensorImpl;  // internal

// A tensor in the trainer's own memory: what Scatter reads, and what GatherToHost gives.
class HostTensor {
 public:
  HostTensor() = default;  // none
  // Holds the values; as many as `shape` has elements, row-major.
  template <typename T>
  static HostTensor Of(std::vector<T> values, const Shape& shape);
  // Refers to them: they must live as long as this is used.
  template <typename T>
  static HostTensor View(const T* values, size_t count, const Shape& shape) {
    return HostTensor(nullptr, DTypeOf<T>(), reinterpret_cast<const char*>(values), count, shape);
  }
  // Of any dtype: `count` elements at `data`, which `keep` holds, or which must live as long.
  static HostTensor OfBytes(std::shared_ptr<const void> keep, DType dtype, const char* data,
                            size_t count, const Shape& shape) {
    return HostTensor(std::move(keep), dtype, data, count, shape);
  }
  // Refers to memory that the daemon shares.
  template <typename T>
  HostTensor(const MappedTensor<T>& mapped)  // its elements
      : HostTensor(std::make_shared<Tensor>(mapped.tensor()), DTypeOf<T>(),
                   reinterpret_cast<const char*>(mapped.data()), mapped.size(),
                   mapped.tensor().shape()) {}

  DType dtype() const;
  const Shape& shape() const;
  absl::Status status() const;  // an error that it carries
  // Its elements in place, row-major, aligned as they were given; they live as long as it does.
  // Null: gathered ones, for which Read waits, and where it carries an error.
  const char* bytes() const;

  // Marks it as one whose gradient is wanted. From then on a tensor on the group's first device
  // stands for it: it is uploaded there once, and scattered from there. Its gradient,
  // tensor().grad() or that which Grad gives for tensor(), has its shape, and is gathered back to
  // that device.
  HostTensor& RequireGrad(const DeviceGroup& devices, CallSite site = CallSite::Here());
  bool requires_grad() const;
  // The tensor that stands for it on the first device. Of one that requires no gradient or was not
  // gathered: an undefined tensor. Of a gathered one: its elements, recorded, so that a loss of
  // them has gradients, which are scattered back; gathered there when it is first asked for, and
  // once more where that was under NoGrad or in a compiled function, and this is not, or where it
  // is known to have failed.
  Tensor tensor() const;

  // The elements, row-major; of a gathered one, waits for them. INVALID_ARGUMENT: T is not its
  // dtype.
  template <typename T>
  absl::StatusOr<std::vector<T>> Read() const;

 private:
  friend class internal::Access;
  explicit HostTensor(std::shared_ptr<HostTensorImpl> impl) : impl_(std::move(impl)) {}
  HostTensor(std::shared_ptr<const void> keep, DType dtype, const char* data, size_t count,
             const Shape& shape);
  absl::Status ReadInto(DType dtype, std::function<char*(int64_t elements)> allocate) const;

  std::shared_ptr<HostTensorImpl> impl_;
};

// The same from the trainer's memory: each chunk goes straight to its device, unless a gradient is
// wanted (HostTensor::RequireGrad).
std::vector<Tensor> Scatter(const HostTensor& x, const DeviceGroup& devices,
                            const std::vector<int64_t>& sizes = {}, int64_t dim = 0,
                            CallSite site = CallSite::Here());

template <typename T>
std::vector<Tensor> Scatter(const MappedTensor<T>& x, const DeviceGroup& devices,
                            const std::vector<int64_t>& sizes = {}, int64_t dim = 0,
                            CallSite site = CallSite::Here()) {
  return Scatter(HostTensor(x), devices, sizes, dim, site);
}

// The same to the trainer's memory: each comes straight from its device when it is read.
HostTensor GatherToHost(const std::vector<Tensor>& xs, const DeviceGroup& devices, int64_t dim = 0,
                        std::vector<std::string>* warnings = nullptr,
                        CallSite site = CallSite::Here());

// --- Templates ----------------------------------------------------------------------------------

template <typename T>
HostTensor HostTensor::Of(std::vector<T> values, const Shape& shape) {
  // The elements of a std::vector<bool> are bits.
  using Stored = std::vector<std::conditional_t<std::is_same_v<T, bool>, char, T>>;
  std::shared_ptr<Stored> stored;
  if constexpr (std::is_same_v<T, bool>) {
    stored = std::make_shared<Stored>(values.begin(), values.end());
  } else {
    stored = std::make_shared<Stored>(std::move(values));
  }
  const char* const data = reinterpret_cast<const char*>(stored->data());
  const size_t count = stored->size();
  return HostTensor(std::move(stored), DTypeOf<T>(), data, count, shape);
}

template <typename T>
absl::StatusOr<std::vector<T>> HostTensor::Read() const {
  using Stored = std::vector<std::conditional_t<std::is_same_v<T, bool>, char, T>>;
  Stored values;
  const absl::Status status = ReadInto(DTypeOf<T>(), [&values](int64_t elements) {
    values.resize(static_cast<size_t>(elements));
    return reinterpret_cast<char*>(values.data());
  });
  if (!status.ok()) return status;
  return std::vector<T>(values.begin(), values.end());
}

}  // namespace parallel
}  // namespace chorus

#endif  // CHORUS_CLIENT_PARALLEL_HOST_TENSOR_H_
