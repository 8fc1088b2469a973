#include "core/runtime/plan/forms.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/memory_account.h"
#include "core/graph/encoding.h"
#include "core/ops/registry.h"
#include "core/runtime/plan/dependences.h"

namespace chorus::planning {
namespace {

absl::Status CheckSlots(const Graph& graph) {
  for (size_t g = 0; g < graph.group_slots.size(); ++g) {
    std::vector<int32_t> slots = graph.group_slots[g].device_slots;
    std::sort(slots.begin(), slots.end());
    if (std::adjacent_find(slots.begin(), slots.end()) != slots.end()) {
      return Unsupported(
          absl::StrCat("group slot ", g,
                       ": two of its members are held on one device slot, where a collective "
                       "of both would wait for itself; give each its own"));
    }
  }
  return absl::OkStatus();
}

int32_t GroupSize(const Graph& graph, const Node& node) {
  return graph.group_slots[node.collective->group_slot].size;
}

// --- What is made of a part of the graph at most ---
//
// With the room that growing lists have: a count from above. Types that go into a plan are copied,
// and encoded, which takes no more.

int64_t MemoryOfType(const TensorType& type) {
  return 2 * (static_cast<int64_t>(sizeof(TensorType)) + MemoryBehind(type));
}
// As a leaf of equal work, or as the operand of a step.
int64_t MemoryToRead(const TensorType& type) {
  return MemoryOfType(type) + static_cast<int64_t>(2 * sizeof(DevicePlan::Location) +
                                                   sizeof(Plan::EqualGroup::Leaf) + 64);
}
// What the schedule knows of it, too.
constexpr int64_t kBytesOfValue =
    sizeof(ValueState) + 2 * sizeof(BufferSpec) + 2 * sizeof(DevicePlan::Location) + 96;
// Rows, the locations in a step and as the plan's operands, and the step's bytes.
constexpr int64_t kBytesOfPiece =
    4 * sizeof(int64_t) + 2 * sizeof(DevicePlan::Location) + 2 * sizeof(Plan::Operand) + 32;

int64_t MemoryToPlan(const Graph& graph, const ValueTable& table, const Node& node,
                     const OpDef& def) {
  // Copied for equal work or as a kernel, again to be encoded, and as bytes.
  int64_t bytes = 3 * (static_cast<int64_t>(sizeof(Node)) + MemoryBehind(node)) +
                  static_cast<int64_t>(2 * sizeof(DevicePlan::Step) + sizeof(NodeState) + 64) +
                  static_cast<int64_t>(node.outputs.size()) * kBytesOfValue;
  for (const ValueIndex v : node.inputs) bytes += MemoryToRead(table.type(v));
  if (!node.collective.has_value()) return bytes;
  const int64_t members = GroupSize(graph, node);
  const int64_t pieces = (def.one_input ? members : static_cast<int64_t>(node.inputs.size())) +
                         (def.one_output ? members : static_cast<int64_t>(node.outputs.size()));
  return bytes + pieces * kBytesOfPiece +
         static_cast<int64_t>(2 * sizeof(Participation) + sizeof(PartLabel) +
                              2 * sizeof(DevicePlan::CollectiveStep) +
                              2 * sizeof(Plan::CollectiveSlot) + 1024);
}

// Of what does not stand in a node.
int64_t MemoryToPlanEnds(const Graph& graph, const ValueTable& table) {
  int64_t bytes = 0;
  for (const GraphInput& input : graph.inputs) {
    bytes += kBytesOfValue + MemoryOfType(input.type);
  }
  // The publisher of an output keeps its type beside it.
  for (const GraphOutput& output : graph.outputs) {
    bytes += static_cast<int64_t>(2 * sizeof(Plan::Output) + 64) +
             MemoryOfType(table.type(output.value));
  }
  return bytes;
}

absl::StatusOr<int64_t> WorkspaceBytes(const PlanState& state, const Node& node) {
  if (state.options.workspace_bytes == nullptr) return 0;
  absl::InlinedVector<const TensorType*, 4> inputs;
  for (const ValueIndex v : node.inputs) inputs.push_back(&state.table.type(v));
  return state.options.workspace_bytes(ViewOf(node, inputs), node.outputs);
}

}  // namespace

absl::StatusOr<int64_t> MemoryToPlan(const Graph& graph, const ValueTable& table,
                                     const PlanLimits& limits) {
  const int64_t most = limits.max_bytes;
  int64_t total = MemoryToPlanEnds(graph, table) +
                  Dependences::MostBytes(graph, table, limits.max_dependence_steps);
  const OpDef* def = nullptr;
  for (size_t n = 0; n < graph.nodes.size() && total <= most; ++n) {
    const Node& node = graph.nodes[n];
    if (n == 0 || graph.nodes[n - 1].op != node.op) def = FindOp(node.op);
    if (def == nullptr) return Unsupported(absl::StrCat("op '", node.op, "' is not run"));
    total += MemoryToPlan(graph, table, node, *def);
  }
  if (total > most) return TooMuchMemory("the graph's plan", most, total);
  return total;
}

absl::Status FindForms(PlanState* state) {
  const Graph& graph = state->graph;
  CHORUS_RETURN_IF_ERROR(CheckSlots(graph));
  CHORUS_RETURN_IF_ERROR(MemoryToPlan(graph, state->table, state->options.limits).status());
  state->nodes.resize(graph.nodes.size());
  for (NodeIndex n = 0; n < state->num_nodes(); ++n) {
    const Node& node = state->node(n);
    NodeState& node_state = state->nodes[n];
    node_state.def =
        n > 0 && state->node(n - 1).op == node.op ? state->nodes[n - 1].def : FindOp(node.op);
    if (node.collective.has_value()) {
      node_state.form = Form::kCollective;
      node_state.pieces = FindPieces(node, *node_state.def, state->table, GroupSize(graph, node));
    } else if (node_state.def->alias == OutputAlias::kInput && !node.inputs.empty()) {
      node_state.form =
          state->table.device_slot(node.inputs[0]) == node.device_slot ? Form::kAlias : Form::kCopy;
    } else {
      CHORUS_ASSIGN_OR_RETURN(node_state.workspace_bytes, WorkspaceBytes(*state, node));
    }
  }
  state->values.resize(static_cast<size_t>(state->table.size()));
  for (ValueIndex v = 0; v < state->table.size(); ++v) state->values[v].root = v;
  return absl::OkStatus();
}

}  // namespace chorus::planning
