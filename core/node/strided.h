// Strided client memory: bounds, and the copy that makes it row-major. Pure functions.
#ifndef CHORUS_CORE_NODE_STRIDED_H_
#define CHORUS_CORE_NODE_STRIDED_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "core/tensor/type.h"

namespace chorus::node {

struct StridedExtent {
  bool contiguous = false;  // row-major without gaps: no copy is needed to read it
};

// Checks that every element of `type` at `strides` (elements; empty: row-major; 0 repeats, negative
// is refused) from byte `offset` lies inside `arena_bytes`. INVALID_ARGUMENT otherwise.
absl::StatusOr<StridedExtent> CheckStrided(const TensorType& type,
                                           const std::vector<int64_t>& strides, int64_t offset,
                                           int64_t arena_bytes);

// Copies the elements from `from` (the first element) to `to` in row-major order. The ranges have
// passed CheckStrided.
void CopyStrided(const TensorType& type, const std::vector<int64_t>& strides, const char* from,
                 char* to);

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_STRIDED_H_
