#include "core/runtime/plan/equal_work.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "core/graph/encoding.h"

namespace chorus::planning {
namespace {

// Local ops whose value other ranks may have as well, in sets that are connected: which node
// stands for each node's set; -1: it is in none.
IndexedVector<NodeIndex, NodeIndex> FindEqualSets(const PlanState& state) {
  IndexedVector<ValueIndex, bool> equal(state.values.size(), false);
  std::fill_n(equal.begin(), state.graph.inputs.size(), true);
  IndexedVector<NodeIndex, NodeIndex> set_of(state.nodes.size(), -1);
  const auto find = [&set_of](NodeIndex n) {
    while (set_of[n] != n) n = set_of[n] = set_of[set_of[n]];
    return n;
  };
  for (NodeIndex n = 0; n < state.num_nodes(); ++n) {
    const Node& node = state.node(n);
    if (state.nodes[n].form == Form::kCollective) {
      for (size_t i = 0; i < node.outputs.size(); ++i) {
        equal[state.output(n, i)] = IsEqualResult(node, i);
      }
      continue;
    }
    if (!state.nodes[n].live || std::any_of(node.inputs.begin(), node.inputs.end(),
                                            [&](ValueIndex v) { return !equal[v]; })) {
      continue;
    }
    set_of[n] = n;
    for (size_t i = 0; i < node.outputs.size(); ++i) equal[state.output(n, i)] = true;
    for (const ValueIndex v : node.inputs) {
      const NodeIndex producer = state.table.producer(v);
      if (producer < 0 || set_of[producer] < 0) continue;
      set_of[find(producer)] = find(n);
    }
  }
  for (NodeIndex n = 0; n < state.num_nodes(); ++n) {
    if (set_of[n] >= 0) set_of[n] = find(n);
  }
  return set_of;
}

// Sees which of the nodes in `set_of` lead to nothing but each other and outputs.
IndexedVector<NodeIndex, bool> FindSharable(const PlanState& state,
                                            const IndexedVector<NodeIndex, NodeIndex>& set_of) {
  IndexedVector<NodeIndex, bool> sharable(state.nodes.size(), false);
  IndexedVector<ValueIndex, bool> used_elsewhere(state.values.size(), false);
  for (NodeIndex n = state.num_nodes(); n-- > 0;) {
    if (!state.nodes[n].live) continue;
    const Node& node = state.node(n);
    bool is_sharable = set_of[n] >= 0;
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      if (used_elsewhere[state.output(n, i)]) is_sharable = false;
    }
    sharable[n] = is_sharable;
    if (is_sharable) continue;
    for (const ValueIndex v : node.inputs) used_elsewhere[v] = true;
  }
  return sharable;
}

// A group as it is collected: a graph of its own, whose inputs are the leaves.
struct Candidate {
  Graph graph;
  std::vector<Plan::EqualGroup::Leaf> leaves;
  absl::flat_hash_map<ValueIndex, ValueIndex> value_ids;  // in `graph`; of leaves: ~index
  ValueIndex next_value_id = 0;
  std::vector<ValueIndex> results;
  std::vector<NodeIndex> kernels;  // that may be left out
  bool after_collective = false;
  int64_t bytes = 0;  // that the kernels read and write
};

void AddLeaf(const PlanState& state, ValueIndex v, Candidate* candidate) {
  Plan::EqualGroup::Leaf leaf;
  const NodeIndex producer = state.table.producer(v);
  if (producer < 0) {
    leaf.input = v;
  } else {
    leaf.participation = state.nodes[producer].participation;
    leaf.index = v - state.table.first_output(producer);
    candidate->after_collective = true;
  }
  GraphInput input;
  input.type = state.table.type(v);
  candidate->graph.inputs.push_back(std::move(input));
  candidate->leaves.push_back(leaf);
}

void AddNode(const PlanState& state, NodeIndex n, bool sharable, Candidate* candidate) {
  const Node& node = state.node(n);
  Node copy = node;
  for (ValueIndex& v : copy.inputs) {
    const auto added =
        candidate->value_ids.emplace(v, ~static_cast<ValueIndex>(candidate->leaves.size()));
    if (added.second) AddLeaf(state, v, candidate);
    v = added.first->second;
  }
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    candidate->value_ids.emplace(state.output(n, i), candidate->next_value_id++);
  }
  candidate->graph.nodes.push_back(std::move(copy));
  if (!sharable || state.nodes[n].form != Form::kKernel) return;
  candidate->kernels.push_back(n);
  for (const ValueIndex v : node.inputs) candidate->bytes += state.table.type(v).num_bytes();
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    const ValueIndex v = state.output(n, i);
    candidate->bytes += node.outputs[i].num_bytes();
    if (state.values[v].is_output) candidate->results.push_back(v);
  }
}

// `work_so_far`: of the candidates that were taken. Beyond a bound each rank does the work itself.
void TakeCandidate(Candidate* candidate, PlanState* state, int64_t* work_so_far) {
  if (!candidate->after_collective || candidate->results.empty() ||
      candidate->bytes < state->options.least_equal_bytes) {
    return;
  }
  // Each run of the plan finds all of them anew, on the node's thread.
  constexpr int64_t kMostWork = 16384;
  constexpr int64_t kWorkOfGroup = 16;  // that of a leaf is 1
  const int64_t work = kWorkOfGroup + static_cast<int64_t>(candidate->leaves.size());
  if (*work_so_far + work > kMostWork) return;
  *work_so_far += work;
  const auto leaves = static_cast<ValueIndex>(candidate->leaves.size());
  for (Node& node : candidate->graph.nodes) {
    for (ValueIndex& v : node.inputs) v = v < 0 ? ~v : v + leaves;
  }
  const auto index = static_cast<int32_t>(state->plan.equal_groups.size());
  Plan::EqualGroup group;
  for (const ValueIndex v : candidate->results) {
    GraphOutput output;
    output.value = candidate->value_ids[v] + leaves;
    candidate->graph.outputs.push_back(output);
    state->values[v].equal_group = index;
    state->values[v].equal_index = static_cast<int32_t>(group.results.size());
    group.results.emplace_back();
  }
  for (const NodeIndex n : candidate->kernels) state->nodes[n].equal_group = index;
  group.hash = HashGraph(candidate->graph);
  group.leaves = std::move(candidate->leaves);
  group.kernels = static_cast<int64_t>(candidate->kernels.size());
  state->plan.equal_groups.push_back(std::move(group));
}

}  // namespace

void FindEqualWork(PlanState* state) {
  const PlanOptions& options = state->options;
  if (!options.share_equal_work || !options.share_results || state->graph.num_device_slots != 1 ||
      state->participations().empty()) {
    return;
  }
  const IndexedVector<NodeIndex, NodeIndex> set_of = FindEqualSets(*state);
  const IndexedVector<NodeIndex, bool> sharable = FindSharable(*state, set_of);
  std::vector<Candidate> candidates;
  absl::flat_hash_map<NodeIndex, size_t> candidate_of;  // by set
  for (NodeIndex n = 0; n < state->num_nodes(); ++n) {
    if (!sharable[n] || state->nodes[n].form != Form::kKernel) continue;
    if (candidate_of.emplace(set_of[n], candidates.size()).second) candidates.emplace_back();
  }
  for (NodeIndex n = 0; n < state->num_nodes(); ++n) {
    const auto candidate = candidate_of.find(set_of[n]);
    if (candidate != candidate_of.end())
      AddNode(*state, n, sharable[n], &candidates[candidate->second]);
  }
  int64_t work = 0;
  for (Candidate& candidate : candidates) TakeCandidate(&candidate, state, &work);
}

}  // namespace chorus::planning
