// Strided client memory: bounds, and the copy that makes it row-major.
//
// Threads: pure functions. Ownership: none. Errors: said at CheckStrided().
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

// Copies the elements `begin` to `end`, counted in row-major order, to where they stand in that
// order; `from` and `to` are where element 0 is. The ranges have passed CheckStrided.
void CopyStrided(const TensorType& type, const std::vector<int64_t>& strides, int64_t begin,
                 int64_t end, const char* from, char* to);

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_STRIDED_H_
