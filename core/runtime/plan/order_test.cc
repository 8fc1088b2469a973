#include "core/runtime/plan/order.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/collective/order.h"
#include "core/ops/testing/rank_builder.h"
#include "core/runtime/device_plan.h"
#include "core/runtime/plan/plan_testing.h"
#include "gtest/gtest.h"

namespace chorus {
namespace testing {
namespace {

TEST(PlanOrderTest, AnotherOrderOfCollectivesIsFollowed) {
  RankBuilder b(0, 2);
  const ValueIndex x = b.Input(F32({4}));
  const ValueIndex r0 = b.AllReduce(x);
  const ValueIndex y = b.Op("neg", {r0});
  const ValueIndex r1 = b.AllReduce(b.Op("sin", {x}));
  AddOutput(&b, b.Op("add", {y, r1}));
  const DevicePlan device = Slot(Compile(b, true, {1, 0}));
  ASSERT_EQ(device.steps.size(), 5u);
  EXPECT_EQ(device.nodes[0].node.op, "sin");
  EXPECT_EQ(device.steps[0].node, 0);
  EXPECT_GE(device.steps[1].collective, 0);
  EXPECT_GE(device.steps[2].collective, 0);

  const Graph graph = b.graph().Build();
  for (const std::vector<int32_t>& order :
       std::vector<std::vector<int32_t>>{{0}, {0, 0}, {0, 2}, {0, -1}, {0, 1, 1}}) {
    PlanOptions options;
    options.order = order;
    EXPECT_EQ(CompilePlan(graph, options).status().code(), absl::StatusCode::kInvalidArgument);
  }
  RankBuilder chain(0, 2);
  AddOutput(&chain, chain.AllReduce(chain.Op("neg", {chain.AllReduce(chain.Input(F32({4})))})));
  PlanOptions options;
  options.order = {1, 0};
  const absl::Status status = CompilePlan(chain.graph().Build(), options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ErrorOf(status).message,
            "the order puts participation 1 before 0, whose result it needs");
}

// A random program of members on all device slots: local ops, copies, and calls of all_reduce that
// members make in any order. `ahead`: by how many calls each member is ahead when the run begins.
Graph RandomSlots(std::mt19937_64* random, int32_t slots, const std::vector<int32_t>& ahead) {
  const auto draw = [random](int32_t n) {
    return static_cast<int32_t>((*random)() % static_cast<uint64_t>(n));
  };
  GroupSlot group;
  group.size = slots;
  for (int32_t d = 0; d < slots; ++d) {
    group.held.push_back(GroupRank(d));
    group.device_slots.push_back(d);
  }
  GraphBuilder builder(slots, {group});
  struct SlotValue {
    ValueIndex value;
    int32_t behind;  // it needs instances below this one only
  };
  std::vector<std::vector<SlotValue>> values_by_slot(static_cast<size_t>(slots));  // by slot
  for (int32_t d = 0; d < slots; ++d) {
    GraphInput input;
    input.type = F32({4});
    input.device_slot = d;
    values_by_slot[static_cast<size_t>(d)].push_back({builder.AddInput(input), 0});
  }
  const auto emit = [&](NodeSpec spec, int32_t behind) {
    const auto slot = static_cast<size_t>(spec.device_slot);
    absl::StatusOr<std::vector<ValueIndex>> values = builder.Emit(std::move(spec));
    ASSERT_TRUE(values.ok()) << values.status();
    values_by_slot[slot].push_back({(*values)[0], behind});
  };
  const int32_t instances = 1 + draw(5);
  std::vector<int32_t> next = ahead;
  const auto is_done = [&] {
    return std::all_of(next.begin(), next.end(), [&](int32_t n) { return n >= instances; });
  };
  while (!is_done()) {
    const int32_t slot = draw(slots);
    const auto& slot_values = values_by_slot[static_cast<size_t>(slot)];
    const SlotValue from =
        slot_values[static_cast<size_t>(draw(static_cast<int32_t>(slot_values.size())))];
    NodeSpec spec;
    spec.inputs = {from.value};
    spec.device_slot = slot;
    const int32_t kind = draw(5);
    if (kind == 0) {
      spec.op = "neg";
      emit(std::move(spec), from.behind);
    } else if (kind <= 2) {
      spec.op = "copy";
      spec.device_slot = (slot + 1 + draw(slots - 1)) % slots;
      emit(std::move(spec), from.behind);
    } else if (int32_t& instance = next[static_cast<size_t>(slot)];
               instance < instances && from.behind <= instance) {
      spec.op = "all_reduce";
      spec.collective.emplace();
      spec.collective->kind = CollectiveKind::kAllReduce;
      spec.collective->reduction = Reduction::kSum;
      spec.collective->rank = GroupRank(slot);
      emit(std::move(spec), ++instance);
    }
  }
  for (const auto& slot_values : values_by_slot) {
    GraphOutput output;
    output.value = slot_values.back().value;
    builder.AddOutput(output);
  }
  return builder.Build();
}

// Whether all devices come through: each call meets those of the same instance, or the other end of
// the same copy, of the devices whose turn it is. `instance_of` by participation.
bool AllMeet(const Plan& plan, const std::vector<int32_t>& instance_of) {
  using Meeting = std::array<int64_t, 3>;  // which instance; or -1, the pair of slots, which copy
  std::vector<std::vector<int32_t>> calls;
  std::map<Meeting, int32_t> number_of;
  for (size_t slot = 0; slot < plan.device_plans.size(); ++slot) {
    const DevicePlan device = Slot(plan, slot);
    std::map<std::pair<int32_t, int32_t>, int64_t> copies;
    calls.emplace_back();
    for (const DevicePlan::Step& step : device.steps) {
      if (step.collective < 0) continue;
      const auto binding =
          static_cast<size_t>(device.collectives[static_cast<size_t>(step.collective)].binding);
      const Plan::CollectiveSlot& bound = plan.collectives[slot][binding];
      Meeting meeting = {-1, 100 * bound.from_slot + bound.to_slot, 0};
      if (bound.participation >= 0) {
        meeting = {instance_of[static_cast<size_t>(bound.participation)], 0, 0};
      } else {
        meeting[2] = copies[{bound.from_slot, bound.to_slot}]++;
      }
      const auto number = static_cast<int32_t>(number_of.size());
      calls.back().push_back(number_of.emplace(meeting, number).first->second);
      EXPECT_EQ(plan.meetings.empty() ? -1 : plan.meetings[slot][calls.back().size() - 1],
                plan.meetings.empty() ? -1 : static_cast<int32_t>(binding));
    }
  }
  return FindStuck(calls) < 0;
}

TEST(PlanOrderTest, AllSlotsMeetInOneOrder) {
  const char* const text = std::getenv("CHORUS_TEST_SEED");
  const uint64_t seed = text != nullptr ? std::stoull(text) : std::random_device()();
  std::printf("CHORUS_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 500; ++i) {
    SCOPED_TRACE(i);
    const auto slots = static_cast<int32_t>(2 + random() % 3);
    std::vector<int32_t> ahead(static_cast<size_t>(slots), 0);
    const bool even = random() % 2 == 0;
    for (int32_t& calls : ahead) calls = even ? 0 : static_cast<int32_t>(random() % 2);
    const Graph graph = RandomSlots(&random, slots, ahead);
    ASSERT_FALSE(HasFailure());
    PlanOptions options;
    options.share_results = random() % 2 == 0;
    std::vector<int32_t> calls = ahead;
    std::vector<int32_t> instances;
    for (const Node& node : graph.nodes) {
      if (!node.collective.has_value()) continue;
      instances.push_back(calls[static_cast<size_t>(node.collective->rank.value())]++);
    }
    if (!even) options.instances = instances;
    absl::StatusOr<Plan> plan = CompilePlan(graph, options);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_TRUE(AllMeet(*plan, instances)) << DebugString(graph);
    // As a gang orders them.
    options.instances = instances;
    options.order.resize(instances.size());
    std::iota(options.order.begin(), options.order.end(), 0);
    std::stable_sort(options.order.begin(), options.order.end(), [&](int32_t a, int32_t b) {
      return instances[static_cast<size_t>(a)] < instances[static_cast<size_t>(b)];
    });
    plan = CompilePlan(graph, options);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_TRUE(AllMeet(*plan, instances)) << DebugString(graph);
    if (HasFailure()) return;
  }
}

TEST(PlanOrderTest, CallsOfOneInstanceStandTogetherInAnOrder) {
  GroupSlot group;
  group.size = 2;
  group.held = {GroupRank(0), GroupRank(1)};
  group.device_slots = {0, 1};
  GraphBuilder builder(2, {group});
  std::vector<ValueIndex> values;
  for (int32_t d = 0; d < 2; ++d) {
    GraphInput input;
    input.type = F32({4});
    input.device_slot = d;
    values.push_back(builder.AddInput(input));
  }
  NodeSpec copy;
  copy.op = "copy";
  copy.inputs = {values[0]};
  copy.device_slot = 1;
  values[1] = (*builder.Emit(copy))[0];
  for (int32_t call = 0; call < 4; ++call) {
    NodeSpec spec;
    spec.op = "all_reduce";
    spec.inputs = {values[static_cast<size_t>(call % 2)]};
    spec.device_slot = call % 2;
    spec.collective.emplace();
    spec.collective->kind = CollectiveKind::kAllReduce;
    spec.collective->reduction = Reduction::kSum;
    spec.collective->rank = GroupRank(call % 2);
    GraphOutput output;
    output.value = (*builder.Emit(spec))[0];
    builder.AddOutput(output);
  }
  const Graph graph = builder.Build();
  PlanOptions options;
  EXPECT_EQ(CompilePlan(graph, options)->instances, (std::vector<int32_t>{0, 0, 2, 2}));
  options.order = {2, 3, 1, 0};
  EXPECT_TRUE(CompilePlan(graph, options).ok());
  options.order = {0, 2, 1, 3};
  EXPECT_EQ(ErrorOf(CompilePlan(graph, options).status()).message,
            "the order parts participation 1 from 0, which is of the same instance");
  options.instances = {7, 9, 7, 8};
  EXPECT_EQ(CompilePlan(graph, options)->instances, (std::vector<int32_t>{0, 1, 0, 3}));
  options.instances = {1, 2};
  EXPECT_EQ(CompilePlan(graph, options).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace testing
}  // namespace chorus
