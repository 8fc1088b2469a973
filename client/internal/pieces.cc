#include "client/internal/pieces.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "chorus/math.h"
#include "client/internal/access.h"
#include "client/internal/errors.h"
#include "client/internal/member.h"
#include "client/internal/tape.h"
#include "client/internal/tensor_data.h"
#include "core/base/error.h"

namespace chorus {
namespace internal {

const std::shared_ptr<SessionCore>& SessionOf(const DeviceGroup& devices) {
  static const auto* const none = new std::shared_ptr<SessionCore>();
  return devices.size() == 0 ? *none : MemberOf(devices.world(0))->session;
}

absl::Status NoDevices(absl::string_view op) {
  return BadType(absl::StrCat(op, ": expected a group of devices, got an empty one"));
}

const TensorType& TypeOf(const Tensor& x) { return ImplOf(x)->data->info->type; }

absl::StatusOr<int> IndexOf(absl::string_view op, absl::string_view what, const Tensor& x,
                            const DeviceGroup& devices) {
  if (!x.defined()) return BadType(absl::StrCat(op, ": ", what, " is an undefined tensor"));
  CHORUS_RETURN_IF_ERROR(x.status());
  if (x.absent()) {
    return BadType(absl::StrCat(op, ": ", what, " is the absent result of another rank"));
  }
  const int index = devices.IndexOf(x.device());
  if (index >= 0) return index;
  if (SessionOf(x.device()) != SessionOf(devices)) {
    return BadType(absl::StrCat(op, ": ", what, " is of another session than the devices"));
  }
  return BadType(absl::StrCat(op, ": ", what, " is on device ", x.device().slot(),
                              " of the session, which is not in the group; CopyTo moves it"));
}

absl::StatusOr<int64_t> AxisOf(absl::string_view op, const TensorType& type, int64_t dim) {
  const int64_t rank = static_cast<int64_t>(type.dims.size());
  if (rank == 0) {
    return BadType(absl::StrCat(op, ": expected at least one dimension, got ", type.ToString()));
  }
  if (dim < -rank || dim >= rank) {
    return BadType(absl::StrCat(op, ": expected a dimension from ", -rank, " to ", rank - 1, " of ",
                                type.ToString(), ", got ", dim));
  }
  return dim < 0 ? dim + rank : dim;
}

absl::StatusOr<std::vector<int64_t>> ChunkSizes(absl::string_view op, int64_t size,
                                                const std::vector<int64_t>& sizes, int devices) {
  if (sizes.empty()) {
    std::vector<int64_t> chunks(static_cast<size_t>(devices), size == 0 ? 0 : -1);
    const int64_t chunk = (size + devices - 1) / devices;
    int64_t left = size;
    for (size_t i = 0; left > 0; ++i) {
      chunks[i] = std::min(chunk, left);
      left -= chunks[i];
    }
    return chunks;
  }
  if (sizes.size() != static_cast<size_t>(devices)) {
    return BadType(absl::StrCat(op, ": expected one size for each of ", devices, " devices, got ",
                                sizes.size()));
  }
  int64_t left = size;
  for (const int64_t chunk : sizes) {
    if (chunk < 0) {
      return BadType(absl::StrCat(op, ": expected sizes of 0 or more, got ", chunk));
    }
    left = chunk > left ? -1 : left - chunk;
    if (left < 0) break;
  }
  if (left != 0) {
    return BadType(absl::StrCat(op, ": expected sizes that make ", size, ", got ",
                                absl::StrJoin(sizes, " + ")));
  }
  return sizes;
}

int64_t CountChunks(const std::vector<int64_t>& chunks) {
  return std::count_if(chunks.begin(), chunks.end(), [](int64_t size) { return size >= 0; });
}

absl::StatusOr<ToGather> CheckGather(const Tensors& xs, const DeviceGroup& devices, int64_t dim,
                                     std::vector<std::string>* warnings, CallSite site) {
  if (devices.size() == 0) return NoDevices("gather");
  if (xs.empty()) return BadType("gather: expected at least one tensor, got none");
  ToGather to;
  to.xs = xs;
  std::vector<bool> taken(static_cast<size_t>(devices.size()), false);
  bool scalars = true;
  for (size_t i = 0; i < xs.size(); ++i) {
    CHORUS_ASSIGN_OR_RETURN(const int index,
                            IndexOf("gather", absl::StrCat("tensor ", i), xs[i], devices));
    if (taken[static_cast<size_t>(index)]) {
      return BadType(absl::StrCat("gather: expected tensors on different devices, got tensor ", i,
                                  " on the device of another"));
    }
    taken[static_cast<size_t>(index)] = true;
    scalars = scalars && xs[i].shape().empty();
  }
  if (scalars && (dim == 0 || dim == -1)) {
    if (warnings != nullptr) {
      warnings->push_back(absl::StrCat(
          "gather: all tensors have no dimensions and are to be gathered along dimension 0: the "
          "result is a vector of ",
          xs.size(), " (", SourceOf(site), ")"));
    }
    for (Tensor& x : to.xs) x = Reshape(x, {1}, site);
  }
  for (const Tensor& x : to.xs) CHORUS_RETURN_IF_ERROR(x.status());
  to.type = TypeOf(to.xs[0]);
  CHORUS_ASSIGN_OR_RETURN(to.axis, AxisOf("gather", to.type, dim));
  const size_t axis = static_cast<size_t>(to.axis);
  int64_t size = 0;
  for (size_t i = 0; i < to.xs.size(); ++i) {
    TensorType type = TypeOf(to.xs[i]);
    if (axis < type.dims.size()) {
      size += type.dims[axis].size;
      type.dims[axis] = to.type.dims[axis];
    }
    if (type != to.type) {
      return BadType(absl::StrCat("gather: expected tensors like ", to.type.ToString(),
                                  " but for dimension ", to.axis, ", got ",
                                  TypeOf(to.xs[i]).ToString(), " as tensor ", i));
    }
  }
  to.type.dims[axis] = Dim(size);
  return to;
}

Tensor Failed(const DeviceGroup& devices, const absl::Status& status, CallSite site) {
  return FailedTensor(SessionOf(devices), WithSource(status, SourceOf(site)));
}
Tensors FailedEverywhere(const DeviceGroup& devices, const absl::Status& status, CallSite site) {
  return Tensors(static_cast<size_t>(std::max(1, devices.size())), Failed(devices, status, site));
}

bool AnyRequiresGrad(const Tensors& xs) {
  return std::any_of(xs.begin(), xs.end(), [](const Tensor& x) { return x.requires_grad(); });
}

}  // namespace internal
}  // namespace chorus
