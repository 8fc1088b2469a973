#include "core/runtime/plan/order.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "core/base/error.h"
#include "core/collective/order.h"

namespace chorus::planning {
namespace {

// Enqueues nodes one after the other; each once.
class Orderer {
 public:
  explicit Orderer(PlanState* state)
      : state_(*state), instances_(state->plan.instances), emitted_(state->nodes.size(), false) {
    state_.order.reserve(state_.nodes.size());
  }

  absl::Status Run() {
    if (!state_.options.order.empty()) return FollowOrder();
    if (!instances_.empty() && FollowProgram()) return absl::OkStatus();
    for (NodeIndex n = 0; n < state_.num_nodes(); ++n) Emit(n);
    return absl::OkStatus();
  }

 private:
  NodeIndex NodeOf(int32_t participation) const {
    return state_.participations()[participation].node;
  }
  bool AreOne(int32_t a, int32_t b) const {
    return a == b || (!instances_.empty() && instances_[a] == instances_[b]);
  }

  void Emit(NodeIndex n) {
    emitted_[n] = true;
    state_.order.push_back(n);
  }

  // Program order, but that nothing stands between the members' calls of one instance: what they
  // need comes before all of them. False: they wait for each other in a circle, and a run in which
  // they are of one instance is refused when it votes.
  bool FollowProgram() {
    // A node, or for calls the first of their instance, stands for all of them.
    IndexedVector<NodeIndex, NodeIndex> stands_for(state_.nodes.size());
    std::iota(stands_for.begin(), stands_for.end(), 0);
    std::vector<std::vector<int32_t>> members(instances_.size());
    for (size_t p = 0; p < instances_.size(); ++p) {
      members[instances_[p]].push_back(static_cast<int32_t>(p));
      stands_for[NodeOf(static_cast<int32_t>(p))] = NodeOf(instances_[p]);
    }
    std::vector<OrderEdge> edges;
    for (NodeIndex n = 0; n < state_.num_nodes(); ++n) {
      for (const ValueIndex v : state_.node(n).inputs) {
        const NodeIndex producer = state_.table.producer(v);
        if (producer >= 0) edges.push_back({stands_for[producer], stands_for[n]});
      }
    }
    std::vector<int32_t> rank(state_.nodes.size());
    std::iota(rank.begin(), rank.end(), 0);
    std::vector<int32_t> sorted;
    if (!TopologicalOrder(rank, edges, &sorted)) return false;
    for (const NodeIndex n : sorted) {
      if (stands_for[n] != n) continue;
      const int32_t p = state_.nodes[n].participation;
      if (p < 0) {
        Emit(n);
        continue;
      }
      for (const int32_t member : members[p]) Emit(NodeOf(member));
    }
    return true;
  }

  absl::Status FollowOrder() {
    const std::vector<int32_t>& order = state_.options.order;
    CHORUS_RETURN_IF_ERROR(CheckIsPermutation(order));
    std::vector<bool> complete(order.size(), false);  // by the instance's first
    for (size_t begin = 0; begin < order.size();) {
      size_t end = begin + 1;
      while (end < order.size() && AreOne(order[begin], order[end])) ++end;
      if (!instances_.empty()) {
        const int32_t instance = instances_[order[begin]];
        if (complete[instance]) {
          return Malformed(absl::StrCat("the order parts participation ", order[begin], " from ",
                                        instance, ", which is of the same instance"));
        }
        complete[instance] = true;
      }
      CHORUS_RETURN_IF_ERROR(EmitInstance(absl::MakeSpan(order).subspan(begin, end - begin)));
      begin = end;
    }
    for (NodeIndex n = 0; n < state_.num_nodes(); ++n) {
      if (!emitted_[n]) Emit(n);
    }
    return absl::OkStatus();
  }

  absl::Status CheckIsPermutation(const std::vector<int32_t>& order) const {
    const size_t count = state_.participations().size();
    if (order.size() != count) {
      return Malformed(
          absl::StrCat("an order of ", order.size(), " collectives for a run of ", count));
    }
    std::vector<bool> is_chosen(count, false);
    for (const int32_t p : order) {
      if (p < 0 || static_cast<size_t>(p) >= count) {
        return Malformed(absl::StrCat("participation ", p, " in an order of ", count));
      }
      if (is_chosen[p])
        return Malformed(absl::StrCat("participation ", p, " is twice in the order"));
      is_chosen[p] = true;
    }
    return absl::OkStatus();
  }

  // The calls of one instance, with nothing between them.
  absl::Status EmitInstance(absl::Span<const int32_t> participations) {
    for (const int32_t p : participations) CHORUS_RETURN_IF_ERROR(EmitNeedsOf(p));
    for (const int32_t p : participations) Emit(NodeOf(p));
    return absl::OkStatus();
  }

  // What a call needs and is not there yet.
  absl::Status EmitNeedsOf(int32_t p) {
    const NodeIndex target = NodeOf(p);
    std::vector<std::pair<NodeIndex, size_t>> stack;  // node, next input to look at
    stack.emplace_back(target, 0);
    while (!stack.empty()) {
      auto& [n, next] = stack.back();
      const Node& node = state_.node(n);
      if (next < node.inputs.size()) {
        const NodeIndex producer = state_.table.producer(node.inputs[next++]);
        if (producer < 0 || emitted_[producer]) continue;
        if (state_.node(producer).collective.has_value()) {
          return Malformed(absl::StrCat("the order puts participation ", p, " before ",
                                        state_.nodes[producer].participation,
                                        ", whose result it needs"));
        }
        stack.emplace_back(producer, 0);
      } else {
        if (n != target && !emitted_[n]) Emit(n);
        stack.pop_back();
      }
    }
    return absl::OkStatus();
  }

  PlanState& state_;
  const std::vector<int32_t>& instances_;  // by participation
  IndexedVector<NodeIndex, bool> emitted_;
};

// A donated input is not written before everything else is complete: the last collective, and
// whatever may fail. So what may be written there, and what needs it, comes at the very end,
// unless a collective needs it.
void PutOffWriters(PlanState* state) {
  const Graph& graph = state->graph;
  if (graph.num_device_slots != 1 ||
      std::none_of(graph.outputs.begin(), graph.outputs.end(),
                   [](const GraphOutput& output) { return output.may_alias >= 0; })) {
    return;
  }
  IndexedVector<NodeIndex, bool> is_needed(state->nodes.size(), false);  // by a collective
  for (NodeIndex n = state->num_nodes(); n-- > 0;) {
    const Node& node = state->node(n);
    if (!is_needed[n] && !node.collective.has_value()) continue;
    is_needed[n] = true;
    for (const ValueIndex v : node.inputs) {
      if (state->table.producer(v) >= 0) is_needed[state->table.producer(v)] = true;
    }
  }
  for (const GraphOutput& output : graph.outputs) {
    const NodeIndex producer = state->table.producer(output.value);
    if (output.may_alias < 0 || producer < 0 || is_needed[producer]) continue;
    state->nodes[producer].put_off = true;
  }
  for (NodeIndex n = 0; n < state->num_nodes(); ++n) {
    for (const ValueIndex v : state->node(n).inputs) {
      const NodeIndex producer = state->table.producer(v);
      if (producer < 0 || is_needed[n]) continue;
      if (state->nodes[producer].put_off) state->nodes[n].put_off = true;
    }
  }
  const auto middle = std::stable_partition(state->order.begin(), state->order.end(),
                                            [&](NodeIndex n) { return !state->nodes[n].put_off; });
  std::sort(middle, state->order.end());  // one order, whatever that of the collectives
}

}  // namespace

absl::Status ChooseOrder(PlanState* state) {
  CHORUS_RETURN_IF_ERROR(Orderer(state).Run());
  PutOffWriters(state);
  return absl::OkStatus();
}

}  // namespace chorus::planning
