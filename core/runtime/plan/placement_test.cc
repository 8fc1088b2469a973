#include "core/runtime/plan/placement.h"

#include <vector>

#include "core/ops/testing/rank_builder.h"
#include "core/runtime/device_plan.h"
#include "core/runtime/plan/plan_testing.h"
#include "gtest/gtest.h"

namespace chorus {
namespace testing {
namespace {

using StreamId = DevicePlan::StreamId;
using Kind = BufferSpec::Kind;

TEST(PlacementTest, AnEagerAllReduceIsOneStepWithoutEvents) {
  RankBuilder b(1, 4);
  AddOutput(&b, b.AllReduce(b.Input(F32({6}))));
  const Plan plan = Compile(b);
  ASSERT_EQ(plan.buffers.size(), 2u);
  EXPECT_EQ(plan.buffers[0].kind, Kind::kInput);
  EXPECT_EQ(plan.buffers[0].index, 0);
  EXPECT_EQ(plan.buffers[1].kind, Kind::kShared);
  EXPECT_EQ(plan.buffers[1].index, 0);
  EXPECT_EQ(plan.buffers[1].bytes, 24);
  EXPECT_TRUE(plan.input_may_be_staging[0]);
  const DevicePlan device = Slot(plan);
  ASSERT_EQ(device.steps.size(), 1u);
  EXPECT_EQ(device.num_events, 0);
  EXPECT_EQ(device.steps[0].stream, StreamId::kCommunication);
  EXPECT_EQ(device.collectives[0].count, 6);
  ASSERT_EQ(plan.operands.size(), 1u);
  EXPECT_EQ(plan.operands[0][0].buffer, 0);
  // Where memory is not shared, the result is this rank's own.
  EXPECT_EQ(OutputSpec(Compile(b, false), 0).kind, Kind::kOwned);
}

TEST(PlacementTest, StagingMemoryIsReadOnlyByFloatingPointReductions) {
  RankBuilder b(0, 2);
  const ValueIndex reduced = b.Input(F32({4}));
  const ValueIndex whole = b.Input(TensorType(DType::kI64, {4}));
  const ValueIndex both = b.Input(F32({4}));
  const ValueIndex shaped = b.Input(F32({2, 2}));
  const ValueIndex kept = b.Input(F32({4}));
  b.Input(F32({4}));  // unused
  AddOutput(&b, b.AllReduce(reduced));
  AddOutput(&b, b.AllReduce(reduced));
  AddOutput(&b, b.AllReduce(whole));
  AddOutput(&b, b.Op("add", {b.AllReduce(both), both}));
  AddOutput(&b, b.AllReduce(b.Op("reshape", {shaped}, {{"dims", std::vector<int64_t>{4}}})));
  AddOutput(&b, b.AllReduce(kept));
  AddOutput(&b, kept);
  const Plan plan = Compile(b);
  EXPECT_EQ(plan.input_may_be_staging, (std::vector<bool>{true, false, false, true, false, true}));
}

TEST(PlacementTest, HoldersAreWrittenWhereTheyAreUsed) {
  RankBuilder b(0, 2);
  Collective c = b.MakeCollective(CollectiveKind::kReduceScatter);
  c.reduction = Reduction::kMax;
  const ValueIndex x = b.Input(F32({4}));
  const std::vector<ValueIndex> results = b.Emit(c, {x, b.Input(F32({4}))});
  ASSERT_EQ(results.size(), 3u);
  AddOutput(&b, b.Op("neg", {results[2]}));
  const Plan plan = Compile(b);
  const DevicePlan device = Slot(plan);
  ASSERT_EQ(device.steps[0].outputs.size(), 3u);
  EXPECT_GE(device.steps[0].outputs[0].buffer, 0);
  EXPECT_EQ(device.steps[0].outputs[1].buffer, -1);
  EXPECT_GE(device.steps[0].outputs[2].buffer, 0);
  EXPECT_EQ(device.collectives[0].num_outputs, 1);
  EXPECT_FALSE(plan.input_may_be_staging[0]) << "it is read again for the holders";
}

}  // namespace
}  // namespace testing
}  // namespace chorus
