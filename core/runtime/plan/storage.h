// Passes: which nodes run, which values share memory, and how long each is needed.
//
// Threads: pure functions of the state. Ownership: what they write is the state's. Errors: none.
#ifndef CHORUS_CORE_RUNTIME_PLAN_STORAGE_H_
#define CHORUS_CORE_RUNTIME_PLAN_STORAGE_H_

#include "core/runtime/plan/plan_state.h"

namespace chorus::planning {

// Leaves out local ops that nothing needs. Collectives never are: other ranks wait for them. Reads
// the graph. Writes `live` of nodes and `used` of values.
void FindLive(PlanState* state);

// Reads forms, pieces, `live` and `used`. Writes of values root, offset, list_member, list_index,
// slice_of, counted and is_output: a value with another root, or of another member, or a slice of
// a result, has no memory of its own.
void FindStorage(PlanState* state);

// Reads `order`, forms, `live` and roots. Writes `last_use` of roots.
void FindLifetimes(PlanState* state);

}  // namespace chorus::planning

#endif  // CHORUS_CORE_RUNTIME_PLAN_STORAGE_H_
