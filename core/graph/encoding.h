// A graph as bytes: the form in which it is registered and stored, and by which it is known.
// proto/chorus/v1/graph_encoding.md says what they are, byte by byte.
//
// The bytes come from anywhere. A decoder that believed them would make gigabytes of a few
// megabytes (an empty node is nine bytes, and several hundred in memory), so that what a graph may
// take is checked before anything of that size is made.
//
// Threads: any; pure functions. Ownership: copies. Errors: said at each function.
#ifndef CHORUS_CORE_GRAPH_ENCODING_H_
#define CHORUS_CORE_GRAPH_ENCODING_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/graph/graph.h"

namespace chorus {

// What a decoded graph may be. The defaults are for callers that have no reason to ask for less:
// what is not from a client (plans of this build, tests).
struct DecodeLimits {
  int64_t max_nodes = int64_t{1} << 24;
  int64_t max_bytes = int64_t{1} << 32;  // MemoryOf(graph)
};
// What a daemon takes from its clients, unless its options say otherwise: a hundred thousand nodes
// and more. A fixed number, and none that grows with the bytes: these cost a client nothing.
inline constexpr int64_t kMaxClientGraphBytes = int64_t{64} << 20;

// Canonical bytes. Encoding twice gives equal bytes; Decode(Encode(g)) equals g, but for limits.
std::string EncodeGraph(const Graph& graph);
// Never reads past `bytes`. kMalformed says where it stopped, or what was expected and what came
// where it is more nodes than `limits` have or a source of more than kMaxSourceLineBytes; kVersion
// is for another IR version, kQuota for a graph that would take more memory than `limits` have:
// more than that is never taken. Checks form only: call ValidateGraph (core/ops/validate.h) before
// using what came.
absl::StatusOr<Graph> DecodeGraph(absl::string_view bytes, const DecodeLimits& limits = {});

// 128-bit XXH3 of the canonical bytes without sources.
Hash128 HashGraph(const Graph& graph);

// What a graph takes in memory (core/base/memory_account.h): by this decoding is limited, and
// graphs are charged. Blocks on the heap are the lists that are not empty (inputs, nodes, outputs,
// group slots with their members and slots, size rules; of a node its attributes, inputs, outputs
// and counts; the dims of a type; the numbers of an attribute) and texts that are not short.
int64_t MemoryOf(const Graph& graph);
// Of the graph that is encoded in `bytes`, from above: what no bytes go beyond. Graphs of trainers
// take up to half of it.
int64_t MaxMemoryOf(absl::string_view bytes);
// What they have on the heap; they themselves are part of the list in which they stand.
int64_t MemoryBehind(const TensorType& type);
int64_t MemoryBehind(const Node& node);

// kQuota: `what` takes more than `most` bytes; `got` is as far as it was counted.
absl::Status TooMuchMemory(absl::string_view what, int64_t most, int64_t got);

}  // namespace chorus

#endif  // CHORUS_CORE_GRAPH_ENCODING_H_
