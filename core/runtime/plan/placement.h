// Pass: the plan's buffer table, and which values live in a workspace instead.
//
// Reads roots, counted, slice_of, list_member, `used`, is_output and forms. Writes Plan::buffers
// but for workspaces (schedule.h), Plan::input_may_be_staging, the results of Plan::equal_groups,
// and of values `buffer` or in_workspace.
//
// Threads: pure functions of the state. Ownership: what they write is the state's. Errors: none.
#ifndef CHORUS_CORE_RUNTIME_PLAN_PLACEMENT_H_
#define CHORUS_CORE_RUNTIME_PLAN_PLACEMENT_H_

#include "core/runtime/plan/plan_state.h"

namespace chorus::planning {

void PlaceValues(PlanState* state);

}  // namespace chorus::planning

#endif  // CHORUS_CORE_RUNTIME_PLAN_PLACEMENT_H_
