#include "core/runtime/plan/collective_step.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace chorus::planning {
namespace {

DevicePlan::RuntimeCounts RuntimeOf(const Node& node, const CollectivePieces& pieces) {
  const Collective& c = *node.collective;
  DevicePlan::RuntimeCounts runtime;
  runtime.row_elements = pieces.row_elements;
  if (!pieces.inputs.empty()) runtime.input_rows = pieces.inputs[0];
  if (!pieces.outputs.empty()) runtime.output_rows = pieces.outputs[0];
  const int counts = static_cast<int>(node.inputs.size()) - c.runtime_counts_input -
                     (c.reduction == Reduction::kPremulSum ? 1 : 0);
  runtime.sends = !pieces.inputs.empty();
  runtime.receives = counts > (runtime.sends ? 1 : 0);
  runtime.received = !pieces.outputs.empty();
  runtime.source = node.source;
  return runtime;
}

void SetCounts(const CollectivePieces& pieces, DevicePlan::CollectiveStep* step) {
  step->count = pieces.dims.empty() ? 1 : pieces.dims[0] * pieces.row_elements;
  const auto differ = [&](const std::vector<int64_t>& rows) {
    return std::any_of(rows.begin(), rows.end(), [&](int64_t n) { return n != pieces.dims[0]; });
  };
  const auto elements = [&](const std::vector<int64_t>& rows) {
    std::vector<int64_t> counts;
    for (const int64_t n : rows) counts.push_back(n * pieces.row_elements);
    return counts;
  };
  if (pieces.dims.empty()) return;
  if (differ(pieces.inputs)) step->input_counts = elements(pieces.inputs);
  if (differ(pieces.outputs)) step->output_counts = elements(pieces.outputs);
}

}  // namespace

int32_t PeerInPair(const Collective& collective) {
  return collective.peer < collective.rank ? 0 : 1;
}

DevicePlan::CollectiveStep CollectiveStepOf(const Node& node, const CollectivePieces& pieces) {
  const Collective& c = *node.collective;
  DevicePlan::CollectiveStep step;
  step.kind = c.kind;
  step.reduction = c.reduction;
  step.root = HasPeer(c.kind) ? PeerInPair(c) : c.root.value();
  step.dtype = pieces.dtype;
  step.num_inputs = static_cast<int32_t>(pieces.inputs.size());
  step.num_outputs = static_cast<int32_t>(pieces.outputs.size());
  if (HasRuntimeCounts(c)) {
    step.runtime = RuntimeOf(node, pieces);
  } else {
    SetCounts(pieces, &step);
  }
  return step;
}

}  // namespace chorus::planning
