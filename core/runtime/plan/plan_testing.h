// Compiles graphs for tests of plans, and finds its way in what comes of it.
//
// Threads: pure functions. Ownership: plain values; OutputSpec's is the plan's. Errors: what cannot
// be compiled or decoded fails the test.
#ifndef CHORUS_CORE_RUNTIME_PLAN_PLAN_TESTING_H_
#define CHORUS_CORE_RUNTIME_PLAN_PLAN_TESTING_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/graph/graph.h"
#include "core/ops/testing/rank_builder.h"
#include "core/runtime/device_plan.h"
#include "core/runtime/plan/plan.h"

namespace chorus {
namespace testing {

TensorType F32(const std::vector<int64_t>& sizes);

void AddOutput(RankBuilder* b, ValueIndex v);

// A valid graph's plan; `share` and `order` as in PlanOptions.
Plan Compile(const Graph& graph, bool share = true, std::vector<int32_t> order = {});
Plan Compile(const RankBuilder& b, bool share = true, std::vector<int32_t> order = {});

// What the plan says of one device slot.
DevicePlan Slot(const Plan& plan, size_t slot = 0);

const BufferSpec& OutputSpec(const Plan& plan, size_t output);

int64_t Count(const Plan& plan, BufferSpec::Kind kind);

}  // namespace testing
}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_PLAN_PLAN_TESTING_H_
