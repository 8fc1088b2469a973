#include "core/runtime/device_plan.h"

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/ops/testing/rank_builder.h"
#include "core/runtime/plan/plan_testing.h"
#include "gtest/gtest.h"

namespace chorus {
namespace testing {
namespace {

using StreamId = DevicePlan::StreamId;

TEST(DevicePlanTest, DevicePlansComeBackAsTheyWereAndTruncatedOnesDoNot) {
  RankBuilder b(0, 3);
  const ValueIndex x = b.Input(F32({4}));
  AddOutput(&b, b.Op("add", {b.AllGather(b.Op("neg", {x}))[2], b.AllReduce(x)}));
  const std::string bytes = Compile(b).device_plans[0];
  const absl::StatusOr<DevicePlan> plan = DecodeDevicePlan(bytes);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(EncodeDevicePlan(*plan), bytes);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(DecodeDevicePlan(absl::string_view(bytes).substr(0, size)).status().code(),
              absl::StatusCode::kInvalidArgument)
        << size;
  }
  EXPECT_FALSE(DecodeDevicePlan(bytes + "x").ok());
}

TEST(DevicePlanTest, AKernelsWorkspaceComesBack) {
  RankBuilder b;
  AddOutput(&b, b.Op("neg", {b.Input(F32({4}))}));
  absl::StatusOr<DevicePlan> plan = DecodeDevicePlan(Compile(b).device_plans[0]);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->steps[0].workspace_bytes, 0);
  plan->steps[0].workspace_bytes = 4096;
  plan->steps[0].workspace.buffer = 1;
  plan->steps[0].workspace.offset = 128;
  const absl::StatusOr<DevicePlan> back = DecodeDevicePlan(EncodeDevicePlan(*plan));
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->steps[0].workspace_bytes, 4096);
  EXPECT_EQ(back->steps[0].workspace, plan->steps[0].workspace);
}

TEST(DevicePlanTest, UnsoundDevicePlansAreRefused) {
  RankBuilder b(0, 3);
  const ValueIndex x = b.Input(F32({4}));
  AddOutput(&b, b.Op("add", {b.AllReduce(b.Op("neg", {x})), x}));
  const absl::StatusOr<DevicePlan> good = DecodeDevicePlan(Compile(b).device_plans[0]);
  ASSERT_TRUE(good.ok());
  ASSERT_EQ(good->steps.size(), 3u);
  const auto refused = [&](void (*change)(DevicePlan*)) {
    DevicePlan plan = *good;
    change(&plan);
    return !DecodeDevicePlan(EncodeDevicePlan(plan)).ok();
  };
  EXPECT_FALSE(refused([](DevicePlan*) {}));
  EXPECT_TRUE(refused([](DevicePlan* p) { p->steps[0].inputs[0].buffer = p->num_buffers; }));
  EXPECT_TRUE(refused([](DevicePlan* p) { p->steps[0].inputs[0].buffer = -2; }));
  EXPECT_TRUE(refused([](DevicePlan* p) { p->steps[0].outputs[0].offset = -1; }));
  EXPECT_TRUE(refused([](DevicePlan* p) { p->steps[0].inputs.clear(); }));
  EXPECT_TRUE(refused([](DevicePlan* p) { p->steps[0].node = 2; }));
  EXPECT_TRUE(refused([](DevicePlan* p) { p->steps[0].node = -1; }));
  EXPECT_TRUE(refused([](DevicePlan* p) { p->steps[1].node = 0; }));
  EXPECT_TRUE(refused([](DevicePlan* p) { p->steps[1].collective = 1; }));
  EXPECT_TRUE(refused([](DevicePlan* p) { p->collectives[0].binding = 1; }));
  EXPECT_TRUE(refused([](DevicePlan* p) { p->collectives[0].count = -1; }));
  EXPECT_TRUE(refused([](DevicePlan* p) { p->steps[0].record = -1; }))
      << "waited for, not recorded";
  EXPECT_TRUE(refused([](DevicePlan* p) { p->steps[1].wait = p->num_events; }));
  EXPECT_TRUE(refused([](DevicePlan* p) { p->steps[1].stream = StreamId::kCompute; }))
      << "a stream that waits for itself";
  EXPECT_TRUE(refused([](DevicePlan* p) { p->num_events = 1 << 30; }));
  EXPECT_TRUE(refused([](DevicePlan* p) { p->num_buffers = 0; }));
  EXPECT_FALSE(refused([](DevicePlan* p) {
    p->steps[0].workspace_bytes = 64;
    p->steps[0].workspace.buffer = 0;
  }));
  EXPECT_TRUE(refused([](DevicePlan* p) { p->steps[0].workspace_bytes = 64; })) << "nowhere";
  EXPECT_TRUE(refused([](DevicePlan* p) { p->steps[0].workspace_bytes = -1; }));
  EXPECT_TRUE(refused([](DevicePlan* p) {
    p->steps[1].workspace_bytes = 64;
    p->steps[1].workspace.buffer = 0;
  })) << "a collective's";
}

}  // namespace
}  // namespace testing
}  // namespace chorus
