#include "core/runtime/plan/outputs.h"

#include <cstdint>
#include <numeric>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "core/ops/node_spec.h"
#include "core/ops/op.h"

namespace chorus::planning {
namespace {

// Whether the node may fail for what it reads.
bool MayFail(const PlanState& state, NodeIndex n) {
  const Node& node = state.node(n);
  absl::InlinedVector<const TensorType*, 4> types;
  for (const ValueIndex v : node.inputs) types.push_back(&state.table.type(v));
  return chorus::MayFail(*state.nodes[n].def, ViewOf(node, types));
}

// Where nodes stand in the order.
struct Positions {
  IndexedVector<NodeIndex, int32_t> of;
  // The last that may fail of those that are put off behind all others; -1: none. What stands
  // before it has been written when it fails.
  int32_t last_that_may_fail = -1;
};
Positions PositionsOf(const PlanState& state) {
  Positions positions;
  positions.of = IndexedVector<NodeIndex, int32_t>(state.nodes.size());
  int32_t position = 0;
  for (const NodeIndex n : state.order) {
    const NodeState& node = state.nodes[n];
    if (node.put_off && node.live && MayFail(state, n)) positions.last_that_may_fail = position;
    positions.of[n] = position++;
  }
  return positions;
}

// Whether an output may be written where the input stands that it may alias.
bool MayTakeOver(const PlanState& state, const Positions& positions, const GraphOutput& output) {
  if (output.may_alias < 0 || state.graph.num_device_slots != 1) return false;
  const ValueState& value = state.values[output.value];
  const ValueState& input = state.values[output.may_alias];
  const TensorType& type = state.table.type(output.value);
  const NodeIndex producer = state.table.producer(output.value);
  // Counted inputs are read by other ranks, which may keep them, or are outputs themselves.
  if (value.root != output.value || value.takes_over || producer < 0 || input.counted ||
      state.nodes[producer].form != Form::kKernel ||
      type.num_bytes() != state.table.type(output.may_alias).num_bytes()) {
    return false;
  }
  if (!state.nodes[producer].put_off) return false;
  // Local ops run in their order: other readers of the input must come before, and what may fail.
  // (A writer that may would fail on one rank when the others write.)
  const int32_t writes = positions.of[producer];
  if (writes <= positions.last_that_may_fail) return false;
  if (input.last_use < writes) return true;
  if (input.last_use > writes || !state.nodes[producer].def->elementwise) return false;
  for (const ValueIndex v : state.node(producer).inputs) {
    if (state.values[v].root == output.may_alias && state.table.type(v) != type) return false;
  }
  return true;
}

// Which value each one is, if it is nothing but another one's alias.
IndexedVector<ValueIndex, ValueIndex> FindOrigins(const PlanState& state) {
  IndexedVector<ValueIndex, ValueIndex> origin(state.values.size());
  std::iota(origin.begin(), origin.end(), 0);
  for (NodeIndex n = 0; n < state.num_nodes(); ++n) {
    if (state.nodes[n].form == Form::kAlias) {
      origin[state.output(n, 0)] = origin[state.node(n).inputs[0]];
    }
  }
  return origin;
}

// Whether other ranks may have the same value as `origin`.
void NoteOrigin(const PlanState& state, ValueIndex origin, Plan::Output* output) {
  const NodeIndex producer = state.table.producer(origin);
  if (producer < 0) return;
  const int32_t index = origin - state.table.first_output(producer);
  if (state.values[origin].equal_group >= 0) {
    output->equal_group = state.values[origin].equal_group;
    output->index = state.values[origin].equal_index;
  } else if (state.nodes[producer].form == Form::kCollective && state.options.share_results &&
             IsEqualResult(state.node(producer), static_cast<size_t>(index))) {
    output->participation = state.nodes[producer].participation;
    output->index = index;
  }
}

// Which outputs have their memory alone.
void FindSole(Plan* plan) {
  // What reads or names a buffer behind the run: outputs, and other ranks its operands.
  IndexedVector<BufferIndex, int32_t> readers(plan->buffers.size(), 0);
  const auto count = [&readers](BufferIndex buffer) {
    if (buffer >= 0) ++readers[buffer];
  };
  for (const Plan::Output& output : plan->outputs) count(output.buffer);
  for (const std::vector<Plan::Operand>& operands : plan->operands) {
    for (const Plan::Operand& operand : operands) count(operand.buffer);
  }
  for (Plan::Output& output : plan->outputs) {
    output.sole = output.buffer >= 0 && output.offset == 0 && readers[output.buffer] == 1 &&
                  plan->buffers[output.buffer].kind == BufferSpec::Kind::kOwned;
  }
}

}  // namespace

void ChooseDonors(PlanState* state) {
  const Positions positions = PositionsOf(*state);
  for (const GraphOutput& output : state->graph.outputs) {
    state->plan.outputs.emplace_back();
    if (!MayTakeOver(*state, positions, output)) continue;
    state->plan.outputs.back().donor = output.may_alias;
    state->values[output.value].takes_over = true;
  }
}

void PlaceOutputs(PlanState* state) {
  const IndexedVector<ValueIndex, ValueIndex> origins = FindOrigins(*state);
  for (size_t i = 0; i < state->plan.outputs.size(); ++i) {
    const ValueIndex v = state->graph.outputs[i].value;
    const DevicePlan::Location at = LocationInBuffer(*state, v);
    Plan::Output& output = state->plan.outputs[i];
    output.buffer = at.buffer;
    output.offset = at.offset;
    output.bytes = state->table.type(v).num_bytes();
    output.device_slot = state->table.device_slot(v);
    NoteOrigin(*state, origins[v], &output);
  }
  // On several devices one may read what another has, and who waits for an output waits for its
  // own device alone.
  if (state->graph.num_device_slots == 1) FindSole(&state->plan);
}

}  // namespace chorus::planning
