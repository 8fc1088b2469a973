// Pass: the steps of each device slot, with their waits, and room in its workspace.
//
// Reads `order`, everything that is known of nodes and values, and Plan::buffers. Adds workspaces
// to Plan::buffers; writes Plan::operands, written, collectives, meetings, device_plans and
// workspace_bytes.
//
// Threads: pure functions of the state. Ownership: what they write is the state's. Errors: none.
#ifndef CHORUS_CORE_RUNTIME_PLAN_SCHEDULE_H_
#define CHORUS_CORE_RUNTIME_PLAN_SCHEDULE_H_

#include "core/runtime/plan/plan_state.h"

namespace chorus::planning {

void Schedule(PlanState* state);

}  // namespace chorus::planning

#endif  // CHORUS_CORE_RUNTIME_PLAN_SCHEDULE_H_
