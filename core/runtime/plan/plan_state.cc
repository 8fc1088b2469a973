#include "core/runtime/plan/plan_state.h"

namespace chorus::planning {

PlanState::PlanState(const Graph& graph, const PlanOptions& options)
    : graph(graph), options(options), table(graph) {}

bool PlanState::InOneDomain(const Node& node) const {
  if (!options.one_domain.has_value()) return options.share_results;
  if (!node.collective.has_value()) return options.one_domain->slots;
  return options.one_domain->groups[static_cast<size_t>(node.collective->group_slot)];
}

int NumVisible(const Node& node) {
  return NumVisibleOutputs(*node.collective, static_cast<int>(node.outputs.size()));
}

bool IsFactor(const Node& node, size_t i) {
  return node.collective->reduction == Reduction::kProduct &&
         static_cast<int>(i) >= NumVisible(node);
}

bool IsEqualResult(const Node& node, size_t i) {
  if (HasRuntimeCounts(*node.collective) || static_cast<int>(i) >= NumVisible(node)) return false;
  return GivesEqualResults(node.collective->kind);
}

bool IsSharedResult(const Node& node, size_t i) {
  // Of run-time counts the result alone; what else there is says how many rows it has.
  if (HasRuntimeCounts(*node.collective)) return i == 0 && GivesEqualResults(node.collective->kind);
  return IsEqualResult(node, i);
}

DevicePlan::Location LocationInBuffer(const PlanState& state, ValueIndex v) {
  const ValueState& root = state.root(v);
  DevicePlan::Location location;
  location.buffer = root.buffer;
  location.offset = root.offset;
  if (state.values[v].root != v) location.offset += state.values[v].offset;
  return location;
}

}  // namespace chorus::planning
