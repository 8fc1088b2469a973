// Graphs with sizes that a run fixes: what is wrong with one, and what it is at given sizes.
//
// In such a graph a dimension of an input may be a symbol, with a maximum (core/tensor/type.h). All
// else stands in it as it is where every symbol is at its maximum: the types of nodes, attributes,
// counts. Graph::sizes lists the numbers among these that depend on a symbol, and how. So a graph
// can be checked, planned and admitted at its largest, and at other sizes it is a pure function of
// the graph and the sizes.
//
// Threads: pure functions. Ownership: copies. Errors: said at each function.
#ifndef CHORUS_CORE_OPS_SPECIALIZE_H_
#define CHORUS_CORE_OPS_SPECIALIZE_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/graph/graph.h"

namespace chorus {

// The maximum of each symbol, by number; empty: the graph has none. INVALID_ARGUMENT: symbols that
// are not numbered from 0, without a gap, with one maximum each of at least 1; rules of
// Graph::sizes that name what is not there, twice or out of order, or that do not give at the
// maxima what stands in the graph.
absl::StatusOr<std::vector<int64_t>> CheckSymbols(const Graph& graph);

// The graph where symbol i has size sizes[i]: without symbols and rules, the types of all nodes
// inferred again. `graph` has passed CheckSymbols. INVALID_ARGUMENT: a size that is not from 1 to
// its maximum, or at which a node cannot be; names the node and its source.
absl::StatusOr<Graph> Specialize(const Graph& graph, absl::Span<const int64_t> sizes);

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SPECIALIZE_H_
