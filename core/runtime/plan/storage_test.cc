#include "core/runtime/plan/storage.h"

#include <cstddef>
#include <vector>

#include "core/ops/testing/rank_builder.h"
#include "core/runtime/device_plan.h"
#include "core/runtime/plan/plan_testing.h"
#include "gtest/gtest.h"

namespace chorus {
namespace testing {
namespace {

using Kind = BufferSpec::Kind;

TEST(StorageTest, MovesAreAliasesAndTheirOperandsAreCounted) {
  RankBuilder b(1, 3);
  const ValueIndex x = b.Input(F32({4}));
  const ValueIndex made = b.Op("neg", {x});
  const std::vector<ValueIndex> all = b.AllGather(made);
  AddOutput(&b, all[0]);
  AddOutput(&b, all[1]);
  const ValueIndex seen = b.Broadcast(-1, F32({4}), 2);
  AddOutput(&b, b.Op("add", {seen, x}));
  const Plan plan = Compile(b);
  EXPECT_EQ(OutputSpec(plan, 0).kind, Kind::kPeer);
  EXPECT_EQ(OutputSpec(plan, 0).index, 0);
  EXPECT_EQ(OutputSpec(plan, 0).list_member, 0);
  // Its own operand needs no other buffer, and it is the output as well.
  EXPECT_EQ(OutputSpec(plan, 1).kind, Kind::kOwned);
  EXPECT_EQ(plan.operands[0][0].buffer, plan.outputs[1].buffer);
  EXPECT_FALSE(plan.input_may_be_staging[0]);
  // all[2] is never read: no buffer, no address.
  EXPECT_EQ(Count(plan, Kind::kPeer), 2);
  const DevicePlan device = Slot(plan);
  const DevicePlan::Step& gather = device.steps[1];
  ASSERT_EQ(gather.outputs.size(), 3u);
  EXPECT_EQ(gather.outputs[0].buffer, plan.outputs[0].buffer);
  EXPECT_EQ(gather.outputs[0].producer, 0);
  EXPECT_EQ(gather.outputs[1].buffer, -1);
  EXPECT_EQ(gather.outputs[2].buffer, -1);

  const Plan apart = Compile(b, false);
  EXPECT_EQ(Count(apart, Kind::kPeer), 0);
  EXPECT_EQ(Count(apart, Kind::kOwned), 3);
  EXPECT_EQ(Slot(apart).steps[1].outputs[0].producer, -1);
}

TEST(StorageTest, MovesAreAliasesWhereTheirGroupIsOfOneDomain) {
  RankBuilder b(1, 3, /*num_device_slots=*/2);
  GroupSlot near;
  near.size = 2;
  near.held = {GroupRank(0)};
  near.device_slots = {0};
  ASSERT_EQ(b.graph().AddGroupSlot(near), 1);
  const ValueIndex x = b.Input(F32({4}));
  AddOutput(&b, b.AllGather(b.Op("neg", {x}))[0]);
  Collective c = b.MakeCollective(CollectiveKind::kAllGather);
  c.group_slot = 1;
  c.rank = GroupRank(0);
  AddOutput(&b, b.Emit(c, {b.Op("sin", {x})})[1]);
  AddOutput(&b, b.Op("copy", {b.Op("cos", {x})}, {}, /*device_slot=*/1));
  const Graph graph = b.graph().Build();
  for (const bool far_is_one : {false, true}) {
    for (const bool near_is_one : {false, true}) {
      for (const bool slots_are : {false, true}) {
        PlanOptions options;
        options.one_domain = OneDomain{{far_is_one, near_is_one}, slots_are};
        const absl::StatusOr<Plan> plan = CompilePlan(graph, options);
        ASSERT_TRUE(plan.ok()) << plan.status();
        EXPECT_EQ(OutputSpec(*plan, 0).kind, far_is_one ? Kind::kPeer : Kind::kShared);
        EXPECT_EQ(OutputSpec(*plan, 1).kind, near_is_one ? Kind::kPeer : Kind::kShared);
        EXPECT_EQ(OutputSpec(*plan, 1).list_index, near_is_one ? 0 : 1);
        EXPECT_EQ(OutputSpec(*plan, 2).device_slot, slots_are ? 0 : 1);
      }
    }
  }
}

TEST(StorageTest, ARootReadsItsOwnBroadcast) {
  RankBuilder b(2, 3);
  const ValueIndex x = b.Input(F32({4}));
  AddOutput(&b, b.Broadcast(x, F32({4}), 2));
  const Plan plan = Compile(b);
  EXPECT_EQ(plan.outputs[0].buffer, 0);
  EXPECT_EQ(plan.operands[0][0].buffer, 0);
  EXPECT_FALSE(plan.input_may_be_staging[0]) << "other ranks keep it";
  EXPECT_EQ(Slot(plan).steps[0].outputs[0].buffer, -1);
}

TEST(StorageTest, OutputsMayBeInputsAliasesOrTheSameTwice) {
  RankBuilder b;
  const ValueIndex x = b.Input(F32({2, 3}));
  const Attributes flat = {{"dims", std::vector<int64_t>{6}}};
  const ValueIndex y = b.Op("neg", {x});
  AddOutput(&b, x);
  AddOutput(&b, b.Op("reshape", {x}, flat));
  AddOutput(&b, b.Op("reshape", {y}, flat));
  AddOutput(&b, y);
  AddOutput(&b, y);
  AddOutput(&b, b.Op("copy", {y}));
  const Plan plan = Compile(b);
  EXPECT_EQ(plan.outputs[0].buffer, 0);
  EXPECT_EQ(plan.outputs[1].buffer, 0);
  for (int i = 3; i < 6; ++i) EXPECT_EQ(plan.outputs[i].buffer, plan.outputs[2].buffer);
  EXPECT_EQ(OutputSpec(plan, 2).kind, Kind::kOwned);
  EXPECT_EQ(plan.buffers.size(), 2u);
  EXPECT_EQ(Slot(plan).steps.size(), 1u) << "aliases cost nothing";
  EXPECT_FALSE(plan.input_may_be_staging[0]);
}

TEST(StorageTest, UnneededNodesAreLeftOutButNeverCollectives) {
  RankBuilder b(0, 2);
  const ValueIndex x = b.Input(F32({4}));
  b.Op("add", {b.Op("neg", {x}), x});
  b.AllReduce(b.Op("sin", {x}));
  const Plan plan = Compile(b);
  const DevicePlan device = Slot(plan);
  ASSERT_EQ(device.steps.size(), 2u);
  EXPECT_EQ(device.nodes[0].node.op, "sin");
  EXPECT_GE(device.steps[1].collective, 0);
  EXPECT_EQ(Count(plan, Kind::kShared), 0) << "nobody reads it";
}

Collective Rooted(const RankBuilder& b, CollectiveKind kind, int32_t root) {
  Collective c = b.MakeCollective(kind);
  c.root = GroupRank(root);
  return c;
}

TEST(StorageTest, PiecesOfAScatteredTensorStandWhereTheRootHasThem) {
  // The root: its own piece is a part of its operand.
  RankBuilder root(1, 3);
  Collective c = Rooted(root, CollectiveKind::kScatter, 1);
  c.counts = {2, 4, 0};
  const ValueIndex x = root.Op("neg", {root.Input(F32({6, 2}))});
  AddOutput(&root, root.Emit(c, {x}, {}, "scatter_tensor")[0]);
  Plan plan = Compile(root);
  ASSERT_EQ(plan.operands[0].size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(plan.operands[0][i].buffer, plan.outputs[0].buffer);
    EXPECT_EQ(plan.operands[0][i].offset, (i == 0 ? 0 : i == 1 ? 2 : 6) * 2 * 4);
  }
  EXPECT_EQ(OutputSpec(plan, 0).kind, Kind::kOwned) << "others read it";
  EXPECT_EQ(plan.outputs[0].offset, 16);
  EXPECT_EQ(plan.outputs[0].bytes, 32);
  EXPECT_EQ(plan.written[0].own.copied, 0);
  const DevicePlan device = Slot(plan);
  EXPECT_EQ(device.collectives[0].input_counts, (std::vector<int64_t>{4, 8, 0}));
  EXPECT_EQ(device.collectives[0].num_inputs, 3);
  EXPECT_EQ(device.collectives[0].num_outputs, 1);
  // Where memory is not shared, it comes to a buffer of its own.
  plan = Compile(root, false);
  EXPECT_EQ(plan.outputs[0].offset, 0);
  EXPECT_EQ(plan.written[0].own.copied, 32);

  RankBuilder other(0, 3);
  AddOutput(&other, other.Emit(Rooted(other, CollectiveKind::kScatter, 1), {},
                               TypeAttributes(F32({2, 2})))[0]);
  plan = Compile(other);
  EXPECT_EQ(OutputSpec(plan, 0).kind, Kind::kPeer);
  EXPECT_EQ(OutputSpec(plan, 0).list_member, 1);
  EXPECT_EQ(OutputSpec(plan, 0).list_index, 0);
}

TEST(StorageTest, PiecesFromEachMemberStandWhereItHasThem) {
  RankBuilder b(1, 3);
  Collective c = b.MakeCollective(CollectiveKind::kAllToAll);
  c.counts = {4, 2, 0};  // received
  const ValueIndex a = b.Input(F32({1, 2}));
  const ValueIndex own = b.Input(F32({2, 2}));
  const ValueIndex d = b.Input(F32({3, 2}));
  for (const ValueIndex y : b.Emit(c, {a, own, d})) AddOutput(&b, y);
  const Plan plan = Compile(b);
  EXPECT_EQ(OutputSpec(plan, 0).kind, Kind::kPeer);
  EXPECT_EQ(OutputSpec(plan, 0).list_member, 0);
  EXPECT_EQ(OutputSpec(plan, 0).list_index, 1) << "what member 0 has for this one";
  EXPECT_EQ(OutputSpec(plan, 0).bytes, 32);
  EXPECT_EQ(plan.outputs[1].buffer, 1) << "its own input";
  EXPECT_EQ(OutputSpec(plan, 2).list_member, 2);
  EXPECT_EQ(plan.operands[0].size(), 3u);
  EXPECT_EQ(plan.votes->participations[0].descriptor.ToString(),
            "all_to_all f32[*,2] sends [1,2,3] rows receives [4,2,0] rows");
}

TEST(StorageTest, OneTensorOfAllRanksPiecesIsSharedAndFilledInPlace) {
  RankBuilder b(2, 3);
  Collective c = b.MakeCollective(CollectiveKind::kAllGather);
  c.counts = {1, 5, 2};
  const ValueIndex x = b.Input(F32({2, 4}));
  const ValueIndex made = b.Op("neg", {x});
  const ValueIndex all = b.Emit(c, {made}, {}, "all_gather_into_tensor")[0];
  AddOutput(&b, all);
  AddOutput(&b, b.Op("add", {made, x}));
  for (const bool share : {true, false}) {
    SCOPED_TRACE(share);
    const Plan plan = Compile(b, share);
    EXPECT_EQ(OutputSpec(plan, 0).kind, share ? Kind::kShared : Kind::kOwned);
    EXPECT_EQ(OutputSpec(plan, 0).bytes, 8 * 4 * 4);
    const DevicePlan device = Slot(plan);
    const auto produced = device.steps[0].outputs[0];
    EXPECT_EQ(produced.buffer, plan.outputs[0].buffer);
    EXPECT_EQ(produced.offset, 6 * 4 * 4);
    EXPECT_EQ(device.steps[1].inputs[0], produced);
    EXPECT_EQ(device.steps[1].outputs[2], produced) << "nothing is left to be moved";
    EXPECT_EQ(plan.operands[0][0].offset, produced.offset) << "list forms read it there";
    const Plan::Written& written = plan.written[0];
    EXPECT_EQ(written.shared.copied, share ? (8 - 2) * 4 * 4 : 0);
    EXPECT_EQ(written.own.copied, share ? 0 : (8 - 2) * 4 * 4);
  }
  // An output of the graph would keep the whole of the result.
  AddOutput(&b, made);
  const Plan plan = Compile(b);
  EXPECT_NE(plan.operands[0][0].buffer, plan.outputs[0].buffer);
  EXPECT_EQ(plan.written[0].shared.copied, 8 * 4 * 4);
}

TEST(StorageTest, FactorsOfAProductStandWithTheirRanksAndInputsAreKeptForThem) {
  RankBuilder b(0, 2);
  Collective c = b.MakeCollective(CollectiveKind::kAllReduce);
  c.reduction = Reduction::kProduct;
  const ValueIndex x = b.Input(F32({4}));
  for (const ValueIndex y : b.Emit(c, {x})) AddOutput(&b, y);
  Plan plan = Compile(b);
  EXPECT_EQ(OutputSpec(plan, 0).kind, Kind::kShared);
  EXPECT_EQ(plan.outputs[1].buffer, 0) << "its own";
  EXPECT_EQ(OutputSpec(plan, 2).kind, Kind::kPeer);
  EXPECT_EQ(OutputSpec(plan, 2).list_member, 1);
  EXPECT_FALSE(plan.input_may_be_staging[0]);
  EXPECT_EQ(plan.written[0].shared.reduced, 16);
  EXPECT_EQ(plan.written[0].shared.copied, 0);
  EXPECT_EQ(plan.written[0].own.copied, 0);
  // Another rank may want the gradient that this one does not: its operand is no scratch.
  RankBuilder quiet(1, 2);
  c.rank = GroupRank(1);
  c.wants_grad = false;
  AddOutput(&quiet, quiet.Emit(c, {quiet.Op("neg", {quiet.Input(F32({4}))})})[0]);
  plan = Compile(quiet);
  EXPECT_EQ(plan.buffers[static_cast<size_t>(plan.operands[0][0].buffer)].kind, Kind::kOwned);
}

}  // namespace
}  // namespace testing
}  // namespace chorus
