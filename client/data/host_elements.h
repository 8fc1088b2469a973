// Of tensors in the trainer's memory, for datasets, readers and batches.
//
// Threads: any; pure functions. Ownership: none. Errors: as each says.
#ifndef CHORUS_CLIENT_DATA_HOST_ELEMENTS_H_
#define CHORUS_CLIENT_DATA_HOST_ELEMENTS_H_

#include <cstdint>
#include <functional>
#include <numeric>

#include "absl/status/status.h"
#include "chorus/parallel/host_tensor.h"
#include "core/base/error.h"

namespace chorus {
namespace data {

// What a byte of Deflate's gives at most: a longest match, 258 bytes, takes two bits.
inline constexpr int64_t kMostInflated = 1032;
// TensorType::Validate with it, where sizes are compared with a file's afterwards.
inline constexpr int64_t kNoOverflow = int64_t{1} << 62;

// Of a shape that has been found sound.
inline int64_t ElementsOf(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// The error that it carries; INVALID_ARGUMENT kBadType where its elements are not in memory yet.
inline absl::Status CheckInPlace(const parallel::HostTensor& tensor) {
  CHORUS_RETURN_IF_ERROR(tensor.status());
  if (tensor.bytes() != nullptr || ElementsOf(tensor.shape()) == 0) return absl::OkStatus();
  return BadType("a tensor that is gathered from devices: read it first");
}

}  // namespace data
}  // namespace chorus

#endif  // CHORUS_CLIENT_DATA_HOST_ELEMENTS_H_
