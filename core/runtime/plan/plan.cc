#include "core/runtime/plan/plan.h"

#include <utility>

#include "core/base/error.h"
#include "core/runtime/plan/equal_work.h"
#include "core/runtime/plan/forms.h"
#include "core/runtime/plan/order.h"
#include "core/runtime/plan/outputs.h"
#include "core/runtime/plan/placement.h"
#include "core/runtime/plan/plan_state.h"
#include "core/runtime/plan/schedule.h"
#include "core/runtime/plan/storage.h"
#include "core/runtime/plan/votes.h"

namespace chorus {

absl::StatusOr<Plan> CompilePlan(const Graph& graph, const PlanOptions& options) {
  planning::PlanState state(graph, options);
  CHORUS_RETURN_IF_ERROR(FindForms(&state));
  CHORUS_RETURN_IF_ERROR(FindVotes(&state));
  CHORUS_RETURN_IF_ERROR(FindInstances(&state));
  CHORUS_RETURN_IF_ERROR(ChooseOrder(&state));
  FindLive(&state);
  FindStorage(&state);
  FindEqualWork(&state);
  FindLifetimes(&state);
  ChooseDonors(&state);
  PlaceValues(&state);
  Schedule(&state);
  PlaceOutputs(&state);
  return std::move(state.plan);
}

absl::StatusOr<int64_t> MemoryToPlan(const Graph& graph, const PlanLimits& limits) {
  return planning::MemoryToPlan(graph, ValueTable(graph), limits);
}

}  // namespace chorus
