#include "core/runtime/plan/schedule.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/ops/testing/rank_builder.h"
#include "core/runtime/device_plan.h"
#include "core/runtime/plan/plan_testing.h"
#include "gtest/gtest.h"

namespace chorus {
namespace testing {
namespace {

using Kind = BufferSpec::Kind;

TEST(ScheduleTest, PairsHaveTheirMembersInTheOrderOfTheirRanks) {
  for (const bool low : {true, false}) {
    RankBuilder b(low ? 1 : 4, 6);
    const int peer = low ? 4 : 1;
    b.Send(b.Input(F32({4})), peer);
    AddOutput(&b, b.Recv(F32({4}), peer));
    const Plan plan = Compile(b);
    EXPECT_EQ(OutputSpec(plan, 0).kind, Kind::kPeer);
    EXPECT_EQ(OutputSpec(plan, 0).list_member, peer);
    const DevicePlan device = Slot(plan);
    EXPECT_EQ(device.collectives[0].root, low ? 1 : 0);
    EXPECT_EQ(device.collectives[1].root, low ? 1 : 0);
    EXPECT_EQ(device.steps[1].outputs[0].producer, low ? 1 : 0);
  }
}

TEST(ScheduleTest, DeadValuesMakeRoomForLaterOnes) {
  RankBuilder b;
  ValueIndex v = b.Input(F32({1000}));
  for (int i = 0; i < 50; ++i) v = b.Op("sin", {v});
  for (int i = 0; i < 50; ++i)
    v = b.Op("reshape",
             {b.Op("transpose", {b.Op("reshape", {v}, {{"dims", std::vector<int64_t>{10, 100}}})},
                   {{"perm", std::vector<int64_t>{1, 0}}})},
             {{"dims", std::vector<int64_t>{1000}}});
  AddOutput(&b, v);
  const Plan plan = Compile(b);
  // In place as long as ops are elementwise; then each reads one block and writes another.
  EXPECT_EQ(plan.workspace_bytes[0], 2 * 4096);
  EXPECT_EQ(Count(plan, Kind::kWorkspace), 1);
  const DevicePlan device = Slot(plan);
  for (const DevicePlan::Step& step : device.steps) {
    if (device.nodes[static_cast<size_t>(step.node)].node.op == "transpose") {
      EXPECT_FALSE(step.inputs[0] == step.outputs[0]);
    }
  }
}

// A block that a collective still reads is not written by the next local op, unless that op waits
// for the collective anyway.
TEST(ScheduleTest, MemoryThatTheOtherStreamStillReadsIsNotUsedAgain) {
  RankBuilder b(0, 2);
  const ValueIndex x = b.Input(F32({1000}));
  const ValueIndex sum = b.AllReduce(b.Op("sin", {x}));  // reads block 0
  const ValueIndex other = b.Op("cos", {x});             // not ordered behind it: block 1
  const ValueIndex after = b.Op("add", {sum, other});    // waits: now block 0 is free, and 1
  AddOutput(&b,
            b.Op("mul", {b.Op("transpose", {after}, {{"perm", std::vector<int64_t>{0}}}), after}));
  const DevicePlan device = Slot(Compile(b));
  ASSERT_EQ(device.steps.size(), 6u);
  EXPECT_EQ(device.steps[0].outputs[0].offset, 0);
  EXPECT_EQ(device.steps[2].outputs[0].offset, 4096);
  EXPECT_EQ(device.steps[2].wait, -1);
  EXPECT_GE(device.steps[3].wait, 0);
  EXPECT_EQ(device.steps[4].outputs[0].offset, 0);
}

// Kernels of "sin" want as much scratch as a value has bytes.
DevicePlan CompileWithScratch(RankBuilder* b, int64_t* workspace_bytes) {
  PlanOptions options;
  options.share_results = false;
  options.workspace_bytes = [](const NodeView& node, absl::Span<const TensorType> outputs) {
    return node.op == "sin" ? outputs[0].num_bytes() : 0;
  };
  const absl::StatusOr<Plan> plan = CompilePlan(b->graph().Build(), options);
  EXPECT_TRUE(plan.ok()) << plan.status();
  *workspace_bytes = plan->workspace_bytes[0];
  EXPECT_EQ(Count(*plan, Kind::kWorkspace), 1);
  return Slot(*plan);
}

TEST(ScheduleTest, StepsOfOneStreamUseTheSameScratch) {
  RankBuilder b;
  const ValueIndex x = b.Input(F32({1000}));
  AddOutput(&b, b.Op("neg", {b.Op("sin", {b.Op("sin", {x})})}));
  int64_t bytes = 0;
  const DevicePlan device = CompileWithScratch(&b, &bytes);
  ASSERT_EQ(device.steps.size(), 3u);
  for (const size_t s : {0, 1}) {
    const DevicePlan::Step& step = device.steps[s];
    EXPECT_EQ(step.workspace_bytes, 4000);
    EXPECT_EQ(step.workspace, device.steps[0].workspace);
    // Neither does the step read or write a value there.
    EXPECT_FALSE(step.workspace == step.inputs[0]);
    EXPECT_FALSE(step.workspace == step.outputs[0]);
  }
  EXPECT_EQ(device.steps[1].inputs[0], device.steps[1].outputs[0]) << "in place all the same";
  EXPECT_EQ(device.steps[2].workspace_bytes, 0);
  EXPECT_EQ(bytes, 2 * 4096) << "the scratch, and the one value on its way";
}

// What the other stream does at the same time must not write there.
TEST(ScheduleTest, TheOtherStreamUsesScratchOnlyBehindItsStep) {
  RankBuilder b(0, 2);
  const ValueIndex x = b.Input(F32({1000}));
  const ValueIndex local = b.Op("sin", {x});
  const ValueIndex beside = b.AllReduce(x);      // not ordered behind the kernel
  const ValueIndex behind = b.AllReduce(local);  // waits for it
  AddOutput(&b, b.Op("add", {beside, behind}));
  int64_t bytes = 0;
  const DevicePlan device = CompileWithScratch(&b, &bytes);
  ASSERT_EQ(device.steps.size(), 4u);
  const DevicePlan::Location scratch = device.steps[0].workspace;
  EXPECT_EQ(device.steps[1].wait, -1);
  EXPECT_FALSE(device.steps[1].outputs[0] == scratch);
  EXPECT_GE(device.steps[2].wait, 0);
  EXPECT_EQ(device.steps[2].outputs[0], scratch);
}

TEST(ScheduleTest, WaitsStandOnlyWhereAValueCrossesStreams) {
  RankBuilder b(0, 2);
  const ValueIndex x = b.Input(F32({8}));
  const ValueIndex a = b.Op("sin", {x});
  const ValueIndex r1 = b.AllReduce(a);
  const ValueIndex r2 = b.AllReduce(r1);
  const ValueIndex r3 = b.AllReduce(a);  // has waited for a already
  const ValueIndex c = b.Op("add", {r1, r2});
  const ValueIndex d = b.Op("add", {r1, c});  // has waited for r2, hence for r1
  AddOutput(&b, b.Op("add", {d, r3}));
  const DevicePlan device = Slot(Compile(b));
  std::vector<int> waits;
  for (size_t i = 0; i < device.steps.size(); ++i) {
    if (device.steps[i].wait >= 0) waits.push_back(static_cast<int>(i));
  }
  EXPECT_EQ(waits, (std::vector<int>{1, 4, 6}));
  EXPECT_EQ(device.num_events, 2);
}

TEST(ScheduleTest, CopiesBetweenSlotsSendAndReceive) {
  RankBuilder b(0, 1, 2);
  const ValueIndex x = b.Input(F32({4}), 0);
  const ValueIndex there = b.Op("copy", {b.Op("neg", {x})}, {}, 1);
  const ValueIndex again = b.Op("copy", {x}, {}, 1);
  AddOutput(&b, b.Op("add", {there, again}, {}, 1));
  for (const bool share : {true, false}) {
    const Plan plan = Compile(b, share);
    const DevicePlan from = Slot(plan, 0);
    const DevicePlan to = Slot(plan, 1);
    ASSERT_EQ(from.steps.size(), 3u);
    ASSERT_EQ(to.steps.size(), 3u);
    EXPECT_EQ(from.collectives[0].kind, CollectiveKind::kSend);
    EXPECT_EQ(from.collectives[0].root, 1);
    EXPECT_EQ(to.collectives[0].kind, CollectiveKind::kRecv);
    EXPECT_EQ(to.collectives[0].root, 0);
    for (size_t slot : {0, 1}) {
      ASSERT_EQ(plan.collectives[slot].size(), 1u) << "one communicator for both";
      EXPECT_EQ(plan.collectives[slot][0].participation, -1);
      EXPECT_EQ(plan.collectives[slot][0].from_slot, 0);
      EXPECT_EQ(plan.collectives[slot][0].to_slot, 1);
    }
    EXPECT_EQ(to.steps[0].outputs[0].buffer < 0, share);
    EXPECT_EQ(plan.outputs[0].device_slot, 1);
    EXPECT_GE(to.steps[2].wait, 0);
  }
}

}  // namespace
}  // namespace testing
}  // namespace chorus
