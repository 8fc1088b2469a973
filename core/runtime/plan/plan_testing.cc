#include "core/runtime/plan/plan_testing.h"

#include <algorithm>
#include <utility>

#include "absl/status/statusor.h"
#include "core/ops/validate.h"
#include "gtest/gtest.h"

namespace chorus {
namespace testing {

TensorType F32(const std::vector<int64_t>& sizes) {
  TensorType type(DType::kF32, {});
  for (const int64_t size : sizes) type.dims.emplace_back(size);
  return type;
}

void AddOutput(RankBuilder* b, ValueIndex v) {
  GraphOutput output;
  output.value = v;
  b->graph().AddOutput(output);
}

Plan Compile(const Graph& graph, bool share, std::vector<int32_t> order) {
  const absl::Status valid = ValidateGraph(graph, GraphLimits());
  EXPECT_TRUE(valid.ok()) << valid;
  PlanOptions options;
  options.share_results = share;
  options.order = std::move(order);
  absl::StatusOr<Plan> plan = CompilePlan(graph, options);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? *std::move(plan) : Plan();
}
Plan Compile(const RankBuilder& b, bool share, std::vector<int32_t> order) {
  return Compile(const_cast<RankBuilder&>(b).graph().Build(), share, std::move(order));
}

DevicePlan Slot(const Plan& plan, size_t slot) {
  absl::StatusOr<DevicePlan> decoded = DecodeDevicePlan(plan.device_plans[slot]);
  EXPECT_TRUE(decoded.ok()) << decoded.status();
  return decoded.ok() ? *std::move(decoded) : DevicePlan();
}

const BufferSpec& OutputSpec(const Plan& plan, size_t output) {
  return plan.buffers[plan.outputs[output].buffer];
}

int64_t Count(const Plan& plan, BufferSpec::Kind kind) {
  return std::count_if(plan.buffers.begin(), plan.buffers.end(),
                       [&](const BufferSpec& spec) { return spec.kind == kind; });
}

}  // namespace testing
}  // namespace chorus
