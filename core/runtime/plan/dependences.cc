#include "core/runtime/plan/dependences.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus::planning {

namespace {

IndexedVector<NodeIndex, bool> NodesThatLeadToCollectives(const Graph& graph,
                                                          const ValueTable& values) {
  IndexedVector<NodeIndex, bool> lead(graph.nodes.size(), false);
  for (NodeIndex n = static_cast<NodeIndex>(graph.nodes.size()); n-- > 0;) {
    if (graph.nodes[n].collective.has_value()) lead[n] = true;
    if (!lead[n]) continue;
    for (const ValueIndex v : graph.nodes[n].inputs) {
      if (values.producer(v) >= 0) lead[values.producer(v)] = true;
    }
  }
  return lead;
}

}  // namespace

Dependences::Dependences(const Graph& graph, const ValueTable& values, int64_t max_work)
    : graph_(graph),
      values_(values),
      max_work_(max_work),
      needed_(NodesThatLeadToCollectives(graph, values)),
      sets_(static_cast<size_t>(values.size())),
      uses_(static_cast<size_t>(values.size()), 0) {
  for (NodeIndex n = 0; n < static_cast<NodeIndex>(graph.nodes.size()); ++n) {
    if (!needed_[n]) continue;
    for (const ValueIndex v : graph.nodes[n].inputs) ++uses_[v];
  }
}

int64_t Dependences::MostBytes(const Graph& graph, const ValueTable& values, int64_t max_work) {
  // The leaves of a set are at least half full, but for one, and those above them few.
  constexpr int64_t kBytesOfElement = 10;
  constexpr int64_t kBytesOfSet = 192;
  const IndexedVector<NodeIndex, bool> needed = NodesThatLeadToCollectives(graph, values);
  IndexedVector<ValueIndex, bool> has_set(static_cast<size_t>(values.size()), false);
  int64_t collectives = 0;
  int64_t sets = 0;
  int64_t elements = 0;
  for (NodeIndex n = 0; n < static_cast<NodeIndex>(graph.nodes.size()); ++n) {
    if (!needed[n]) continue;
    const Node& node = graph.nodes[n];
    const auto inputs_with_sets = std::count_if(node.inputs.begin(), node.inputs.end(),
                                                [&](ValueIndex v) -> bool { return has_set[v]; });
    if (inputs_with_sets > 1) {
      ++sets;
      elements += collectives;
    }
    if (node.collective.has_value()) {
      ++sets;
      ++collectives;
    } else if (inputs_with_sets == 0) {
      continue;
    }
    const ValueIndex first = values.first_output(n);
    const auto outputs = static_cast<int32_t>(node.outputs.size());
    for (ValueIndex v = first; v < first + outputs; ++v) has_set[v] = true;
  }
  return sets * kBytesOfSet + std::min(elements, max_work) * kBytesOfElement;
}

absl::Status Dependences::Count(size_t elements) {
  work_ += static_cast<int64_t>(elements);
  if (work_ <= max_work_) return absl::OkStatus();
  return MakeError(Reason::kQuota,
                   absl::StrCat("which of the graph's collectives need which others: expected at "
                                "most ",
                                max_work_, " steps to find it, got ", work_, " or more"));
}

namespace {

// Each set once, in the order in which they came: what is counted must not depend on where they
// happen to stand in memory.
void LeaveOutRepeated(std::vector<Dependences::Set>* sets) {
  if (sets->size() < 2) return;
  absl::flat_hash_set<const void*> sets_before;
  sets->erase(std::remove_if(sets->begin(), sets->end(),
                             [&sets_before](const Dependences::Set& set) {
                               return !sets_before.insert(set.get()).second;
                             }),
              sets->end());
}

}  // namespace

absl::StatusOr<Dependences::Set> Dependences::Take(NodeIndex node,
                                                   absl::Span<const Participation> participations) {
  std::vector<Set> sets;
  for (const ValueIndex v : graph_.nodes[node].inputs) {
    Set& set = sets_[v];
    const bool last_use = --uses_[v] == 0;
    if (set == nullptr) continue;
    sets.push_back(set);
    if (last_use) set = nullptr;
  }
  LeaveOutRepeated(&sets);
  if (sets.empty()) return Set();
  // The others are put into the largest: in its place, where only this node has it left.
  std::swap(sets.back(),
            *std::max_element(sets.begin(), sets.end(),
                              [](const Set& a, const Set& b) { return a->size() < b->size(); }));
  Set result = std::move(sets.back());
  sets.pop_back();
  bool is_changed = false;
  for (const Set& set : sets) {
    CHORUS_RETURN_IF_ERROR(Count(set->size()));
    for (const int32_t x : *set) {
      if (result->contains(x)) continue;
      if (result.use_count() > 1) {
        CHORUS_RETURN_IF_ERROR(Count(result->size()));
        result = std::make_shared<absl::btree_set<int32_t>>(*result);
      }
      result->insert(x);
      is_changed = true;
    }
  }
  // What is as it was has been reduced before.
  if (is_changed) CHORUS_RETURN_IF_ERROR(Reduce(participations, &result));
  return result;
}

// Leaves out what another element waits for itself. Only short sets are worth it: a long one is
// long because its elements are independent.
absl::Status Dependences::Reduce(absl::Span<const Participation> participations, Set* set) {
  constexpr size_t kShort = 16;
  if ((*set)->size() < 2 || (*set)->size() > kShort) return absl::OkStatus();
  CHORUS_RETURN_IF_ERROR(Count((*set)->size() * (*set)->size()));
  const std::vector<int32_t> elements((*set)->begin(), (*set)->end());
  for (const int32_t y : elements) {
    const std::vector<int32_t>& after = participations[y].after;
    for (const int32_t x : elements) {
      if (std::binary_search(after.begin(), after.end(), x)) (*set)->erase(x);
    }
  }
  return absl::OkStatus();
}

void Dependences::Give(NodeIndex node, Set set) {
  if (set == nullptr) return;
  const ValueIndex first = values_.first_output(node);
  const auto outputs = static_cast<int32_t>(graph_.nodes[node].outputs.size());
  for (ValueIndex v = first; v < first + outputs; ++v) {
    if (uses_[v] > 0) sets_[v] = set;
  }
}

void Dependences::GiveOwn(NodeIndex node, int32_t participation) {
  auto single = std::make_shared<absl::btree_set<int32_t>>();
  single->insert(participation);
  Give(node, std::move(single));
}

}  // namespace chorus::planning
