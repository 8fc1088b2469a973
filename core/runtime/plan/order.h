// Pass: in which order nodes are enqueued.
//
// Reads Plan::votes, Plan::instances, participations and PlanOptions::order. Writes `order`, all
// nodes once, and `put_off`. That is program order, but where the options give another one, or
// where members' calls of one instance have to stand together; what may write over a donated input
// comes at the end. kMalformed: PlanOptions::order is no order of the run's participations.
//
// Threads: pure functions of the state. Ownership: what they write is the state's. Errors: said
// above.
#ifndef CHORUS_CORE_RUNTIME_PLAN_ORDER_H_
#define CHORUS_CORE_RUNTIME_PLAN_ORDER_H_

#include "absl/status/status.h"
#include "core/runtime/plan/plan_state.h"

namespace chorus::planning {

absl::Status ChooseOrder(PlanState* state);

}  // namespace chorus::planning

#endif  // CHORUS_CORE_RUNTIME_PLAN_ORDER_H_
