// One graph from several of one function, traced at different sizes of its batch.
//
// Threads: any; a plain function of values. Ownership: plain values; the result is a graph of its
//   own. Errors: UnifyGraphs says them.
#ifndef CHORUS_CLIENT_INTERNAL_UNIFY_H_
#define CHORUS_CLIENT_INTERNAL_UNIFY_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/graph/graph.h"

namespace chorus {
namespace internal {

// A dimension of an input that is the batch.
struct VaryingDim {
  int32_t input = 0;
  int32_t dim = 0;
};

// The graph of which `graphs[i]` is what it is at size `sizes[i]` of the batch (core/graph/
// specialize.h). Sizes descend; the first is the maximum, of which the result is. INVALID_ARGUMENT,
// naming the op and its line: they differ in more than integers that are linear in the size.
absl::StatusOr<Graph> UnifyGraphs(absl::Span<const Graph> graphs, absl::Span<const int64_t> sizes,
                                  absl::Span<const VaryingDim> varying);

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_UNIFY_H_
