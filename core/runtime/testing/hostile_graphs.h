// Graphs that are small as bytes, and were or could be much to plan; and honest ones of their kind.
//
// Threads: pure functions. Ownership: plain values. Errors: none.
#ifndef CHORUS_CORE_RUNTIME_TESTING_HOSTILE_GRAPHS_H_
#define CHORUS_CORE_RUNTIME_TESTING_HOSTILE_GRAPHS_H_

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/graph/graph.h"

namespace chorus {
namespace testing {

enum class HostileGraph {
  kSums,             // each partial sum of collectives is used twice, and leads to a collective
  kAllAndOneMore,    // sums, twice as many as collectives, that each need all of them and one more
  kUnneededSums,     // the same, but they are outputs only
  kSumFromTheEnd,    // a sum of independent collectives, the last one first
  kAllAfterAll,      // collectives that each need every one of as many others
  kManyPieces,       // one tensor with pieces for each of 1024 members
  kWideNodes,        // thousands of times one input of sixteen dimensions
  kOutputsOfAChain,  // a long chain of aliases, whose end is all outputs
  kOutputsOfOne,     // one value of sixteen dimensions, which is all outputs
};
inline constexpr HostileGraph kHostileGraphs[] = {
    HostileGraph::kSums,          HostileGraph::kAllAndOneMore,   HostileGraph::kUnneededSums,
    HostileGraph::kSumFromTheEnd, HostileGraph::kAllAfterAll,     HostileGraph::kManyPieces,
    HostileGraph::kWideNodes,     HostileGraph::kOutputsOfAChain, HostileGraph::kOutputsOfOne};
absl::string_view NameOf(HostileGraph kind);

// One with about `size` of what it has much of: collectives, nodes or outputs; a tenth of that of
// nodes with many pieces, and a twentieth of that of wide nodes.
Graph MakeHostileGraph(HostileGraph kind, int size);

}  // namespace testing
}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_TESTING_HOSTILE_GRAPHS_H_
