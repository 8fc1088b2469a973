// Passes: what each of the graph's outputs may take over, and where it stands.
//
// Threads: pure functions of the state. Ownership: what they write is the state's. Errors: none.
#ifndef CHORUS_CORE_RUNTIME_PLAN_OUTPUTS_H_
#define CHORUS_CORE_RUNTIME_PLAN_OUTPUTS_H_

#include "core/runtime/plan/plan_state.h"

namespace chorus::planning {

// Reads `order`, `put_off`, `live`, forms, roots, counted and last_use. Makes Plan::outputs, with
// their donors, and writes `takes_over` of values.
void ChooseDonors(PlanState* state);

// Reads Plan::buffers and Plan::operands, which must be complete, and what says where values
// stand and come from. Writes the rest of Plan::outputs.
void PlaceOutputs(PlanState* state);

}  // namespace chorus::planning

#endif  // CHORUS_CORE_RUNTIME_PLAN_OUTPUTS_H_
