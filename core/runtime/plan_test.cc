#include "core/runtime/plan.h"

#include <time.h>

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

#include "absl/time/time.h"
#include "core/base/error.h"
#include "core/collective/order.h"
#include "core/ops/testing/rank_builder.h"
#include "core/ops/validate.h"
#include "core/runtime/device_plan.h"
#include "gtest/gtest.h"

namespace chorus {
namespace testing {
namespace {

using Kind = BufferSpec::Kind;
using StreamId = DevicePlan::StreamId;

TensorType F32(std::vector<int64_t> sizes) {
  TensorType type(DType::kF32, {});
  for (const int64_t size : sizes) type.dims.emplace_back(size);
  return type;
}

void AddOutput(RankBuilder* b, ValueIndex v) {
  GraphOutput output;
  output.value = v;
  b->graph().AddOutput(output);
}

Plan Compile(const Graph& graph, bool share = true, std::vector<int32_t> order = {}) {
  const absl::Status valid = ValidateGraph(graph, GraphLimits());
  EXPECT_TRUE(valid.ok()) << valid;
  PlanOptions options;
  options.share_results = share;
  options.order = std::move(order);
  absl::StatusOr<Plan> plan = CompilePlan(graph, options);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? *std::move(plan) : Plan();
}
Plan Compile(const RankBuilder& b, bool share = true, std::vector<int32_t> order = {}) {
  return Compile(const_cast<RankBuilder&>(b).graph().Build(), share, std::move(order));
}

DevicePlan Slot(const Plan& plan, size_t slot = 0) {
  absl::StatusOr<DevicePlan> decoded = DecodeDevicePlan(plan.device_plans[slot]);
  EXPECT_TRUE(decoded.ok()) << decoded.status();
  return decoded.ok() ? *std::move(decoded) : DevicePlan();
}

const BufferSpec& OutputSpec(const Plan& plan, size_t output) {
  return plan.buffers[static_cast<size_t>(plan.outputs[output].buffer)];
}

int64_t Count(const Plan& plan, Kind kind) {
  return std::count_if(plan.buffers.begin(), plan.buffers.end(),
                       [&](const BufferSpec& spec) { return spec.kind == kind; });
}

// --- Where values stand ---

TEST(PlanTest, AnEagerAllReduceIsOneStepWithoutEvents) {
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

TEST(PlanTest, MovesAreAliasesAndTheirOperandsAreCounted) {
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
  // all[2] is read by nobody: no buffer, no address.
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

TEST(PlanTest, ARootReadsItsOwnBroadcast) {
  RankBuilder b(2, 3);
  const ValueIndex x = b.Input(F32({4}));
  AddOutput(&b, b.Broadcast(x, F32({4}), 2));
  const Plan plan = Compile(b);
  EXPECT_EQ(plan.outputs[0].buffer, 0);
  EXPECT_EQ(plan.operands[0][0].buffer, 0);
  EXPECT_FALSE(plan.input_may_be_staging[0]) << "other ranks keep it";
  EXPECT_EQ(Slot(plan).steps[0].outputs[0].buffer, -1);
}

TEST(PlanTest, PairsHaveTheirMembersInTheOrderOfTheirRanks) {
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

TEST(PlanTest, OutputsMayBeInputsAliasesOrTheSameTwice) {
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

TEST(PlanTest, StagingMemoryIsReadOnlyByFloatingPointReductions) {
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

// --- Workspace ---

TEST(PlanTest, DeadValuesMakeRoomForLaterOnes) {
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

TEST(PlanTest, UnneededNodesAreLeftOutButNeverCollectives) {
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

// A block that a collective still reads is not written by the next local op, unless that op waits
// for the collective anyway.
TEST(PlanTest, MemoryThatTheOtherStreamStillReadsIsNotUsedAgain) {
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

TEST(PlanTest, WaitsStandOnlyWhereAValueCrossesStreams) {
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

TEST(PlanTest, CopiesBetweenSlotsSendAndReceive) {
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

// The donor of the only output of a graph that `build` makes of a donatable input.
template <typename F>
int32_t DonorOf(const F& build, int32_t ranks = 1) {
  RankBuilder b(0, ranks);
  GraphInput input;
  input.type = F32({3, 3});
  input.donatable = true;
  const ValueIndex x = b.graph().AddInput(input);
  GraphOutput output;
  output.value = build(&b, x);
  output.may_alias = 0;
  b.graph().AddOutput(output);
  return Compile(b).outputs.back().donor;
}

TEST(PlanTest, OutputsTakeOverAnInputOnlyWhereNobodyReadsItLater) {
  using B = RankBuilder;
  EXPECT_EQ(DonorOf([](B* b, ValueIndex x) { return b->Op("neg", {x}); }), 0);
  EXPECT_EQ(DonorOf([](B* b, ValueIndex x) {
              return b->Op("matmul", {x, x});
            }),
            -1)
      << "not elementwise";
  EXPECT_EQ(DonorOf([](B* b, ValueIndex x) {
              return b->Op("neg", {b->Op("matmul", {x, x})});
            }),
            0)
      << "read before";
  EXPECT_EQ(DonorOf([](B* b, ValueIndex x) {
              const ValueIndex y = b->Op("neg", {x});
              AddOutput(b, b->Op("add", {y, x}));
              return y;
            }),
            -1)
      << "read afterwards";
  EXPECT_EQ(DonorOf([](B* b, ValueIndex x) {
              AddOutput(b, x);
              return b->Op("neg", {x});
            }),
            -1)
      << "an output itself";
  EXPECT_EQ(DonorOf([](B* b, ValueIndex x) { return b->Op("neg", {b->AllReduce(x)}); }, 2), 0)
      << "behind the collective";
  EXPECT_EQ(DonorOf(
                [](B* b, ValueIndex x) {
                  const ValueIndex y = b->Op("neg", {x});
                  AddOutput(b, b->AllReduce(y));
                  return y;
                },
                2),
            -1)
      << "a collective needs it";
  EXPECT_EQ(DonorOf(
                [](B* b, ValueIndex x) {
                  b->AllGather(x);
                  return b->Op("neg", {x});
                },
                2),
            -1)
      << "other ranks read it where it stands, and may keep it";
}

TEST(PlanTest, OnlyAnOutputThatNobodyElseReadsHasItsMemoryAlone) {
  RankBuilder b(0, 2);
  const ValueIndex x = b.Input(F32({4}));
  const ValueIndex given = b.Op("neg", {x});
  b.AllGather(given);
  const ValueIndex reduced = b.Op("sin", {x});
  const ValueIndex twice = b.Op("cos", {x});
  const ValueIndex outputs[] = {
      b.Op("exp", {x}),                                                  // alone
      reduced,                                                           // read by other ranks
      given,                                                             // where it stands
      twice,                                                             // two outputs
      b.Op("reshape", {twice}, {{"dims", std::vector<int64_t>{2, 2}}}),  // in one buffer
      b.AllReduce(reduced),                                              // of all ranks
      x,                                                                 // the caller's
  };
  for (const ValueIndex v : outputs) AddOutput(&b, v);
  const Plan plan = Compile(b);
  std::vector<bool> sole;
  for (const Plan::Output& output : plan.outputs) sole.push_back(output.sole);
  EXPECT_EQ(sole, (std::vector<bool>{true, false, false, false, false, false, false}));
}

// Whatever may be written over comes behind all collectives, in every order of them.
TEST(PlanTest, WhatTakesOverAnInputIsHeldBack) {
  RankBuilder b(0, 2);
  GraphInput input;
  input.type = F32({4});
  input.donatable = true;
  const ValueIndex x = b.graph().AddInput(input);
  const ValueIndex y = b.graph().AddInput(input);
  GraphOutput output;
  output.value = b.Op("add", {x, b.AllReduce(x)});
  output.may_alias = 0;
  b.graph().AddOutput(output);
  output.value = b.Op("mul", {y, b.AllReduce(b.Op("sin", {y}))});
  output.may_alias = 1;
  b.graph().AddOutput(output);
  AddOutput(&b, b.AllReduce(y));
  for (const std::vector<int32_t>& order :
       std::vector<std::vector<int32_t>>{{}, {0, 1, 2}, {2, 1, 0}}) {
    const Plan plan = Compile(b, true, order);
    EXPECT_EQ(plan.outputs[0].donor, 0);
    EXPECT_EQ(plan.outputs[1].donor, 1);
    EXPECT_EQ(plan.outputs[2].donor, -1);
    const DevicePlan device = Slot(plan);
    ASSERT_EQ(device.steps.size(), 6u);
    for (size_t i = 0; i < 6; ++i) EXPECT_EQ(device.steps[i].held_back, i >= 4) << i;
    EXPECT_EQ(device.nodes[device.steps[4].node].node.op, "add");
  }
}

// --- Pieces ---

Collective Rooted(const RankBuilder& b, CollectiveKind kind, int32_t root) {
  Collective c = b.MakeCollective(kind);
  c.root = GroupRank(root);
  return c;
}

TEST(PlanTest, PiecesOfAScatteredTensorStandWhereTheRootHasThem) {
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
  EXPECT_EQ(plan.written[0].copied, 0);
  const DevicePlan device = Slot(plan);
  EXPECT_EQ(device.collectives[0].input_counts, (std::vector<int64_t>{4, 8, 0}));
  EXPECT_EQ(device.collectives[0].num_inputs, 3);
  EXPECT_EQ(device.collectives[0].num_outputs, 1);
  // Where memory is not shared, it comes to a buffer of its own.
  plan = Compile(root, false);
  EXPECT_EQ(plan.outputs[0].offset, 0);
  EXPECT_EQ(plan.written[0].copied, 32);

  RankBuilder other(0, 3);
  AddOutput(&other, other.Emit(Rooted(other, CollectiveKind::kScatter, 1), {},
                               TypeAttributes(F32({2, 2})))[0]);
  plan = Compile(other);
  EXPECT_EQ(OutputSpec(plan, 0).kind, Kind::kPeer);
  EXPECT_EQ(OutputSpec(plan, 0).list_member, 1);
  EXPECT_EQ(OutputSpec(plan, 0).list_index, 0);
}

TEST(PlanTest, PiecesFromEachMemberStandWhereItHasThem) {
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

TEST(PlanTest, OneTensorOfAllRanksPiecesIsSharedAndFilledInPlace) {
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
    EXPECT_EQ(plan.written[0].copied, (8 - 2) * 4 * 4);
    EXPECT_EQ(plan.written[0].shared, share);
  }
  // An output of the graph would keep the whole of the result.
  AddOutput(&b, made);
  const Plan plan = Compile(b);
  EXPECT_NE(plan.operands[0][0].buffer, plan.outputs[0].buffer);
  EXPECT_EQ(plan.written[0].copied, 8 * 4 * 4);
}

TEST(PlanTest, FactorsOfAProductStandWithTheirRanksAndInputsAreKeptForThem) {
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
  EXPECT_EQ(plan.written[0].reduced, 16);
  EXPECT_EQ(plan.written[0].copied, 0);
  // Another rank may want the gradient that this one does not: its operand is no scratch.
  RankBuilder quiet(1, 2);
  c.rank = GroupRank(1);
  c.wants_grad = false;
  AddOutput(&quiet, quiet.Emit(c, {quiet.Op("neg", {quiet.Input(F32({4}))})})[0]);
  plan = Compile(quiet);
  EXPECT_EQ(plan.buffers[static_cast<size_t>(plan.operands[0][0].buffer)].kind, Kind::kOwned);
}

TEST(PlanTest, HoldersAreWrittenWhereTheyAreUsed) {
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

TEST(PlanTest, VotesSayWhatEachRankKnowsOfTheRows) {
  const auto text = [](RankBuilder* b, const Collective& c, std::vector<ValueIndex> inputs,
                       Attributes attributes = {}, absl::string_view op = "") {
    b->Emit(c, std::move(inputs), std::move(attributes), op);
    return Compile(*b).votes->participations[0].descriptor.ToString();
  };
  {
    RankBuilder b(0, 2);
    EXPECT_EQ(text(&b, b.MakeCollective(CollectiveKind::kAllGather), {b.Input(F32({3, 2}))}, {},
                   "all_gather_into_tensor"),
              "all_gather f32[3,2]");
  }
  {
    RankBuilder b(0, 2);
    Collective c = b.MakeCollective(CollectiveKind::kAllGather);
    c.counts = {3, 1};
    EXPECT_EQ(text(&b, c, {b.Input(F32({3, 2}))}),
              "all_gather f32[*,2] sends 3 rows receives [3,1] rows");
  }
  {
    RankBuilder b(0, 2);
    EXPECT_EQ(text(&b, Rooted(b, CollectiveKind::kGather, 1), {b.Input(F32({3, 2}))}),
              "gather root=1 f32[*,2] sends 3 rows");
  }
  {
    RankBuilder b(1, 2);
    EXPECT_EQ(text(&b, Rooted(b, CollectiveKind::kGather, 1), {b.Input(F32({3}))}),
              "gather root=1 f32[*] sends 3 rows receives 3 rows");
  }
  {
    RankBuilder b(1, 2);
    EXPECT_EQ(text(&b, Rooted(b, CollectiveKind::kScatter, 0), {}, TypeAttributes(F32({0, 7}))),
              "scatter root=0 f32[*,7] receives 0 rows");
  }
  {
    RankBuilder b(0, 2);
    Collective c = b.MakeCollective(CollectiveKind::kReduceScatter);
    c.counts = {1, 2};
    EXPECT_EQ(text(&b, c, {b.Input(F32({3}))}, {}, "reduce_scatter_tensor"),
              "reduce_scatter SUM f32[*] sends [1,2] rows receives 1 row");
  }
}

// --- Votes ---

TEST(PlanTest, VotesSayWhatEachCollectiveIsAndWhatItFollows) {
  RankBuilder b(1, 3);
  const ValueIndex x = b.Input(F32({2, 2}));
  const ValueIndex r0 = b.AllReduce(x);
  const ValueIndex r1 = b.AllReduce(b.Op("neg", {r0}));
  const std::vector<ValueIndex> g2 = b.AllGather(x);
  const ValueIndex r3 = b.AllReduce(b.Op("add", {b.Op("add", {r0, r1}), g2[0]}));
  b.Broadcast(-1, F32({7}), 2);
  b.Recv(F32({5}), 0, 9);
  b.Barrier();
  AddOutput(&b, r3);
  const Plan plan = Compile(b);
  const auto& p = plan.votes->participations;
  ASSERT_EQ(p.size(), 7u);
  EXPECT_EQ(p[0].descriptor.ToString(), "all_reduce SUM f32[2,2]");
  EXPECT_TRUE(p[0].after.empty());
  EXPECT_EQ(p[1].after, (std::vector<int32_t>{0}));
  EXPECT_TRUE(p[2].after.empty());
  EXPECT_EQ(p[3].after, (std::vector<int32_t>{1, 2})) << "0 is before 1 anyway";
  EXPECT_EQ(p[4].descriptor.root, GroupRank(2));
  EXPECT_EQ(p[4].descriptor.dims, (std::vector<int64_t>{7}));
  EXPECT_EQ(p[5].descriptor.kind, CollectiveKind::kSend);
  EXPECT_TRUE(p[5].is_recv);
  EXPECT_EQ(p[5].peer, GroupRank(0));
  EXPECT_EQ(p[5].tag, 9);
  EXPECT_EQ(p[6].descriptor.kind, CollectiveKind::kBarrier);
  for (const Participation& part : p) {
    EXPECT_EQ(part.member, GroupRank(1));
    EXPECT_TRUE(part.wants_grad);
  }
  EXPECT_EQ(p[1].node, 2);
}

TEST(PlanTest, FingerprintsTellVotesApartButNotSources) {
  const auto build = [](int64_t size, bool more, const std::string& source) {
    RankBuilder b(0, 2);
    const ValueIndex x = b.Input(F32({size}));
    AddOutput(&b, b.AllReduce(x));
    if (more) b.Barrier();
    Graph graph = b.graph().Build();
    graph.nodes[0].source = source;
    return Compile(graph).votes->fingerprint;
  };
  EXPECT_EQ(build(4, false, "a.cc:1"), build(4, false, "b.cc:2"));
  EXPECT_NE(build(4, false, ""), build(5, false, ""));
  EXPECT_NE(build(4, false, ""), build(4, true, ""));
}

// Ranks that make one call of two collectives and ranks that make two calls must not be taken for
// ranks that do the same.
TEST(PlanTest, PartsOfACallAreInTheVotesAndTheirFingerprint) {
  const auto build = [](int32_t part) {
    RankBuilder b(0, 2);
    const ValueIndex x = b.Input(F32({4}));
    AddOutput(&b, b.AllReduce(x));
    AddOutput(&b, b.AllReduce(x));
    Graph graph = b.graph().Build();
    graph.nodes[1].collective->part = part;
    return Compile(graph).votes;
  };
  EXPECT_EQ(build(1)->participations[0].part, 0);
  EXPECT_EQ(build(1)->participations[1].part, 1);
  EXPECT_NE(build(1)->fingerprint, build(0)->fingerprint);
}

TEST(PlanTest, AnotherOrderOfCollectivesIsFollowed) {
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

// --- Several device slots ---

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
  struct Made {
    ValueIndex value;
    int32_t behind;  // it needs instances below this one only
  };
  std::vector<std::vector<Made>> made(static_cast<size_t>(slots));  // by slot
  for (int32_t d = 0; d < slots; ++d) {
    GraphInput input;
    input.type = F32({4});
    input.device_slot = d;
    made[static_cast<size_t>(d)].push_back({builder.AddInput(input), 0});
  }
  const auto emit = [&](NodeSpec spec, int32_t behind) {
    const auto slot = static_cast<size_t>(spec.device_slot);
    absl::StatusOr<std::vector<ValueIndex>> values = builder.Emit(std::move(spec));
    ASSERT_TRUE(values.ok()) << values.status();
    made[slot].push_back({(*values)[0], behind});
  };
  const int32_t instances = 1 + draw(5);
  std::vector<int32_t> next = ahead;
  const auto is_done = [&] {
    return std::all_of(next.begin(), next.end(), [&](int32_t n) { return n >= instances; });
  };
  while (!is_done()) {
    const int32_t slot = draw(slots);
    const auto& own = made[static_cast<size_t>(slot)];
    const Made from = own[static_cast<size_t>(draw(static_cast<int32_t>(own.size())))];
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
  for (const auto& own : made) {
    GraphOutput output;
    output.value = own.back().value;
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

TEST(PlanTest, AllSlotsMeetInOneOrder) {
  const char* const given = std::getenv("CHORUS_TEST_SEED");
  const uint64_t seed = given != nullptr ? std::stoull(given) : std::random_device()();
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

TEST(PlanTest, CallsOfOneInstanceStandTogetherInAnOrder) {
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

TEST(PlanTest, TwoMembersOnOneSlotAreRefused) {
  GroupSlot slot;
  slot.size = 2;
  slot.held = {GroupRank(0), GroupRank(1)};
  slot.device_slots = {0, 0};
  Graph graph;
  graph.group_slots = {slot};
  EXPECT_EQ(CompilePlan(graph, {}).status().code(), absl::StatusCode::kUnimplemented);
}

// --- Bytes ---

TEST(PlanTest, DevicePlansComeBackAsTheyWereAndTruncatedOnesDoNot) {
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

TEST(PlanTest, UnsoundDevicePlansAreRefused) {
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
}

// --- Equal work ---

// Data in, parameters and momentum in and out: what every rank does with what all of them get.
Graph UpdateGraph(int rank, const std::string& last = "sub", int64_t size = 10000) {
  RankBuilder b(rank, 3);
  const ValueIndex data = b.Input(F32({size}));
  const ValueIndex parameters = b.Input(F32({size}));
  const ValueIndex momentum = b.Input(F32({size}));
  const ValueIndex seen = b.Op("mul", {data, parameters});
  const ValueIndex moved = b.Op("add", {momentum, b.AllReduce(seen)});
  AddOutput(&b, moved);
  AddOutput(&b, b.Op(last, {parameters, b.Op("neg", {moved})}));
  AddOutput(&b, seen);
  return b.graph().Build();
}

TEST(PlanTest, AnUpdateIsAGroupOfEqualWork) {
  const Plan plan = Compile(UpdateGraph(1));
  ASSERT_EQ(plan.equal_groups.size(), 1u);
  const Plan::EqualGroup& group = plan.equal_groups[0];
  EXPECT_EQ(group.kernels, 3);
  ASSERT_EQ(group.leaves.size(), 3u);
  EXPECT_EQ(group.leaves[0].input, 2);
  EXPECT_EQ(group.leaves[1].participation, 0);
  EXPECT_EQ(group.leaves[1].place, 0);
  EXPECT_EQ(group.leaves[2].input, 1);
  ASSERT_EQ(group.results.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(plan.outputs[i].equal_group, 0);
    EXPECT_EQ(plan.outputs[i].place, static_cast<int32_t>(i));
    EXPECT_EQ(plan.outputs[i].buffer, group.results[i]);
    EXPECT_EQ(OutputSpec(plan, i).kind, Kind::kOwned);
  }
  EXPECT_EQ(plan.outputs[2].equal_group, -1) << "the collective needs it";
  // Its kernels may be left out; behind them, and behind the collective, is the barrier.
  const DevicePlan device = Slot(plan);
  EXPECT_EQ(device.num_equal_groups, 1);
  ASSERT_EQ(device.steps.size(), 6u);
  for (const size_t s : {2, 3, 4}) EXPECT_EQ(device.steps[s].equal_group, 0) << s;
  for (const size_t s : {0, 1, 5}) EXPECT_EQ(device.steps[s].equal_group, -1) << s;
  EXPECT_EQ(device.collectives[1].kind, CollectiveKind::kBarrier);
  EXPECT_EQ(device.steps[5].wait, device.steps[4].record);
  ASSERT_EQ(plan.collectives[0].size(), 2u);
  EXPECT_TRUE(plan.collectives[0][1].equal_work);
}

TEST(PlanTest, GroupsOfEqualWorkAreEqualAcrossRanksAndDifferWithTheWork) {
  const auto hash = [](const Graph& graph) { return Compile(graph).equal_groups.at(0).hash; };
  EXPECT_EQ(hash(UpdateGraph(0)), hash(UpdateGraph(2)));
  EXPECT_NE(hash(UpdateGraph(0)), hash(UpdateGraph(0, "add")));
  EXPECT_NE(hash(UpdateGraph(0)), hash(UpdateGraph(0, "sub", 10001)));
}

TEST(PlanTest, WhatIsNoEqualWork) {
  const Graph update = UpdateGraph(1);
  EXPECT_TRUE(Compile(UpdateGraph(1, "sub", 500)).equal_groups.empty()) << "too small";
  EXPECT_TRUE(Compile(update, /*share=*/false).equal_groups.empty()) << "devices apart";
  PlanOptions off;
  off.share_equal_work = false;
  const absl::StatusOr<Plan> alone = CompilePlan(update, off);
  ASSERT_TRUE(alone.ok());
  EXPECT_TRUE(alone->equal_groups.empty());
  EXPECT_EQ(Slot(*alone).steps.size(), 5u) << "no barrier either";
  EXPECT_EQ(alone->outputs[0].equal_group, -1);

  RankBuilder local(1, 3);
  AddOutput(&local, local.Op("neg", {local.Input(F32({100000}))}));
  AddOutput(&local,
            local.Op("neg", local.Apply("reduce_scatter_tensor", {local.Input(F32({300000}))})));
  EXPECT_TRUE(Compile(local).equal_groups.empty())
      << "depends on no collective, or on one that gives each rank its own";
}

// What an output and a collective have in common is every rank's: only what follows is shared.
TEST(PlanTest, EqualWorkEndsWhereSomethingElseNeedsIt) {
  RankBuilder b(1, 3);
  const ValueIndex total = b.AllReduce(b.Input(F32({10000})));
  const ValueIndex half = b.Op("neg", {total});
  AddOutput(&b, half);
  AddOutput(&b, b.Op("neg", {half}));
  AddOutput(&b, b.AllReduce(half));
  const Plan plan = Compile(b);
  ASSERT_EQ(plan.equal_groups.size(), 1u);
  EXPECT_EQ(plan.equal_groups[0].kernels, 1);
  EXPECT_EQ(plan.outputs[0].equal_group, -1);
  EXPECT_EQ(plan.outputs[1].equal_group, 0);
  EXPECT_EQ(plan.outputs[2].participation, 1);
}

// --- Speed ---

// What this thread has computed: a busy machine does not count.
absl::Duration ThreadTime() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return absl::DurationFromTimespec(now);
}

// A graph of about 2 * `size` nodes.
Graph LargeGraph(int shape, int size) {
  RankBuilder b(0, 2);
  const ValueIndex x = b.Input(F32({16}));
  ValueIndex v = x;
  for (int i = 0; i < size; ++i) {
    switch (shape) {
      case 0:  // a chain of local ops
        v = b.Op("add", {b.Op("neg", {v}), x});
        break;
      case 1:  // collectives that need each other
        v = b.Op("neg", {b.AllReduce(v)});
        break;
      case 2:  // a sum of independent collectives
        v = b.Op("add", {v, b.AllReduce(x)});
        break;
      case 3:  // updates that are equal on all ranks
        AddOutput(&b, b.Op("neg", {b.AllReduce(b.Input(F32({10000})))}));
        break;
      default:  // a collective of each partial sum of collectives
        v = b.Op("add", {v, b.AllReduce(v)});
    }
  }
  AddOutput(&b, v);
  return b.graph().Build();
}

absl::Duration TimeToPlan(const Graph& graph) {
  const absl::Duration start = ThreadTime();
  const absl::StatusOr<Plan> plan = CompilePlan(graph, {});
  EXPECT_TRUE(plan.ok()) << plan.status();
  return ThreadTime() - start;
}

// Ten times the nodes take about ten times as long; anything quadratic takes a hundred times.
TEST(PlanTest, TenThousandNodesArePlannedInLinearTime) {
  for (const int shape : {0, 1, 2, 3, 4}) {
    const Graph small = LargeGraph(shape, 500);
    const Graph large = LargeGraph(shape, 5000);
    absl::Duration least = absl::InfiniteDuration();
    for (int i = 0; i < 5; ++i) least = std::min(least, TimeToPlan(small));
    const absl::Duration took = std::min(TimeToPlan(large), TimeToPlan(large));
    std::printf("shape %d: %s, a tenth of it %s\n", shape, absl::FormatDuration(took).c_str(),
                absl::FormatDuration(least).c_str());
    EXPECT_LT(took, 40 * least) << "shape " << shape;
  }
}

}  // namespace
}  // namespace testing
}  // namespace chorus
