// What a plan is made for, and what it may cost.
//
// Threads: plain data; `workspace_bytes` is called on the thread that plans. Ownership: plain
// values. Errors: none.
#ifndef CHORUS_CORE_RUNTIME_PLAN_PLAN_OPTIONS_H_
#define CHORUS_CORE_RUNTIME_PLAN_PLAN_OPTIONS_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/tensor/type.h"

namespace chorus {

struct NodeView;  // core/ops/node_spec.h

// What a graph from a client may cost; kQuota otherwise, before it is made.
struct PlanLimits {
  // Memory that planning takes at any time, beside the graph: counted from above, for each node,
  // input, output, type and piece of a collective, and for the sets of which need which. Some times
  // what the plan is in the end.
  int64_t max_bytes = int64_t{256} << 20;
  // Pairs of collectives of which one needs the other's result (Participation::after of all
  // together): a thousand that all need a thousand others. Each launch looks at all of them.
  int64_t max_dependences = 1 << 20;
  // Steps to find these: elements of sets that are looked at or copied.
  int64_t max_dependence_steps = 1 << 22;
};

// What of the devices that a run meets is of one domain (Backend::domain): there, what only moves
// stays where it stands, and is read there.
struct OneDomain {
  std::vector<bool> groups;  // by group slot: the devices of all members
  bool slots = true;         // the devices of the graph's device slots
  friend bool operator==(const OneDomain& a, const OneDomain& b) {
    return a.groups == b.groups && a.slots == b.slots;
  }
};

struct PlanOptions {
  // Some device shares its domain with another one: a result that is equal on all members of a
  // group is one for each domain that they are of.
  bool share_results = true;
  // Absent: as share_results says, of everything.
  absl::optional<OneDomain> one_domain;
  // The order in which the run's collectives are launched, as indices of Plan::votes; empty:
  // program order. A gang whose common order differs from a rank's program order needs that rank's
  // plan made for it (streams are queues: another order on another rank would be a deadlock). Must
  // be a permutation that respects the participations' `after`.
  std::vector<int32_t> order;
  // Which participations are of one instance: those of equal numbers. They must stand together in
  // `order`. Empty: the k-th calls of all members of a group slot are of one, as they are where the
  // members have called equally often before.
  std::vector<int32_t> instances;
  // Looks for work that ranks of the node have in common (Plan::equal_groups). Only with
  // share_results.
  bool share_equal_work = true;
  // Scratch for the kernel of a local node: Backend::WorkspaceBytes. It is reserved with the run's
  // workspace, and used again as that is. Null: no kernel wants any.
  std::function<absl::StatusOr<int64_t>(const NodeView& node, absl::Span<const TensorType> outputs)>
      workspace_bytes;
  // What a group of equal work must read and write at least: for less, every rank for itself is
  // quicker than waiting for each other.
  int64_t least_equal_bytes = 64 << 10;
  PlanLimits limits;
};

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_PLAN_PLAN_OPTIONS_H_
