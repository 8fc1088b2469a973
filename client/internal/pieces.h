// What functions on tensors of a DeviceGroup have in common: where tensors are, how they are cut
// into pieces, and how such a call fails.
//
// Threads: any; plain functions. Ownership: results are handles and copies.
// Errors: INVALID_ARGUMENT kBadType, naming the op; of a tensor that has failed its own.
#ifndef CHORUS_CLIENT_INTERNAL_PIECES_H_
#define CHORUS_CLIENT_INTERNAL_PIECES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "chorus/call_site.h"
#include "chorus/parallel/device_group.h"
#include "chorus/session.h"
#include "chorus/tensor.h"
#include "core/tensor/type.h"

namespace chorus {
namespace internal {

using parallel::DeviceGroup;
using Tensors = std::vector<Tensor>;

// Null: of no devices.
const std::shared_ptr<SessionCore>& SessionOf(const DeviceGroup& devices);
absl::Status NoDevices(absl::string_view op);
// Of a usable tensor.
const TensorType& TypeOf(const Tensor& x);
// Where a tensor is in the group; what is wrong with it if it is nowhere there. Names it by `what`.
absl::StatusOr<int> IndexOf(absl::string_view op, absl::string_view what, const Tensor& x,
                            const DeviceGroup& devices);
// A dimension of a type, counted from the front; negative ones come from the end.
absl::StatusOr<int64_t> AxisOf(absl::string_view op, const TensorType& type, int64_t dim);
// The sizes of the chunks of `size`, one for each device; at the end of those of the chunk rule,
// devices without a chunk have -1.
absl::StatusOr<std::vector<int64_t>> ChunkSizes(absl::string_view op, int64_t size,
                                                const std::vector<int64_t>& sizes, int devices);
int64_t CountChunks(const std::vector<int64_t>& chunks);

// What is gathered, checked; tensors of no dimensions have become rows.
struct ToGather {
  Tensors xs;
  int64_t axis = 0;
  TensorType type;  // of the whole
};
absl::StatusOr<ToGather> CheckGather(const Tensors& xs, const DeviceGroup& devices, int64_t dim,
                                     std::vector<std::string>* warnings, CallSite site);

Tensor Failed(const DeviceGroup& devices, const absl::Status& status, CallSite site);
Tensors FailedEverywhere(const DeviceGroup& devices, const absl::Status& status, CallSite site);
bool AnyRequiresGrad(const Tensors& xs);

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_PIECES_H_
