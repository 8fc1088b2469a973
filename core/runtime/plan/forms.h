// Pass: how each node is executed.
//
// Reads the graph and the options. Writes `nodes` (def, form, pieces, workspace_bytes) and makes
// `values`, each its own root. It comes first, and counts before anything is made what the whole
// plan takes: kQuota where that is more than PlanLimits::max_bytes. UNIMPLEMENTED: an op that is
// not run, or two members of one group on one device slot. INTERNAL: an op without a kernel.
//
// Threads: pure functions of the state. Ownership: what they write is the state's. Errors: said
// above.
#ifndef CHORUS_CORE_RUNTIME_PLAN_FORMS_H_
#define CHORUS_CORE_RUNTIME_PLAN_FORMS_H_

#include "absl/status/status.h"
#include "core/runtime/plan/plan_state.h"

namespace chorus::planning {

absl::Status FindForms(PlanState* state);

}  // namespace chorus::planning

#endif  // CHORUS_CORE_RUNTIME_PLAN_FORMS_H_
