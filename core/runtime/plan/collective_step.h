// What a step says of a collective: the call without its addresses.
//
// Threads: pure functions. Ownership: plain values. Errors: none.
#ifndef CHORUS_CORE_RUNTIME_PLAN_COLLECTIVE_STEP_H_
#define CHORUS_CORE_RUNTIME_PLAN_COLLECTIVE_STEP_H_

#include "core/graph/graph.h"
#include "core/runtime/device_plan.h"
#include "core/runtime/plan/collective_pieces.h"

namespace chorus::planning {

// The peer's member in its pair's communicator, which has the lower group rank first.
int32_t PeerInPair(const Collective& collective);

// `node` is a collective that moves `pieces`; its binding is left to the schedule.
DevicePlan::CollectiveStep CollectiveStepOf(const Node& node, const CollectivePieces& pieces);

}  // namespace chorus::planning

#endif  // CHORUS_CORE_RUNTIME_PLAN_COLLECTIVE_STEP_H_
