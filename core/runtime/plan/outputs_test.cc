#include "core/runtime/plan/outputs.h"

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

TEST(OutputsTest, OutputsTakeOverAnInputOnlyWhereNobodyReadsItLater) {
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
  const auto whole = [](B* b, ValueIndex v) {
    return b->Op("cast", {v}, Attributes{{"dtype", "i64"}});
  };
  EXPECT_EQ(DonorOf([&whole](B* b, ValueIndex x) {
              const ValueIndex y = b->Op("neg", {x});
              const ValueIndex z = whole(b, y);
              AddOutput(b, b->Op("div", {z, z}));
              return y;
            }),
            -1)
      << "what reads it may fail when it is written";
  EXPECT_EQ(DonorOf([&whole](B* b, ValueIndex x) {
              const ValueIndex y = b->Op("neg", {x});
              AddOutput(b, whole(b, y));
              return y;
            }),
            0)
      << "what reads it cannot fail";
  EXPECT_EQ(DonorOf([&whole](B* b, ValueIndex x) {
              const ValueIndex z = whole(b, b->Op("matmul", {x, x}));
              AddOutput(b, b->Op("div", {z, z}));
              return b->Op("neg", {x});
            }),
            0)
      << "what may fail comes before";
  RankBuilder divides(0, 1);
  GraphInput whole_state;
  whole_state.type = TensorType(DType::kI64, {3});
  whole_state.donatable = true;
  GraphOutput quotient;
  const ValueIndex p = divides.graph().AddInput(whole_state);
  quotient.value = divides.Op("div", {p, p});
  quotient.may_alias = 0;
  divides.graph().AddOutput(quotient);
  EXPECT_EQ(Compile(divides).outputs.back().donor, -1) << "the writer itself may fail";
}

TEST(OutputsTest, OnlyAnOutputThatNobodyElseReadsHasItsMemoryAlone) {
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

// Whoever waits for `there` waits for the device on which it is: the other one may still read the
// bytes, for `of_it`.
TEST(OutputsTest, WhatTwoDevicesOfARunReadIsNotOnesAlone) {
  RankBuilder b(0, 2, /*num_device_slots=*/2);
  const ValueIndex x = b.Op("neg", {b.Input(F32({4}))});
  const ValueIndex there = b.Op("copy", {x}, {}, /*device_slot=*/1);
  const ValueIndex of_it = b.Op("sin", {x});
  AddOutput(&b, there);
  AddOutput(&b, of_it);
  PlanOptions options;
  options.one_domain = OneDomain{{true}, true};
  const absl::StatusOr<Plan> plan = CompilePlan(b.graph().Build(), options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->buffers[plan->outputs[0].buffer].kind, BufferSpec::Kind::kOwned);
  EXPECT_FALSE(plan->outputs[0].sole);
}

// Whatever may be written over comes behind all collectives, in every order of them.
TEST(OutputsTest, WhatTakesOverAnInputIsHeldBack) {
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

}  // namespace
}  // namespace testing
}  // namespace chorus
