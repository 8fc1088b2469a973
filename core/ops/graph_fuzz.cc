// Bytes from anywhere: what decodes has one canonical form, and what then passes the check can be
// walked by everything that uses graphs.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "core/base/error.h"
#include "core/base/source_line.h"
#include "core/graph/encoding.h"
#include "core/graph/graph.h"
#include "core/ops/specialize.h"
#include "core/ops/validate.h"

namespace {

void Require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using chorus::Graph;
  const absl::StatusOr<Graph> graph =
      chorus::DecodeGraph(absl::string_view(reinterpret_cast<const char*>(data), size));
  if (!graph.ok()) return 0;
  // It takes what its account says: with less it does not decode, and nothing else ends it.
  chorus::DecodeLimits limits;
  limits.max_nodes = static_cast<int64_t>(graph->nodes.size());
  limits.max_bytes = chorus::MemoryOf(*graph);
  const absl::string_view bytes(reinterpret_cast<const char*>(data), size);
  Require(chorus::DecodeGraph(bytes, limits).ok());
  --limits.max_bytes;
  Require(chorus::ErrorOf(chorus::DecodeGraph(bytes, limits).status()).reason ==
          chorus::Reason::kQuota);
  for (const chorus::Node& node : graph->nodes) {
    Require(node.source.size() <= chorus::kMaxSourceLineBytes);
  }
  const std::string canonical = chorus::EncodeGraph(*graph);
  const absl::StatusOr<Graph> again = chorus::DecodeGraph(canonical);
  Require(again.ok());
  Require(chorus::EncodeGraph(*again) == canonical);
  Require(chorus::HashGraph(*again) == chorus::HashGraph(*graph));
  chorus::DebugString(*graph);

  if (!chorus::ValidateGraph(*graph, chorus::GraphLimits()).ok()) return 0;
  const chorus::ValueTable values(*graph);
  for (size_t n = 0; n < graph->nodes.size(); ++n) {
    for (const chorus::ValueIndex input : graph->nodes[n].inputs) {
      Require(input >= 0 && input < values.first_output(static_cast<int32_t>(n)));
      Require(values.type(input).num_bytes() <= chorus::GraphLimits().max_value_bytes);
    }
  }
  for (const chorus::GraphOutput& output : graph->outputs) {
    Require(values.type(output.value).num_bytes() >= 0);
  }

  // What it is at some sizes; at its largest it is as good as it stands.
  const absl::StatusOr<std::vector<int64_t>> maxima = chorus::CheckSymbols(*graph);
  Require(maxima.ok());
  const absl::StatusOr<Graph> largest = chorus::Specialize(*graph, *maxima);
  Require(largest.ok() && chorus::ValidateGraph(*largest, chorus::GraphLimits()).ok());
  const absl::StatusOr<Graph> least =
      chorus::Specialize(*graph, std::vector<int64_t>(maxima->size(), 1));
  if (least.ok()) (void)chorus::ValidateGraph(*least, chorus::GraphLimits());
  return 0;
}
