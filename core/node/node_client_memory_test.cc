// The node and the memory of its clients: what is read there, and outputs that go there.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/backend/fault/fault_backend.h"
#include "core/backend/fault/fault_script.h"
#include "core/backend/sim/sim_backend.h"
#include "core/base/error.h"
#include "core/base/work.h"
#include "core/node/node_rig.h"
#include "core/ops/graph_builder.h"
#include "core/ops/host_kernel.h"
#include "core/ops/host_kernels.h"
#include "core/transport/command.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

// The sum, twice.
Graph TwoSumsGraph(int rank, int size, TensorType type) {
  GraphBuilder builder(1, {SlotOf(rank, size)});
  const ValueIndex x = AddInput(&builder, std::move(type));
  const ValueIndex sum = AddAllReduce(&builder, x, rank, "into.cc:1");
  AddOutput(&builder, sum);
  AddOutput(&builder, sum);
  return builder.Build();
}

// Each rank has its own copy, whichever ranks share the result, and may write there.
TEST_F(NodeTest, OutputsGoIntoClientMemory) {
  constexpr int kRanks = 3;
  for (const int devices_per_domain : {0, 1, 2}) {
    SCOPED_TRACE(devices_per_domain);
    ranks_.clear();
    loop_.reset();
    devices_per_domain == 0 ? Start(kRanks) : StartOnSim(kRanks, devices_per_domain);
    std::vector<std::unique_ptr<ClientMemory>> memory;
    for (int r = 0; r < kRanks; ++r) {
      memory.push_back(std::make_unique<ClientMemory>(ranks_[r].get(), 64));
      ranks_[r]->Register(0, TwoSumsGraph(r, kRanks, TensorType(DType::kF32, {2, 2})));
      auto run =
          ranks_[r]->WorldRun(0, {DirectRank::Inline({1, 2, 3, 1.0f + r})}, {{0, 1}, {1, 1}});
      // Rank 1 has it transposed.
      run.outputs[1] = r == 1 ? memory[r]->From(8, {1, 2}) : memory[r]->From(8);
      ranks_[r]->Submit(std::move(run));
    }
    for (int r = 0; r < kRanks; ++r) {
      ASSERT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
      EXPECT_EQ(memory[r]->Read(7, 13), r == 1 ? (std::vector<float>{-1, 3, 9, 6, 6, -1})
                                               : (std::vector<float>{-1, 3, 6, 9, 6, -1}));
      memory[r]->data()[8] = 77;
    }
    for (int r = 0; r < kRanks; ++r) {
      EXPECT_THAT(*ranks_[r]->Read({0, 1}), testing::ElementsAre(3, 6, 9, 6));
      EXPECT_EQ(memory[r]->Read(8, 9), std::vector<float>{77});
    }
    EXPECT_EQ(ranks_[0]->Stats().live_runs, 0);
  }
}

// The root's own piece is a part of its operand, the other's stands with the root.
TEST_F(NodeTest, PartsOfABufferGoIntoClientMemory) {
  constexpr int kRanks = 2;
  Start(kRanks);
  std::vector<std::unique_ptr<ClientMemory>> memory;
  for (int r = 0; r < kRanks; ++r) {
    memory.push_back(std::make_unique<ClientMemory>(ranks_[r].get(), 64));
    GraphBuilder builder(1, {SlotOf(r, kRanks)});
    const ValueIndex x = AddInput(&builder, TensorType(DType::kF32, {4}));
    NodeSpec scatter;
    scatter.op = "scatter_tensor";
    scatter.source = "into.cc:2";
    scatter.collective = Collective();
    scatter.collective->kind = CollectiveKind::kScatter;
    scatter.collective->rank = GroupRank(r);
    scatter.collective->root = GroupRank(1);
    if (r == 1) {
      scatter.inputs = {AddOp(&builder, "neg", {x})};
    } else {
      scatter.attributes = TypeAttributes(TensorType(DType::kF32, {2}));
    }
    AddOutput(&builder, (*builder.Emit(scatter))[0]);
    ranks_[r]->Register(0, builder.Build());
    auto run = ranks_[r]->WorldRun(0, {DirectRank::Inline({1, 2, 3, 4})}, {{0, 1}});
    run.outputs[0] = memory[r]->From(3);
    ranks_[r]->Submit(std::move(run));
  }
  for (int r = 0; r < kRanks; ++r) {
    ASSERT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
    EXPECT_EQ(memory[r]->Read(2, 6),
              r == 1 ? (std::vector<float>{-1, -3, -4, -1}) : (std::vector<float>{-1, -1, -2, -1}));
  }
}

// What takes long is copied in the background, and the outcome comes when it is there.
TEST_F(NodeTest, LargeOutputsGoIntoClientMemoryToo) {
  for (const bool host : {true, false}) {
    for (const bool strided : {false, true}) {
      SCOPED_TRACE(testing::Message() << (host ? "host" : "sim") << (strided ? ", strided" : ""));
      ranks_.clear();
      loop_.reset();
      host ? Start(1) : StartOnSim(1);
      ClientMemory memory(ranks_[0].get(), 2 * kLarge);
      ranks_[0]->Register(0, OnesGraph());
      auto run = DirectRank::LocalRun(0, {}, {{0, 1}});
      run.outputs[0] = strided ? memory.From(1, {2}) : memory.From(kLarge);
      ranks_[0]->Submit(std::move(run));
      ASSERT_TRUE(ranks_[0]->LastOutcome().ok()) << ranks_[0]->LastOutcome();
      const std::vector<float> got = memory.Read(0, 2 * kLarge);
      EXPECT_EQ(std::count(got.begin(), got.end(), 1.0f), kLarge);
      EXPECT_EQ(got[0], -1.0f);
      EXPECT_EQ(got[static_cast<size_t>(2 * kLarge - 1)], 1.0f);
    }
  }
}

// Each is small enough to be copied at once, by the node or by the device; all of them are not.
TEST_F(NodeTest, ManyCopiesAreNotOneSlice) {
  constexpr int kInputs = 64;
  for (const int64_t rows : {30000, 131072}) {  // of two: 240 kB, 1 MiB
    ranks_.clear();
    loop_.reset();
    Start(1);
    ClientMemory memory(ranks_[0].get(), 2 * rows);
    GraphBuilder builder(1, {});
    for (int i = 0; i < kInputs; ++i) {
      const ValueIndex x = AddInput(&builder, TensorType(DType::kF32, {rows, 2}));
      AddOutput(&builder, AddOp(&builder, "neg", {x}));
    }
    ranks_[0]->Register(0, builder.Build());
    for (const bool strided : {false, true}) {
      SCOPED_TRACE(testing::Message() << rows << (strided ? ", strided" : ""));
      const std::vector<int64_t> strides =
          strided ? std::vector<int64_t>{1, rows} : std::vector<int64_t>{};
      std::vector<Binding> inputs(kInputs);
      for (Binding& input : inputs) input = memory.From(0, strides).into;
      auto run = DirectRank::LocalRun(0, inputs, std::vector<TensorId>(kInputs));
      for (OutBinding& output : run.outputs) output = memory.From(0, strides);
      memory.data()[0] = memory.data()[2] = -1;
      memory.data()[1] = 5;
      ranks_[0]->Submit(std::move(run));
      ASSERT_TRUE(ranks_[0]->LastOutcome().ok()) << ranks_[0]->LastOutcome();
      EXPECT_EQ(memory.Read(0, 3), (std::vector<float>{1, -5, 1}));
      EXPECT_LE(ranks_[0]->Stats().largest_slice_work, kMaxSliceWork);
    }
  }
}

// However small: what there is no time for comes in other turns, and all of it is there at the end.
TEST_F(NodeTest, ManySmallCopiesAreNotOneSlice) {
  constexpr int kCopies = 1000;
  constexpr int64_t kRows = 3;  // of two
  for (const bool host : {true, false}) {
    for (const bool strided : {false, true}) {
      SCOPED_TRACE(testing::Message() << (host ? "host" : "sim") << (strided ? ", strided" : ""));
      ranks_.clear();
      loop_.reset();
      host ? Start(1) : StartOnSim(1);
      ClientMemory memory(ranks_[0].get(), 4 * kRows * kCopies);
      const std::vector<int64_t> strides =
          strided ? std::vector<int64_t>{1, kRows} : std::vector<int64_t>{};
      GraphBuilder builder(1, {});
      std::vector<Binding> inputs;
      std::vector<float> expected;
      for (int i = 0; i < kCopies; ++i) {
        const ValueIndex x = AddInput(&builder, TensorType(DType::kF32, {kRows, 2}));
        AddOutput(&builder, AddOp(&builder, "neg", {x}));
        inputs.push_back(memory.From(2 * kRows * i, strides).into);
        for (int64_t j = 0; j < 2 * kRows; ++j) {
          const auto value = static_cast<float>(10 * i + j);
          memory.data()[2 * kRows * i + j] = value;
          expected.push_back(-value);
        }
      }
      ranks_[0]->Register(0, builder.Build());
      auto run = DirectRank::LocalRun(0, inputs, std::vector<TensorId>(kCopies));
      for (int i = 0; i < kCopies; ++i) {
        run.outputs[static_cast<size_t>(i)] = memory.From(2 * kRows * (kCopies + i), strides);
      }
      ranks_[0]->Submit(std::move(run));
      ASSERT_TRUE(ranks_[0]->LastOutcome().ok()) << ranks_[0]->LastOutcome();
      EXPECT_EQ(memory.Read(2 * kRows * kCopies, 4 * kRows * kCopies), expected);
      EXPECT_LE(ranks_[0]->Stats().largest_slice_work, kMaxSliceWork);
      EXPECT_EQ(ranks_[0]->Stats().live_runs, 0);
    }
  }
}

// Each is found, bound and written by itself.
TEST_F(NodeTest, ARunHasSoManyInputsThatComeAsBytes) {
  for (const bool host : {true, false}) {
    SCOPED_TRACE(host ? "host" : "sim");
    ranks_.clear();
    loop_.reset();
    host ? Start(1) : StartOnSim(1);
    for (const int inputs : {4095, 4096}) {  // and an output into client memory
      ClientMemory memory(ranks_[0].get(), 1);
      GraphBuilder builder(1, {});
      for (int i = 0; i < inputs; ++i) AddInput(&builder, TensorType(DType::kF32, {}));
      AddOutput(&builder, AddOp(&builder, "neg", {ValueIndex(inputs - 1)}));
      ranks_[0]->Register(inputs - 4095, builder.Build());
      std::vector<Binding> bytes;
      for (int i = 0; i < inputs; ++i) {
        bytes.push_back(DirectRank::Inline({static_cast<float>(i)}));
      }
      auto run = DirectRank::LocalRun(inputs - 4095, bytes, {{0, 1}});
      run.outputs[0] = memory.From(0);
      ranks_[0]->Submit(std::move(run));
      const absl::Status outcome = ranks_[0]->LastOutcome();
      if (inputs == 4095) {
        EXPECT_TRUE(outcome.ok()) << outcome;
        EXPECT_EQ(memory.Read(0, 1), std::vector<float>{-4094});
      } else {
        EXPECT_EQ(ErrorOf(outcome).reason, Reason::kMalformed) << outcome;
        EXPECT_THAT(std::string(outcome.message()), testing::HasSubstr("this one has 4097"));
      }
    }
    EXPECT_LE(ranks_[0]->Stats().largest_slice_work, kMaxSliceWork);
  }
}

TEST_F(NodeTest, WhereAnOutputCannotGoTheRunIsRefusedOnAllRanks) {
  Start(2);
  ClientMemory memory(ranks_[0].get(), 1024);
  OutBinding unknown = memory.From(0);
  unknown.into.arena = ArenaId(999);
  const std::vector<std::pair<OutBinding, std::string>> wrong = {
      {memory.From(1023), "does not lie inside an arena of 4096 bytes"},
      {memory.From(0, {1, 1}), "each element needs a place of its own"},
      {memory.From(0, {2}), "1 strides for f32[2,2], which has 2 dimensions"},
      {unknown, "999"},
  };
  for (int r = 0; r < 2; ++r) {
    ranks_[r]->Register(0, TwoSumsGraph(r, 2, TensorType(DType::kF32, {2, 2})));
  }
  for (int32_t i = 0; i < static_cast<int32_t>(wrong.size()); ++i) {
    for (int r = 0; r < 2; ++r) {
      auto run =
          ranks_[r]->WorldRun(0, {DirectRank::Inline({1, 2, 3, 4})}, {{2 * i, 1}, {2 * i + 1, 1}});
      if (r == 0) run.outputs[1] = wrong[static_cast<size_t>(i)].first;
      ranks_[r]->Submit(std::move(run));
    }
    EXPECT_THAT(std::string(ranks_[0]->LastOutcome().message()),
                testing::HasSubstr(wrong[static_cast<size_t>(i)].second));
    EXPECT_THAT(std::string(ranks_[1]->LastOutcome().message()),
                testing::HasSubstr(wrong[static_cast<size_t>(i)].second));
    for (int r = 0; r < 2; ++r) ranks_[r]->NextEpoch();
  }
  const std::vector<float> got = memory.Read(0, 1024);
  EXPECT_EQ(std::count(got.begin(), got.end(), -1.0f), 1024);
}

// It is made in the background, for it is strided.
TEST_F(NodeTest, WhatReadsATensorReadsAllOfItHoweverItIsMade) {
  constexpr int64_t kRows = 2 << 20;
  for (const bool sim : {false, true}) {
    for (const bool strided : {false, true}) {
      SCOPED_TRACE(testing::Message() << (sim ? "sim" : "host") << (strided ? ", strided" : ""));
      ranks_.clear();
      loop_.reset();
      sim ? StartOnSim(1) : Start(1);
      ClientMemory memory(ranks_[0].get(), 2 * kRows);
      std::fill(memory.data(), memory.data() + 2 * kRows, 7.0f);
      ranks_[0]->Register(0, NegateGraph(2 * kRows));
      CreateTensor create;
      create.tensor = {0, 1};
      create.type = TensorType(DType::kF32, {2 * kRows});
      create.source =
          memory.From(0, strided ? std::vector<int64_t>{0} : std::vector<int64_t>{}).into;
      std::vector<CommandBody> commands = {std::move(create)};
      commands.push_back(DirectRank::LocalRun(0, {TensorId{0, 1}}, {{1, 1}}));
      ranks_[0]->SubmitTogether(std::move(commands));
      ASSERT_TRUE(ranks_[0]->LastOutcome().ok()) << ranks_[0]->LastOutcome();
      const absl::StatusOr<std::vector<float>> got = ranks_[0]->Read({1, 1});
      ASSERT_TRUE(got.ok()) << got.status();
      EXPECT_EQ(std::count(got->begin(), got->end(), -7.0f), 2 * kRows);
    }
  }
}

TEST_F(NodeTest, WhatReadsATensorThatCouldNotBeMadeFailsWithIt) {
  constexpr int64_t kElements = 128 << 10;
  Start(1, {}, "copy error");
  ClientMemory memory(ranks_[0].get(), kElements);
  ranks_[0]->Register(0, NegateGraph(kElements));
  CreateTensor create;
  create.tensor = {0, 1};
  create.type = TensorType(DType::kF32, {kElements});
  create.source = memory.From(0).into;
  std::vector<CommandBody> commands = {std::move(create)};
  for (int32_t i = 0; i < 3; ++i) {
    commands.push_back(DirectRank::LocalRun(0, {TensorId{i, 1}}, {{i + 1, 1}}));
  }
  ranks_[0]->SubmitTogether(std::move(commands));
  for (int32_t slot = 3; slot >= 0; --slot) {
    const absl::Status read = ranks_[0]->Read({slot, 1}).status();
    EXPECT_EQ(ErrorOf(read).reason, Reason::kExecFailed) << slot << ": " << read;
    EXPECT_THAT(std::string(read.message()), testing::HasSubstr("injected fault: copy")) << slot;
  }
}

TEST_F(NodeTest, ARunWhoseOwnBytesDoNotArriveFailsAndWhatComesOfIt) {
  SimBackendOptions sim;
  sim.devices = 1;
  sim.make_kernel = MakeHostKernel;
  StartOn(CreateFaultBackend(CreateSimBackend(sim), *ParseFaultScript("copy error"), nullptr),
          OneEach(1), {});
  ClientMemory memory(ranks_[0].get(), 2);
  ranks_[0]->Register(0, NegateGraph(2));
  ranks_[0]->SubmitTogether({DirectRank::LocalRun(0, {memory.From(0).into}, {{0, 1}}),
                             DirectRank::LocalRun(0, {TensorId{0, 1}}, {{1, 1}})});
  for (const int32_t slot : {1, 0}) {
    const absl::Status read = ranks_[0]->Read({slot, 1}).status();
    EXPECT_THAT(std::string(read.message()), testing::HasSubstr("injected fault: copy")) << slot;
  }
  ranks_[0]->Submit(DirectRank::LocalRun(0, {memory.From(0).into}, {{2, 1}}));
  EXPECT_EQ(ranks_[0]->Read({2, 1})->at(1), 1);
}

TEST_F(NodeTest, ARunThatFailsWritesNothingIntoClientMemory) {
  Start(1, {}, "launch error");
  ClientMemory memory(ranks_[0].get(), 1024);
  ranks_[0]->Register(0, NegateGraph(2));
  auto run = DirectRank::LocalRun(0, {DirectRank::Inline({1, 2})}, {{0, 1}});
  run.outputs[0] = memory.From(0);
  ranks_[0]->Submit(run);
  EXPECT_EQ(ErrorOf(ranks_[0]->LastOutcome()).reason, Reason::kExecFailed);
  EXPECT_EQ(memory.Read(0, 3), (std::vector<float>{-1, -1, -1}));
  ranks_[0]->Submit(run);
  EXPECT_TRUE(ranks_[0]->LastOutcome().ok());
  EXPECT_EQ(memory.Read(0, 3), (std::vector<float>{-1, -2, -1}));
}

// Its other results are there all the same.
TEST_F(NodeTest, ACopyIntoClientMemoryThatFailsIsTheRunsError) {
  SimBackendOptions sim;
  sim.devices = 1;
  sim.make_kernel = MakeHostKernel;
  // The first copy brings the input.
  StartOn(
      CreateFaultBackend(CreateSimBackend(sim), *ParseFaultScript("copy error skip=1"), nullptr),
      OneEach(1), {});
  ClientMemory memory(ranks_[0].get(), 1024);
  GraphBuilder builder(1, {});
  const ValueIndex y = AddOp(&builder, "neg", {AddInput(&builder, TensorType(DType::kF32, {2}))});
  AddOutput(&builder, y);
  AddOutput(&builder, y);
  ranks_[0]->Register(0, builder.Build());
  auto run = DirectRank::LocalRun(0, {DirectRank::Inline({1, 2})}, {{0, 1}, {1, 1}});
  run.outputs[1] = memory.From(0);
  ranks_[0]->Submit(std::move(run));
  EXPECT_EQ(ErrorOf(ranks_[0]->LastOutcome()).reason, Reason::kExecFailed);
  EXPECT_THAT(*ranks_[0]->Read({0, 1}), testing::ElementsAre(-1, -2));
  EXPECT_EQ(ranks_[0]->Stats().live_runs, 0);
}

// The session goes while its output is on its way.
TEST_F(NodeTest, ASessionMayEndWhileAnOutputGoesIntoItsMemory) {
  SimBackendOptions sim;
  sim.devices = 2;
  sim.make_kernel = MakeHostKernel;
  StartOn(CreateFaultBackend(CreateSimBackend(sim),
                             *ParseFaultScript("copy delay for=50ms device=0"), nullptr),
          OneEach(2), {});
  ClientMemory memory(ranks_[0].get(), 1024);
  ranks_[0]->Register(0, OnesGraph());
  {
    ClientMemory target(ranks_[0].get(), kLarge);
    auto run = DirectRank::LocalRun(0, {}, {{0, 1}});
    run.outputs[0] = target.From(0);
    ranks_[0]->Submit(std::move(run));
    EXPECT_TRUE(ranks_[0]
                    ->Call<absl::Status>([&](LocalNode& node, absl::Time now, auto* done) {
                      done->Set(node.CloseSession(ranks_[0]->session(), now));
                    })
                    .ok());
  }
  // Whatever is under way ends.
  const absl::Time deadline = absl::Now() + kPatience;
  while (ranks_[1]->Stats().live_runs > 0 && absl::Now() < deadline) {
  }
  EXPECT_EQ(ranks_[1]->Stats().live_runs, 0);
}

}  // namespace
}  // namespace chorus::node
