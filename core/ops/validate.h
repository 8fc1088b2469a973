// The check that stands between a graph from anywhere and everything that uses it.
//
// Client and daemon link the same check, so that a bad call is refused with the same text in both.
//
// Threads: any; a pure function. Ownership: none. Errors: said at ValidateGraph().
#ifndef CHORUS_CORE_OPS_VALIDATE_H_
#define CHORUS_CORE_OPS_VALIDATE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "core/graph/graph.h"

namespace chorus {

struct GraphLimits {
  int64_t max_nodes = 1 << 20;
  // A run votes on all of them at once.
  int64_t max_collectives = 1 << 11;
  // A run's inputs are found, counted and given to its devices, all of them at once.
  int64_t max_inputs = 1 << 14;
  // A run's results are named, placed, published or failed, each of these for all of them at once.
  int64_t max_outputs = 1 << 12;
  int64_t max_values = 1 << 22;  // inputs and outputs of nodes together
  int64_t max_value_bytes = int64_t{1} << 33;
  int32_t max_device_slots = 64;
  int32_t max_group_slots = 64;
  int32_t max_group_size = 1024;
};

// Checks everything that can be checked without a run: indices, program order, device slots, each
// op's shape rule, collectives against their group slots, aliasing. INVALID_ARGUMENT says which
// node (with its op and source), what was expected and what came; its Error has op, source,
// expected and got apart. UNIMPLEMENTED for the whole-but-not-yet parts: ops and dtypes that
// this build does not run, another IR version. RESOURCE_EXHAUSTED (kOutOfMemory): a value of more
// than max_value_bytes. Of a graph with symbols, what it is where they are at their maxima
// (core/ops/specialize.h). Reads nothing out of bounds, whatever the graph holds.
absl::Status ValidateGraph(const Graph& graph, const GraphLimits& limits);

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_VALIDATE_H_
