// Pass: work that ranks of the node may have in common (Plan::EqualGroup).
//
// Reads forms, participations, `live` and is_output. Writes Plan::equal_groups, but for the
// buffers of its results (placement.h), and equal_group of nodes and values.
//
// Threads: pure functions of the state. Ownership: what they write is the state's. Errors: none.
#ifndef CHORUS_CORE_RUNTIME_PLAN_EQUAL_WORK_H_
#define CHORUS_CORE_RUNTIME_PLAN_EQUAL_WORK_H_

#include "core/runtime/plan/plan_state.h"

namespace chorus::planning {

void FindEqualWork(PlanState* state);

}  // namespace chorus::planning

#endif  // CHORUS_CORE_RUNTIME_PLAN_EQUAL_WORK_H_
