#include "core/runtime/plan/placement.h"

#include <cstdint>
#include <vector>

namespace chorus::planning {
namespace {

// Reductions are computed whether or not this rank uses them; what only moves, and extras, are
// not asked for.
bool MustBeWritten(const Node& node, size_t i) {
  return IsReducing(node.collective->kind) && static_cast<int>(i) < NumVisible(node);
}

BufferSpec SpecOf(const PlanState& state, BufferSpec::Kind kind, ValueIndex v) {
  BufferSpec spec;
  spec.kind = kind;
  spec.device_slot = state.table.device_slot(v);
  spec.bytes = state.table.type(v).num_bytes();
  return spec;
}

void AddBuffer(const BufferSpec& spec, ValueIndex v, PlanState* state) {
  state->values[v].buffer = state->plan.buffers.push_back(spec);
}

// Output `i` of a live node, which is the root of its memory.
void PlaceOutput(NodeIndex n, size_t i, PlanState* state) {
  const Node& node = state->node(n);
  const NodeState& node_state = state->nodes[n];
  const ValueIndex v = state->output(n, i);
  ValueState& value = state->values[v];
  const bool of_collective = node_state.form == Form::kCollective;
  if (value.list_member >= 0) {
    if (!value.used) return;
    BufferSpec spec = SpecOf(*state, BufferSpec::Kind::kPeer, v);
    spec.index = node_state.participation;
    spec.list_member = value.list_member;
    spec.list_index = value.list_index;
    AddBuffer(spec, v, state);
  } else if (value.used && of_collective && state->options.share_results &&
             IsSharedResult(node, i)) {
    BufferSpec spec = SpecOf(*state, BufferSpec::Kind::kShared, v);
    spec.index = node_state.participation;
    // Members that have the pieces as a list may meet others that have them in one tensor.
    spec.list_index = node_state.def->one_output ? -1 : static_cast<int32_t>(i);
    AddBuffer(spec, v, state);
  } else if (value.counted) {
    AddBuffer(SpecOf(*state, BufferSpec::Kind::kOwned, v), v, state);
  } else if (value.used || !of_collective || MustBeWritten(node, i)) {
    value.in_workspace = true;
  }
}

// --- Staging memory ---

// Each element is read once. Backward needs more of the others, and of the same bytes.
bool ReadsOnce(const Node& node) {
  switch (node.collective->reduction) {
    case Reduction::kSum:
    case Reduction::kAvg:
    case Reduction::kPremulSum:
      return true;
    default:
      return false;
  }
}

struct StagingUse {
  bool reduced = false;
  bool other = false;
  int32_t copies = 0;
};

void CountStagingUses(const PlanState& state, NodeIndex n, std::vector<StagingUse>* uses) {
  const Node& node = state.node(n);
  const NodeState& node_state = state.nodes[n];
  if (node_state.form == Form::kAlias) return;  // those that read the alias count
  for (const ValueIndex v : node.inputs) {
    const ValueIndex root = state.values[v].root;
    if (static_cast<size_t>(root) >= uses->size()) continue;
    StagingUse& use = (*uses)[root];
    if (node_state.def->input_use == InputUse::kReductionOperand &&
        IsFloating(state.table.type(v).dtype) && ReadsOnce(node)) {
      use.reduced = true;
    } else if (node_state.form == Form::kCopy && !state.InOneDomain(node)) {
      ++use.copies;
    } else {
      use.other = true;
    }
  }
}

std::vector<bool> FindStagingInputs(const PlanState& state) {
  std::vector<StagingUse> uses(state.graph.inputs.size());
  for (NodeIndex n = 0; n < state.num_nodes(); ++n) {
    if (state.nodes[n].live) CountStagingUses(state, n, &uses);
  }
  std::vector<bool> may_be_staging;
  for (const StagingUse& use : uses) {
    const auto input = static_cast<ValueIndex>(may_be_staging.size());
    may_be_staging.push_back(!state.values[input].is_output && !use.other &&
                             (use.copies == 0 || (use.copies == 1 && !use.reduced)));
  }
  return may_be_staging;
}

}  // namespace

void PlaceValues(PlanState* state) {
  for (ValueIndex v = 0; v < static_cast<ValueIndex>(state->graph.inputs.size()); ++v) {
    BufferSpec spec = SpecOf(*state, BufferSpec::Kind::kInput, v);
    spec.index = v;
    AddBuffer(spec, v, state);
  }
  for (NodeIndex n = 0; n < state->num_nodes(); ++n) {
    if (!state->nodes[n].live) continue;
    for (size_t i = 0; i < state->node(n).outputs.size(); ++i) {
      const ValueIndex v = state->output(n, i);
      const ValueState& value = state->values[v];
      if (value.root == v && value.slice_of < 0) PlaceOutput(n, i, state);
    }
  }
  for (ValueState& value : state->values) {
    if (value.slice_of >= 0) value.buffer = state->values[value.slice_of].buffer;
    if (value.equal_group >= 0) {
      state->plan.equal_groups[value.equal_group].results[value.equal_index] = value.buffer;
    }
  }
  state->plan.input_may_be_staging = FindStagingInputs(*state);
}

}  // namespace chorus::planning
