// Nested values, as models take and give them, for each device of a group and back.
//
// Threads: chorus/parallel.h, which also says what is recorded. Ownership: a Nest holds its values.
// Errors: returned: those of Scatter and Gather, and as each function says.
#ifndef CHORUS_CLIENT_PARALLEL_NEST_H_
#define CHORUS_CLIENT_PARALLEL_NEST_H_

#include <any>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "chorus/call_site.h"
#include "chorus/parallel/device_group.h"
#include "chorus/parallel/host_tensor.h"
#include "chorus/tensor.h"

namespace chorus {
namespace parallel {

// What the inputs and results of a model are made of.
class Nest {
 public:
  enum class Kind { kNothing, kTensor, kHost, kList, kTuple, kMap, kOpaque };
  using Items = std::vector<Nest>;
  using Fields = std::map<std::string, Nest>;

  Nest() = default;                                                          // nothing
  Nest(Tensor tensor) : kind_(Kind::kTensor), tensor_(std::move(tensor)) {}  // implicit
  Nest(HostTensor host) : kind_(Kind::kHost), host_(std::move(host)) {}      // implicit
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

}  // namespace parallel
}  // namespace chorus

#endif  // CHORUS_CLIENT_PARALLEL_NEST_H_
