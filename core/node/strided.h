// Strided client memory: bounds, and the copies that make it row-major, and back.
//
// Threads: pure functions. Ownership: none. Errors: said at each function.
#ifndef CHORUS_CORE_NODE_STRIDED_H_
#define CHORUS_CORE_NODE_STRIDED_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/tensor/type.h"

namespace chorus::node {

struct StridedExtent {
  bool contiguous = false;  // row-major without gaps: no copy is needed to read it
  // What a copy of all of it takes, in pieces (core/base/work.h): of the bytes, of elements that
  // are apart, of rows, and most of all of pages, which the client may have made anew.
  int64_t work = 0;
};

// Checks that every element of `type` at `strides` (elements; empty: row-major; 0 repeats, negative
// is refused) from byte `offset` lies inside `arena_bytes`. INVALID_ARGUMENT otherwise.
absl::StatusOr<StridedExtent> CheckStrided(const TensorType& type,
                                           const std::vector<int64_t>& strides, int64_t offset,
                                           int64_t arena_bytes);

// INVALID_ARGUMENT where elements may share memory, so that it cannot be written. The strides have
// passed CheckStrided. (Some that interleave without meeting are refused as well.)
absl::Status CheckNoOverlap(const TensorType& type, const std::vector<int64_t>& strides);

// Copies the elements `begin` to `end`, counted in row-major order, to where they stand in that
// order; `from` and `to` are where element 0 is. The ranges have passed CheckStrided.
void CopyStrided(const TensorType& type, const std::vector<int64_t>& strides, int64_t begin,
                 int64_t end, const char* from, char* to);
// The other way: from where they stand in row-major order to where the strides put them. They have
// passed CheckNoOverlap, too. Row-major ranges may overlap each other.
void SpreadStrided(const TensorType& type, const std::vector<int64_t>& strides, int64_t begin,
                   int64_t end, const char* from, char* to);

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_STRIDED_H_
