// One process with several devices: broadcast, reduce-add, scatter and gather between the devices
// of one session, as torch.nn.parallel has them.
//
// They are the collectives of chorus.h, called by all members of a world that lives in one session
// (a DeviceGroup): one run a call, the same gradients to any order, the same bits. What differs
// comes of there being one caller, who knows everything:
//   * A call is recorded only where an input requires a gradient; otherwise its results require
//   none
//     on any device.
//   * Backward takes part for every device as soon as one result is reached: a result that no loss
//     uses counts as zeros, and nobody waits for it.
//   * A call that is refused is refused before anything is sent: the group stays usable.
// Errors are in the tensors, as everywhere; where a list comes back, in each of them.
//
// Threads: as chorus.h; the calls on one DeviceGroup must be ordered by the caller.
#ifndef CHORUS_CLIENT_PARALLEL_H_
#define CHORUS_CLIENT_PARALLEL_H_

#include <any>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "chorus/call_site.h"
#include "chorus/session.h"
#include "chorus/tensor.h"

namespace chorus {
namespace parallel {

struct HostTensorImpl;  // internal

// Devices of one session, in an order: places 0 to size() - 1. A handle; copies are the same group.
// Its world goes when nobody has it any more: no handle of the group or of a member, no result that
// has history there, no function compiled with it. What was called before still comes.
class DeviceGroup {
 public:
  DeviceGroup() = default;  // of no devices: calls are refused

  // `devices`: places in the session's list, each once; empty: all of them, in order. Joins a world
  // of its own, with a member on each. INVALID_ARGUMENT: a device that is none, or twice.
  static absl::StatusOr<DeviceGroup> Create(const Session& session,
                                            const std::vector<int>& devices = {});

  int size() const { return static_cast<int>(worlds_.size()); }
  DeviceRef device(int place) const { return worlds_[static_cast<size_t>(place)].device(); }
  // The member on a device, for collectives of chorus.h: there, all members have to call.
  const World& world(int place) const { return worlds_[static_cast<size_t>(place)]; }
  int PlaceOf(const DeviceRef& device) const;  // -1: not in the group

 private:
  std::vector<World> worlds_;  // by place
};

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
  // Refers to memory that the daemon shares.
  template <typename T>
  HostTensor(const MappedTensor<T>& mapped)  // NOLINT: its elements
      : HostTensor(std::make_shared<Tensor>(mapped.tensor()), DTypeOf<T>(),
                   reinterpret_cast<const char*>(mapped.data()), mapped.size(),
                   mapped.tensor().shape()) {}

  DType dtype() const;
  const Shape& shape() const;
  absl::Status status() const;  // an error that it carries

  // Marks it as one whose gradient is wanted. From then on a tensor on the group's first device
  // stands for it: it is uploaded there once, and scattered from there. Its gradient,
  // tensor().grad() or that which Grad gives for tensor(), has its shape, and is gathered back to
  // that device.
  HostTensor& RequireGrad(const DeviceGroup& devices, CallSite site = CallSite::Here());
  bool requires_grad() const;
  // The tensor that stands for it on the first device. Of one that requires no gradient or was not
  // gathered: an undefined tensor. Of a gathered one: its elements, recorded, so that a loss of
  // them has gradients, which are scattered back; gathered there when it is first asked for.
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

// What coalescing takes together, in bytes, where somebody asks. It has no influence on results.
inline constexpr int64_t kBufferSize = 10485760;

// A copy of `x`, which is on a device of the group, on each device, by place. Gradient: ReduceAdd
// to x's device.
std::vector<Tensor> Broadcast(const Tensor& x, const DeviceGroup& devices,
                              CallSite site = CallSite::Here());
// The same of several tensors, all on one device: [place][tensor]. A tensor that requires no
// gradient gives results that require none.
std::vector<std::vector<Tensor>> BroadcastCoalesced(const std::vector<Tensor>& xs,
                                                    const DeviceGroup& devices,
                                                    int64_t buffer_size = kBufferSize,
                                                    CallSite site = CallSite::Here());

// The sum of `xs`, one tensor on each device, of one dtype and shape, on the device at place
// `destination`. Added in the one tree over the places of all devices (chorus.h), so bits do not
// depend on the destination. Gradient: Broadcast.
Tensor ReduceAdd(const std::vector<Tensor>& xs, const DeviceGroup& devices, int destination = 0,
                 CallSite site = CallSite::Here());
// The same of several: `xs` by [place][tensor].
std::vector<Tensor> ReduceAddCoalesced(const std::vector<std::vector<Tensor>>& xs,
                                       const DeviceGroup& devices, int destination = 0,
                                       int64_t buffer_size = kBufferSize,
                                       CallSite site = CallSite::Here());

// Chunks of `x` along `dim` (negative: from the end), chunk i on device i. `sizes`: of each
// device's chunk, zeros allowed, `dim`'s size in all; empty: chunks of ceil(size / devices), so
// that there may be fewer chunks than devices, or as many empty ones as devices where the size is
// 0. `x` has at least one dimension. Gradient: Gather to x's device.
std::vector<Tensor> Scatter(const Tensor& x, const DeviceGroup& devices,
                            const std::vector<int64_t>& sizes = {}, int64_t dim = 0,
                            CallSite site = CallSite::Here());
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

// `xs`, on different devices of the group, one after the other along `dim`, on the device at place
// `destination`. Of one dtype, and of one shape but for `dim`. Tensors of no dimensions make a
// vector where `dim` is 0, and `warnings` says so where it is given. Gradient: Scatter by their
// sizes.
Tensor Gather(const std::vector<Tensor>& xs, const DeviceGroup& devices, int destination = 0,
              int64_t dim = 0, std::vector<std::string>* warnings = nullptr,
              CallSite site = CallSite::Here());
// The same to the trainer's memory: each comes straight from its device when it is read.
HostTensor GatherToHost(const std::vector<Tensor>& xs, const DeviceGroup& devices, int64_t dim = 0,
                        std::vector<std::string>* warnings = nullptr,
                        CallSite site = CallSite::Here());

// --- Nested values ------------------------------------------------------------------------------

// What the inputs and results of a model are made of.
class Nest {
 public:
  enum class Kind { kNothing, kTensor, kHost, kList, kTuple, kMap, kOpaque };
  using Items = std::vector<Nest>;
  using Fields = std::map<std::string, Nest>;

  Nest() = default;                                                          // nothing
  Nest(Tensor tensor) : kind_(Kind::kTensor), tensor_(std::move(tensor)) {}  // NOLINT: implicit
  Nest(HostTensor host) : kind_(Kind::kHost), host_(std::move(host)) {}      // NOLINT: implicit
  static Nest List(Items items) { return Nest(Kind::kList, std::move(items)); }
  static Nest Tuple(Items items) { return Nest(Kind::kTuple, std::move(items)); }
  static Nest Map(Fields fields) {
    Nest nest;
    nest.kind_ = Kind::kMap;
    nest.fields_ = std::move(fields);
    return nest;
  }
  // Anything else: every device gets it as it is.
  static Nest Opaque(std::any value) {
    Nest nest;
    nest.kind_ = Kind::kOpaque;
    nest.opaque_ = std::move(value);
    return nest;
  }

  Kind kind() const { return kind_; }
  const Tensor& tensor() const { return tensor_; }
  const HostTensor& host() const { return host_; }
  const Items& items() const { return items_; }     // of lists and tuples
  const Fields& fields() const { return fields_; }  // of maps
  const std::any& opaque() const { return opaque_; }

 private:
  Nest(Kind kind, Items items) : kind_(kind), items_(std::move(items)) {}

  Kind kind_ = Kind::kNothing;
  Tensor tensor_;
  HostTensor host_;
  Items items_;
  Fields fields_;
  std::any opaque_;
};

// `nest` for each device: its tensors scattered along `dim` by the chunk rule, everything else
// repeated. As many as the tensor with the fewest chunks gives; one for each device where there is
// no tensor. The error of the first tensor that is refused.
absl::StatusOr<std::vector<Nest>> ScatterNest(const Nest& nest, const DeviceGroup& devices,
                                              int64_t dim = 0, CallSite site = CallSite::Here());

// The arguments of a call on each device: as many sets as the longer of both gives, the shorter one
// padded with none. Without any argument: none, for no device.
struct ScatteredInputs {
  std::vector<Nest::Items> inputs;
  std::vector<Nest::Fields> keywords;
};
absl::StatusOr<ScatteredInputs> ScatterInputs(const Nest::Items& inputs,
                                              const Nest::Fields& keywords,
                                              const DeviceGroup& devices, int64_t dim = 0,
                                              CallSite site = CallSite::Here());

// One nest of what devices gave, all of one build: tensors are gathered, nothing stays nothing.
// INVALID_ARGUMENT: other kinds, lengths or keys from one to another, or an opaque value, of which
// nobody knows how to make one.
absl::StatusOr<Nest> GatherNest(const std::vector<Nest>& nests, const DeviceGroup& devices,
                                int destination = 0, int64_t dim = 0,
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

#endif  // CHORUS_CLIENT_PARALLEL_H_
