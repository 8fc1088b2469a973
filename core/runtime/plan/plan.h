// Makes a plan of a graph: passes over one PlanState (plan_state.h), each in a header of its own
// that says what it reads and what it writes. plan.cc lists them in their order.
//
// Threads: pure functions, without devices. Ownership: a plan is plain data. Errors: said at each
// function.
#ifndef CHORUS_CORE_RUNTIME_PLAN_PLAN_H_
#define CHORUS_CORE_RUNTIME_PLAN_PLAN_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "core/graph/graph.h"
#include "core/runtime/plan/compiled_plan.h"
#include "core/runtime/plan/plan_options.h"

namespace chorus {

// `graph` has passed ValidateGraph, `options.one_domain` is of its group slots. UNIMPLEMENTED: what
// this build cannot run. INVALID_ARGUMENT: an order that is none. RESOURCE_EXHAUSTED kQuota: more
// than `options` allow; the text says of what, how much was expected and what came. Time is linear
// in the graph, but for those steps.
absl::StatusOr<Plan> CompilePlan(const Graph& graph, const PlanOptions& options);

// What CompilePlan takes at any time, as PlanLimits::max_bytes counts; the same at all sizes of
// symbols. `graph` has passed ValidateGraph. kQuota: more than that. UNIMPLEMENTED: an op that this
// build does not run.
absl::StatusOr<int64_t> MemoryToPlan(const Graph& graph, const PlanLimits& limits);

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_PLAN_PLAN_H_
