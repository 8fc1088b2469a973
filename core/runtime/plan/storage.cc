#include "core/runtime/plan/storage.h"

#include <cstdint>

namespace chorus::planning {
namespace {

// Other ranks may read its operands where they stand, and keep them: those of moves; and of a
// PRODUCT, of which another rank may want a gradient though this one does not.
bool GivesOperands(const PlanState& state, const Node& node) {
  if (!IsReducing(node.collective->kind)) return true;
  return node.collective->reduction == Reduction::kProduct && !node.inputs.empty() &&
         IsFloating(state.table.type(node.inputs[0]).dtype);
}

// The operand whose bytes output `i` of a collective has: of which member, and which of its
// pieces. -1: it has bytes of its own.
struct Source {
  int32_t member = -1;
  int32_t piece = 0;
};
Source SourceOf(const PlanState& state, NodeIndex n, size_t i) {
  const Node& node = state.node(n);
  const OpDef& def = *state.nodes[n].def;
  Source source;
  const Collective& c = *node.collective;
  // Where a piece stands is then only known when the collective runs.
  if (!state.InOneDomain(node) || HasRuntimeCounts(c)) return source;
  if (IsFactor(node, i)) {
    source.member = static_cast<int32_t>(i) - NumVisible(node);
  } else if (def.alias != OutputAlias::kMember || def.one_output) {
    return source;
  } else if (AtRoot(FactsOf(c.kind).in)) {
    source.member = c.root.value();
  } else if (HasPeer(c.kind)) {
    source.member = c.peer.value();
  } else {
    source.member = static_cast<int32_t>(i);
  }
  if (OfEach(FactsOf(c.kind).in)) source.piece = c.rank.value();
  return source;
}

void AliasInput(NodeIndex n, PlanState* state) {
  const ValueState& input = state->values[state->node(n).inputs[0]];
  ValueState& output = state->values[state->output(n, 0)];
  output.root = input.root;
  output.offset = input.offset;
}

void AliasOperands(NodeIndex n, PlanState* state) {
  const Node& node = state->node(n);
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    const Source source = SourceOf(*state, n, i);
    if (source.member < 0) continue;
    ValueState& value = state->values[state->output(n, i)];
    if (source.member != node.collective->rank.value()) {
      value.list_member = source.member;
      value.list_index = source.piece;
      continue;
    }
    const auto piece = static_cast<size_t>(source.piece);
    const bool one = state->nodes[n].def->one_input;
    const ValueState& operand = state->values[node.inputs[one ? 0 : piece]];
    value.root = operand.root;
    value.offset = operand.offset + (one ? state->nodes[n].pieces.InputOffset(piece) : 0);
  }
}

// Operands that local ops make for a single tensor of all ranks' pieces are made in their place
// in it: nothing is left to be moved. Outputs of the graph are not: they would keep all of it.
void PlaceOperandsInResults(PlanState* state) {
  for (NodeIndex n = 0; n < state->num_nodes(); ++n) {
    const Node& node = state->node(n);
    const NodeState& node_state = state->nodes[n];
    if (!node_state.live || node_state.form != Form::kCollective || !node_state.def->one_output ||
        !GivesEqualResults(node.collective->kind) || HasRuntimeCounts(*node.collective)) {
      continue;
    }
    const ValueIndex result = state->output(n, 0);
    const ValueIndex input = node.inputs[0];
    const NodeIndex producer = state->table.producer(input);
    ValueState& operand = state->values[input];
    if (!state->values[result].used || producer < 0 ||
        state->nodes[producer].form != Form::kKernel || operand.root != input ||
        operand.is_output || operand.slice_of >= 0 || state->table.type(input).num_bytes() == 0) {
      continue;
    }
    operand.slice_of = result;
    operand.offset =
        node_state.pieces.OutputOffset(static_cast<size_t>(node.collective->rank.value()));
    state->values[result].counted = true;
  }
}

}  // namespace

void FindLive(PlanState* state) {
  for (const GraphOutput& output : state->graph.outputs) state->values[output.value].used = true;
  for (NodeIndex n = state->num_nodes(); n-- > 0;) {
    const Node& node = state->node(n);
    bool live = node.collective.has_value();
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      live |= state->values[state->output(n, i)].used;
    }
    state->nodes[n].live = live;
    if (!live) continue;
    for (const ValueIndex v : node.inputs) state->values[v].used = true;
  }
}

void FindStorage(PlanState* state) {
  for (NodeIndex n = 0; n < state->num_nodes(); ++n) {
    const Node& node = state->node(n);
    const Form form = state->nodes[n].form;
    switch (form) {
      case Form::kAlias:
        AliasInput(n, state);
        break;
      case Form::kCopy:
        if (state->InOneDomain(node)) AliasInput(n, state);
        break;
      case Form::kCollective:
        AliasOperands(n, state);
        break;
      case Form::kKernel:
        break;
    }
    // Other ranks, or other slots, read it where it stands and may keep it.
    const bool moves =
        form == Form::kCopy || (form == Form::kCollective && GivesOperands(*state, node));
    if (moves && state->nodes[n].live && state->InOneDomain(node)) {
      for (const ValueIndex v : node.inputs) state->root(v).counted = true;
    }
  }
  for (const GraphOutput& output : state->graph.outputs) {
    ValueState& root = state->root(output.value);
    root.counted = true;
    root.is_output = true;
  }
  PlaceOperandsInResults(state);
}

void FindLifetimes(PlanState* state) {
  int32_t position = 0;
  for (const NodeIndex n : state->order) {
    if (state->nodes[n].live && state->nodes[n].form != Form::kAlias) {
      const Node& node = state->node(n);
      for (const ValueIndex v : node.inputs) state->root(v).last_use = position;
      for (size_t i = 0; i < node.outputs.size(); ++i) {
        state->root(state->output(n, i)).last_use = position;
      }
    }
    ++position;
  }
}

}  // namespace chorus::planning
