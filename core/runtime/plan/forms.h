// Pass: how each node is executed.
//
// Reads the graph and the options. Writes `nodes` (def, form, pieces, workspace_bytes) and makes
// `values`, each its own root. It comes first, and before anything is made has MemoryToPlan count
// what the whole plan takes: kQuota where that is more than PlanLimits::max_bytes. UNIMPLEMENTED:
// an op that is not run, or two members of one group on one device slot. INTERNAL: an op without a
// kernel.
//
// Threads: pure functions of the state. Ownership: what they write is the state's. Errors: said
// above.
#ifndef CHORUS_CORE_RUNTIME_PLAN_FORMS_H_
#define CHORUS_CORE_RUNTIME_PLAN_FORMS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/graph/graph.h"
#include "core/runtime/plan/plan_state.h"

namespace chorus::planning {

absl::Status FindForms(PlanState* state);

// As in plan.h, of a graph whose values are in `table`.
absl::StatusOr<int64_t> MemoryToPlan(const Graph& graph, const ValueTable& table,
                                     const PlanLimits& limits);

}  // namespace chorus::planning

#endif  // CHORUS_CORE_RUNTIME_PLAN_FORMS_H_
