// On which participations each value of a graph depends, without another one in between.
//
// What a run votes for says which of its collectives need which others. That can be as many pairs
// as there are collectives, squared: it is counted, and ends where it would be too much.
//
// Threads: thread-compatible. Ownership: refers to the graph and its values. Errors: kQuota.
#ifndef CHORUS_CORE_RUNTIME_PLAN_DEPENDENCES_H_
#define CHORUS_CORE_RUNTIME_PLAN_DEPENDENCES_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/base/indexed_vector.h"
#include "core/collective/vote.h"
#include "core/graph/graph.h"

namespace chorus::planning {

// Go through a graph's nodes in their order; each that leads to a collective Takes what its inputs
// depend on, and Gives what its outputs do. Sets are shared between values, and grow in place where
// nothing else needs them, so that a long sum of independent results costs no more than its length.
class Dependences {
 public:
  // Indices of participations; never changed where it is shared. Null: none.
  using Set = std::shared_ptr<absl::btree_set<int32_t>>;

  // `graph` and `values` must outlive it. `max_work`: how many elements of sets may be looked at or
  // put anywhere, all in all.
  Dependences(const Graph& graph, const ValueTable& values, int64_t max_work);

  // False: no collective needs its results, and Take and Give are not called for it.
  bool IsNeeded(NodeIndex node) const { return needed_[node]; }

  // What the node's inputs depend on; `participations` are those of the nodes before. In short sets
  // what another element waits for itself is left out. kQuota: it is more work than there may be.
  absl::StatusOr<Set> Take(NodeIndex node, absl::Span<const Participation> participations);
  // Of each of the node's outputs.
  void Give(NodeIndex node, Set set);
  // Of a collective, whose outputs depend on its own participation alone.
  void GiveOwn(NodeIndex node, int32_t participation);

  int64_t work() const { return work_; }

  // What the sets of such a graph take at any time, counted from above: of a node that puts sets
  // together, as many elements as there are collectives before it, and of all together no more
  // than `max_work`.
  static int64_t MostBytes(const Graph& graph, const ValueTable& values, int64_t max_work);

 private:
  absl::Status Count(size_t elements);
  absl::Status Reduce(absl::Span<const Participation> participations, Set* set);

  const Graph& graph_;
  const ValueTable& values_;
  const int64_t max_work_;
  int64_t work_ = 0;
  IndexedVector<NodeIndex, bool> needed_;  // it is a collective, or leads to one
  IndexedVector<ValueIndex, Set> sets_;
  IndexedVector<ValueIndex, int32_t> uses_;  // by needed nodes that are still to come
};

}  // namespace chorus::planning

#endif  // CHORUS_CORE_RUNTIME_PLAN_DEPENDENCES_H_
