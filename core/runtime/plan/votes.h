// Passes: what the run votes for.
//
// Threads: pure functions of the state. Ownership: what they write is the state's. Errors: said at
// each.
#ifndef CHORUS_CORE_RUNTIME_PLAN_VOTES_H_
#define CHORUS_CORE_RUNTIME_PLAN_VOTES_H_

#include "absl/status/status.h"
#include "core/runtime/plan/plan_state.h"

namespace chorus::planning {

// Reads the pieces of collectives. Writes Plan::votes and each node's participation. kQuota: which
// of the collectives need which others is more than the options allow.
absl::Status FindVotes(PlanState* state);

// Which participations are of one instance, where a copy between device slots may come between
// them. Reads forms, Plan::votes and PlanOptions::instances. Writes Plan::instances, and makes
// Plan::meetings, a list for each slot. kMalformed: not as many instances as participations.
absl::Status FindInstances(PlanState* state);

}  // namespace chorus::planning

#endif  // CHORUS_CORE_RUNTIME_PLAN_VOTES_H_
