// Failures in the node: which session is told what, what goes on, and what nothing comes of.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "core/node/node_rig.h"
#include "core/ops/graph_builder.h"
#include "core/ops/host_kernel.h"
#include "core/ops/host_kernels.h"
#include "core/transport/command.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

// The kernel before the all_reduce fails on rank 0, which has long work behind it: whatever rank 1
// makes of the sum meanwhile.
TEST_F(NodeTest, WhatComesOfAFailureIsNeverPublishedBeforeItIsKnown) {
  Start(2, {}, "launch error device=0; launch delay device=0 for=300ms");
  for (int r = 0; r < 2; ++r) {
    GraphBuilder builder(1, {SlotOf(r, 2)});
    const ValueIndex x = AddInput(&builder, TensorType(DType::kF32, {2}));
    const ValueIndex sum = AddAllReduce(&builder, AddOp(&builder, "neg", {x}), r, "fail.cc:1");
    AddOutput(&builder, r == 0 ? AddOp(&builder, "neg", {sum}) : sum);
    ranks_[r]->Register(0, builder.Build());
    ranks_[r]->Submit(ranks_[r]->WorldRun(0, {DirectRank::Inline({1, 2})}, {{0, 1}}));
  }
  DirectRank& rank = *ranks_[1];
  rank.Register(1, NegateGraph(2));
  rank.Submit(DirectRank::LocalRun(1, {TensorId{0, 1}}, {{1, 1}}));
  rank.Submit(DirectRank::LocalRun(1, {TensorId{1, 1}}, {{2, 1}}));
  for (const int32_t slot : {2, 1, 0}) {
    const Error error = ErrorOf(rank.Read({slot, 1}).status());
    EXPECT_EQ(error.reason, Reason::kExecFailed) << slot << ": " << error.message;
    EXPECT_EQ(error.culprit.rank, 0) << slot;
  }
}

// Nothing waits for a device that never came.
TEST_F(NodeTest, WhereACommunicatorDoesNotOpenAllRanksAreToldAndTheNextOneServes) {
  constexpr int kRanks = 3;
  for (int fails = 0; fails < kRanks; ++fails) {
    SCOPED_TRACE(fails);
    ranks_.clear();
    loop_.reset();
    Start(kRanks, {}, absl::StrCat("open error skip=", fails));
    for (int r = 0; r < kRanks; ++r)
      ranks_[r]->Register(0, AllReduceGraph(r, kRanks, TensorType(DType::kF32, {2}), "t.cc:1"));
    const auto sum = [&](int32_t slot) {
      for (int r = 0; r < kRanks; ++r) {
        ranks_[r]->Submit(ranks_[r]->WorldRun(0, {DirectRank::Inline({1, 2})}, {{slot, 1}}));
      }
    };
    sum(0);
    for (int r = 0; r < kRanks; ++r) {
      const Error error = ErrorOf(ranks_[r]->LastOutcome());
      EXPECT_EQ(error.reason, Reason::kExecFailed) << error.message;
      EXPECT_THAT(error.message, testing::HasSubstr("injected"));
    }
    for (int r = 0; r < kRanks; ++r) ranks_[r]->NextEpoch();
    sum(1);
    for (int r = 0; r < kRanks; ++r) {
      EXPECT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
    }
  }
}

TEST_F(NodeTest, AMismatchFailsOnEveryRankAndTheNextEpochWorks) {
  Start(2);
  for (int r = 0; r < 2; ++r) {
    ranks_[r]->Register(
        0, AllReduceGraph(r, 2, TensorType(DType::kF32, {2 + r}), r == 0 ? "a.cc:1" : "b.cc:2"));
    ranks_[r]->Register(1, AllReduceGraph(r, 2, TensorType(DType::kF32, {1}), "c.cc:3"));
    ranks_[r]->RunInline(0, std::vector<float>(2 + r, 1.0f), {0, 1});
  }
  for (int r = 0; r < 2; ++r) {
    const Error error = ErrorOf(ranks_[r]->LastOutcome());
    EXPECT_EQ(error.reason, Reason::kMismatch) << error.message;
    EXPECT_EQ(error.code, absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(error.ranks.size(), 2u);
    EXPECT_NE(error.id, ErrorId());
    EXPECT_FALSE(ranks_[r]->Read({0, 1}).ok());
    ranks_[r]->NextEpoch();
    ranks_[r]->RunInline(1, {5}, {1, 1});
  }
  for (int r = 0; r < 2; ++r) {
    EXPECT_TRUE(ranks_[r]->LastOutcome().ok());
    EXPECT_THAT(*ranks_[r]->Read({1, 1}), testing::ElementsAre(10));
  }
}

// Three ranks' pieces of seven rows, summed: each gets its own.
Graph UnevenSumGraph(int rank, bool wants_grad) {
  GraphBuilder builder(1, {SlotOf(rank, 3)});
  NodeSpec spec;
  spec.op = "reduce_scatter_tensor";
  spec.inputs = {AddInput(&builder, TensorType(DType::kF32, {7}))};
  spec.collective = Collective();
  spec.collective->kind = CollectiveKind::kReduceScatter;
  spec.collective->reduction = Reduction::kSum;
  spec.collective->rank = GroupRank(rank);
  spec.collective->counts = {2, 3, 2};
  spec.collective->wants_grad = wants_grad;
  AddOutput(&builder, (*builder.Emit(spec))[0]);
  return builder.Build();
}

// Its gradient on a rank that has two rows of it, where rank 1 had so many. What it gives is made
// by an op, and so in its place in the result.
Graph UnevenGradientGraph(int rank, int64_t rows_of_rank_1) {
  GraphBuilder builder(1, {SlotOf(rank, 3)});
  NodeSpec spec;
  spec.op = "all_gather_into_tensor";
  spec.inputs = {AddOp(&builder, "neg", {AddInput(&builder, TensorType(DType::kF32, {2}))})};
  spec.collective = Collective();
  spec.collective->kind = CollectiveKind::kAllGather;
  spec.collective->rank = GroupRank(rank);
  spec.collective->counts = {2, rows_of_rank_1, 2};
  spec.collective->instance = {InstanceRef::Kind::kBound, -1, 0, 0};
  AddOutput(&builder, (*builder.Emit(spec))[0]);
  Graph graph = builder.Build();
  graph.num_instance_slots = 1;
  return graph;
}

// Rank 1, which gives zeros, says nothing of its piece; the others do, and have one result.
TEST_F(NodeTest, RanksThatDisagreeAboutThePieceOfOneThatIsAbsentAreToldSo) {
  for (const int64_t rows : {3, 1000}) {
    SCOPED_TRACE(rows);
    ranks_.clear();
    loop_.reset();
    Start(3);
    for (int r = 0; r < 3; ++r) {
      ranks_[r]->Register(0, UnevenSumGraph(r, /*wants_grad=*/r != 1));
      ranks_[r]->RunInline(0, {1, 2, 3, 4, 5, 6, 7}, {0, 1});
    }
    for (auto& rank : ranks_) ASSERT_TRUE(rank->LastOutcome().ok()) << rank->LastOutcome();
    InstanceKey gradient;
    gradient.since = Epoch(1);
    gradient.path.push_back({0, 0});
    for (const int r : {0, 2}) {
      ranks_[r]->Register(1, UnevenGradientGraph(r, r == 0 ? 3 : rows));
      chorus::Run run = ranks_[r]->WorldRun(1, {DirectRank::Inline({1.0f + r, 2})}, {{1, 1}});
      run.instances.push_back(gradient);
      ranks_[r]->Submit(std::move(run));
      ranks_[r]->WaitUntilTaken();
    }
    for (const int r : {0, 2}) {
      if (rows == 3) {
        EXPECT_THAT(*ranks_[r]->Read({1, 1}), testing::ElementsAre(-1, -2, 0, 0, 0, -3, -2));
        continue;
      }
      const Error error = ErrorOf(ranks_[r]->LastOutcome());
      EXPECT_EQ(error.reason, Reason::kMismatch) << error.message;
      EXPECT_THAT(error.message,
                  testing::AllOf(testing::HasSubstr("receives 3 rows from member 1"),
                                 testing::HasSubstr("receives 1000 rows from member 1")));
    }
  }
}

// Its kernels could write behind the end of the other's.
TEST_F(NodeTest, AResultOfAnotherSizeThanTheOtherRanksHasMemoryOfItsOwn) {
  NodeOptions options;
  options.sequencer.mismatch_grace = absl::Hours(1);  // they wait for rank 2
  Start(3, options);
  std::vector<int64_t> buffers;
  for (int r = 0; r < 2; ++r) {
    ranks_[r]->Register(0, AllReduceGraph(r, 3, TensorType(DType::kF32, {2 + r}), "a.cc:1"));
    const int64_t before = ranks_[r]->Stats().live_buffers;
    ranks_[r]->RunInline(0, std::vector<float>(2 + r, 1.0f), {0, 1});
    ranks_[r]->WaitUntilTaken();
    buffers.push_back(ranks_[r]->Stats().live_buffers - before);
  }
  EXPECT_THAT(buffers, testing::ElementsAre(2, 2)) << "of each its input and its result";
}

// Otherwise each use of a failed result would take the others' calls with it, and each use of
// theirs the next ones: without end where ranks go on.
TEST_F(NodeTest, WhatComesOfAFailureThatWasToldEndsNoEpoch) {
  Start(2);
  for (int r = 0; r < 2; ++r) {
    ranks_[r]->Register(
        0, AllReduceGraph(r, 2, TensorType(DType::kF32, {2 + r}), r == 0 ? "a.cc:1" : "b.cc:2"));
    ranks_[r]->Register(1, AllReduceGraph(r, 2, TensorType(DType::kF32, {2}), "c.cc:3"));
    ranks_[r]->RunInline(0, std::vector<float>(2 + r, 1.0f), {0, 1});
  }
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(ErrorOf(ranks_[r]->LastOutcome()).reason, Reason::kMismatch);
    ranks_[r]->NextEpoch();
  }
  ranks_[1]->RunInline(1, {1, 2}, {1, 1});
  ranks_[0]->RunOn(1, TensorId{0, 1}, {1, 1});
  const Error own = ErrorOf(ranks_[0]->LastOutcome());
  EXPECT_EQ(own.source, "b.cc:2") << own.message;
  ASSERT_EQ(own.ended.size(), 1u);
  EXPECT_EQ(own.ended[0].open, Epoch(2));
  const Error waits = ErrorOf(ranks_[1]->LastOutcome());
  EXPECT_EQ(waits.reason, Reason::kMismatch) << waits.message;
  EXPECT_TRUE(waits.alone);
  for (int r = 0; r < 2; ++r) ranks_[r]->RunInline(1, {5, 6}, {2, 1});
  for (int r = 0; r < 2; ++r) {
    EXPECT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
    EXPECT_THAT(*ranks_[r]->Read({2, 1}), testing::ElementsAre(10, 12));
  }
}

// What has failed for this rank alone is used by two calls, and what came of it by a third: the
// first tells the others of the failure.
TEST_F(NodeTest, AFailureEndsAnEpochOnceHoweverOftenItIsUsed) {
  for (const bool is_known : {true, false}) {
    SCOPED_TRACE(is_known);
    ranks_.clear();
    loop_.reset();
    Start(2, {}, "launch error device=0");
    for (int r = 0; r < 2; ++r) {
      ranks_[r]->Register(0, AllReduceGraph(r, 2, TensorType(DType::kF32, {2}), "a.cc:1"));
    }
    ranks_[0]->Register(1, NegateGraph(2));
    EXPECT_TRUE(ranks_[0]->LastOutcome().ok());
    const chorus::Run fails = DirectRank::LocalRun(1, {DirectRank::Inline({1, 2})}, {{0, 1}});
    const chorus::Run comes_of_it = DirectRank::LocalRun(1, {TensorId{0, 1}}, {{1, 1}});
    ranks_[1]->RunInline(0, {1, 2}, {2, 1});
    ranks_[1]->WaitUntilTaken();
    if (is_known) {
      ranks_[0]->SubmitTogether({fails, comes_of_it});
      EXPECT_FALSE(ranks_[0]->LastOutcome().ok());
      ranks_[0]->RunOn(0, TensorId{0, 1}, {2, 1});
    } else {
      ranks_[0]->SubmitTogether(
          {fails, comes_of_it, ranks_[0]->WorldRun(0, {TensorId{0, 1}}, {{2, 1}})});
    }
    for (int r = 0; r < 2; ++r) {
      const Error error = ErrorOf(ranks_[r]->LastOutcome());
      ASSERT_EQ(error.ended.size(), 1u) << error.message;
      EXPECT_EQ(error.ended[0].open, Epoch(2));
      ranks_[r]->NextEpoch();
    }
    for (const int32_t used : {0, 1, 2}) {
      ranks_[1]->RunInline(0, {1, 2}, {3 + used, 1});
      ranks_[0]->RunOn(0, TensorId{used, 1}, {3 + used, 1});
      const Error waits = ErrorOf(ranks_[1]->LastOutcome());
      EXPECT_EQ(waits.reason, Reason::kMismatch) << used << ": " << waits.message;
      EXPECT_TRUE(waits.alone) << used;
      const Error own = ErrorOf(ranks_[0]->LastOutcome());
      ASSERT_EQ(own.ended.size(), 1u) << own.message;
      EXPECT_EQ(own.ended[0].open, Epoch(2)) << used;
    }
    for (int r = 0; r < 2; ++r) ranks_[r]->RunInline(0, {5, 6}, {6, 1});
    for (int r = 0; r < 2; ++r) {
      EXPECT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
      EXPECT_THAT(*ranks_[r]->Read({6, 1}), testing::ElementsAre(10, 12));
    }
  }
}

// Both have one number, and of the second nobody has been told when it is used.
TEST_F(NodeTest, AFailureThatLooksLikeOneBeforeIsTold) {
  Start(2, {}, "launch error device=0 times=2");
  for (int r = 0; r < 2; ++r) {
    ranks_[r]->Register(0, AllReduceGraph(r, 2, TensorType(DType::kF32, {2}), "a.cc:1"));
  }
  ranks_[0]->Register(1, NegateGraph(2));
  for (const int32_t round : {0, 1}) {
    const TensorId failed{2 * round, 1};
    const TensorId sum{2 * round + 1, 1};
    ranks_[0]->Submit(DirectRank::LocalRun(1, {DirectRank::Inline({1, 2})}, {failed}));
    EXPECT_FALSE(ranks_[0]->LastOutcome().ok());
    ranks_[1]->RunInline(0, {1, 2}, sum);
    ranks_[1]->WaitUntilTaken();
    ranks_[0]->RunOn(0, failed, sum);
    EXPECT_EQ(ErrorOf(ranks_[1]->LastOutcome()).reason, Reason::kPeerRefused) << round;
    for (int r = 0; r < 2; ++r) {
      const Error error = ErrorOf(ranks_[r]->LastOutcome());
      ASSERT_EQ(error.ended.size(), 1u) << error.message;
      EXPECT_EQ(error.ended[0].open, Epoch(2 + round));
      ranks_[r]->NextEpoch();
    }
  }
}

// Its sizes are those of its inputs, and what has failed may have none.
TEST_F(NodeTest, ARunThatFixesSizesIsRefusedAsOthersAreWhereItsInputHasFailed) {
  Start(2, {}, "launch error device=0");
  for (int r = 0; r < 2; ++r) {
    ranks_[r]->Register(0, AllReduceGraph(r, 2, TensorType(DType::kF32, {2}), "a.cc:1"));
    GraphBuilder builder(1, {SlotOf(r, 2)});
    const ValueIndex x = AddInput(&builder, TensorType(DType::kF32, {5}));
    AddOutput(&builder, AddAllReduce(&builder, AddOp(&builder, "sum", {x}), r, "b.cc:2"));
    Graph graph = builder.Build();
    graph.inputs[0].type.dims[0] = Dim::Symbol(0, 5);
    ranks_[r]->Register(1, graph);
    ASSERT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
    ranks_[r]->Register(2, SameGraph(2));
  }
  ranks_[0]->Register(3, NegateGraph(2));
  const TensorId failed{0, 1};
  ranks_[0]->Submit(DirectRank::LocalRun(3, {DirectRank::Inline({1, 2})}, {failed}));
  EXPECT_FALSE(ranks_[0]->LastOutcome().ok());
  const auto good = [this](int r, TensorId name) {
    ranks_[r]->Submit(DirectRank::LocalRun(2, {DirectRank::Inline({1, 2})}, {name}));
    return name;
  };
  ranks_[1]->RunInline(0, {1, 2}, {1, 1});
  ranks_[1]->WaitUntilTaken();
  ranks_[0]->RunOn(0, failed, {1, 1});
  for (int r = 0; r < 2; ++r) {
    EXPECT_FALSE(ranks_[r]->LastOutcome().ok());
    ranks_[r]->NextEpoch();
  }
  // All have been told of it: who waits for rank 0 there fails alone. A refused call's result has
  // failed, too, and has no type.
  for (const int32_t used : {0, 1}) {
    ranks_[1]->RunOn(1, good(1, {10 + used, 1}), {2 + used, 1});
    ranks_[1]->WaitUntilTaken();
    ranks_[0]->RunOn(1, TensorId{used, 1}, {2 + used, 1});
    const Error waits = ErrorOf(ranks_[1]->LastOutcome());
    EXPECT_EQ(waits.reason, Reason::kMismatch) << used << ": " << waits.message;
    EXPECT_TRUE(waits.alone) << used;
    EXPECT_FALSE(ranks_[0]->LastOutcome().ok());
  }
  for (int r = 0; r < 2; ++r) ranks_[r]->RunOn(1, good(r, {20, 1}), {4, 1});
  for (int r = 0; r < 2; ++r) {
    EXPECT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
    EXPECT_THAT(*ranks_[r]->Read({4, 1}), testing::ElementsAre(6));
  }
}

// The vote of a call without a position has counted it: that it is refused later must not do so
// again, or the rank would be out of line with the others for ever.
class CallsWithoutPositionsTest : public NodeTest {
 protected:
  // Two ranks, in two worlds.
  void SetUp() override {
    Start(2);
    Promise<absl::StatusOr<WorldInfo>> joined[2];
    for (int r = 0; r < 2; ++r) {
      JoinRequest join;
      join.name = "other";
      join.size = 2;
      join.rank = Rank(r);
      join.device = DeviceIndex(r);
      loop_->PostOwn([&, r, join](LocalNode& node, absl::Time now) {
        node.JoinWorld(ranks_[r]->session(), join, now,
                       [&, r](absl::StatusOr<WorldInfo> info) { joined[r].Set(std::move(info)); });
      });
    }
    for (int r = 0; r < 2; ++r) ASSERT_TRUE(joined[r].Get().ok());
    other_ = joined[0].Get()->id;
    world_ = ranks_[0]->world();
    for (int r = 0; r < 2; ++r) {
      ranks_[r]->Register(0, AllReduceGraph(r, 2, TensorType(DType::kF32, {2}), "a.cc:1"));
    }
  }
  static chorus::Run Call(WorldId world, int64_t epoch, const Binding& input, TensorId out) {
    chorus::Run run = DirectRank::LocalRun(0, {input}, {out});
    run.groups.emplace_back();
    run.groups.back().world = world;
    run.groups.back().epoch = Epoch(epoch);
    return run;
  }
  // Whether the ranks' next calls meet.
  void ExpectInLine(int64_t epoch) {
    for (int r = 0; r < 2; ++r) ranks_[r]->Submit(Call(world_, epoch, x_, {9, 1}));
    for (int r = 0; r < 2; ++r) {
      EXPECT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
      EXPECT_THAT(*ranks_[r]->Read({9, 1}), testing::ElementsAre(2, 4));
    }
  }

  const InlineData x_ = DirectRank::Inline({1, 2});
  WorldId world_;
  WorldId other_;
};

TEST_F(CallsWithoutPositionsTest, CountOnceWhereTheyAreRefusedAfterTheirVote) {
  ranks_[0]->Submit(Call(other_, 1, x_, {0, 1}));
  ranks_[0]->Submit(Call(world_, 1, TensorId{0, 1}, {1, 1}));
  ranks_[0]->WaitUntilTaken();
  EXPECT_TRUE(ranks_[0]
                  ->Call<absl::Status>([&](LocalNode& node, absl::Time now, auto* done) {
                    done->Set(node.AbortWorld(ranks_[0]->session(),
                                              {other_, Rank(0), Epoch(), "by hand"}, now));
                  })
                  .ok());
  EXPECT_FALSE(ranks_[0]->LastOutcome().ok());
  ranks_[1]->Submit(Call(world_, 1, x_, {1, 1}));
  EXPECT_EQ(ErrorOf(ranks_[1]->LastOutcome()).reason, Reason::kPeerRefused);
  ExpectInLine(/*epoch=*/2);
}

// A call that another one takes with it in its world learns of that by way of the other world
// first: a local run of that one stands between them.
TEST_F(CallsWithoutPositionsTest, CountOnceWhereTheyHaveFailedAlready) {
  GraphBuilder sum(1, {});
  const TensorType type(DType::kF32, {2});
  const ValueIndex a = AddInput(&sum, type);
  AddOutput(&sum, AddOp(&sum, "add", {a, AddInput(&sum, type)}));
  ranks_[0]->Register(1, sum.Build());
  ranks_[0]->Submit(Call(world_, 1, x_, {0, 1}));
  ranks_[0]->Submit(Call(other_, 1, x_, {1, 1}));
  ranks_[0]->RunLocal(1, {TensorId{0, 1}, TensorId{1, 1}}, {2, 1});
  ranks_[0]->Submit(Call(other_, 1, TensorId{2, 1}, {3, 1}));
  ranks_[0]->Submit(Call(world_, 1, TensorId{2, 1}, {4, 1}));
  ranks_[0]->WaitUntilTaken();
  // Rank 1 leaves the first call out, and makes the second.
  chorus::Run second = Call(world_, 1, x_, {1, 1});
  second.groups.back().base.push_back({0, 1, 0});
  ranks_[1]->Submit(std::move(second));
  for (int r = 0; r < 2; ++r) {
    const Error error = ErrorOf(ranks_[r]->LastOutcome());
    EXPECT_TRUE(error.alone) << error.message;
  }
  ExpectInLine(/*epoch=*/1);
}

// What its vote would name by then is the rank's next call, and another rank has reserved its
// result.
TEST_F(CallsWithoutPositionsTest, LetGoOfTheirOwnResultsAloneWhereTheyFail) {
  const int64_t before = ranks_[0]->Stats().live_buffers;
  // Rank 1 leaves the first call out.
  chorus::Run second = Call(world_, 1, x_, {1, 1});
  second.groups.back().base.push_back({0, 1, 0});
  ranks_[1]->Submit(std::move(second));
  ranks_[1]->WaitUntilTaken();
  ranks_[0]->Submit(Call(world_, 1, x_, {0, 1}));
  EXPECT_TRUE(ErrorOf(ranks_[0]->LastOutcome()).alone);
  ranks_[0]->Submit(Call(world_, 1, x_, {1, 1}));
  for (int r = 0; r < 2; ++r) {
    EXPECT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
    EXPECT_THAT(*ranks_[r]->Read({1, 1}), testing::ElementsAre(2, 4));
  }
  EXPECT_EQ(ranks_[0]->Stats().live_buffers, before + 1) << "one result for both";
}

// Longer than the stack would be deep, if each run called the next one.
TEST_F(NodeTest, ALongChainOfRunsIsLaunchedOrFailsWhole) {
  constexpr int32_t kLinks = 30000;
  NodeOptions options;
  options.max_pending_runs = kLinks + 1;
  Start(2, options);
  for (int r = 0; r < 2; ++r) {
    ranks_[r]->Register(0, AllReduceGraph(r, 2, TensorType(DType::kF32, {1}), "a.cc:1"));
    ranks_[r]->Register(1, NegateGraph(1));
    EXPECT_TRUE(ranks_[r]->LastOutcome().ok());
  }
  // Their plans are loaded: while one is, frames are held, and not as many as come together here.
  const TensorId before = {kLinks + 1, 1};
  for (int r = 0; r < 2; ++r) {
    ranks_[r]->RunInline(0, {1}, before);
    ranks_[r]->RunLocal(1, {before}, {kLinks + 2, 1});
  }
  for (int r = 0; r < 2; ++r) EXPECT_TRUE(ranks_[r]->LastOutcome().ok());
  for (const uint32_t generation : {1, 2}) {
    const auto submit_chain = [&] {
      std::vector<CommandBody> chain = {
          ranks_[0]->WorldRun(0, {DirectRank::Inline({1})}, {{0, generation}})};
      for (int32_t i = 0; i < kLinks; ++i) {
        chain.push_back(DirectRank::LocalRun(1, {TensorId{i, generation}}, {{i + 1, generation}}));
      }
      ranks_[0]->SubmitTogether(std::move(chain));
    };
    submit_chain();
    const TensorId last = {kLinks, generation};
    if (generation == 1) {
      ranks_[1]->RunInline(0, {2}, {0, 1});
      EXPECT_THAT(*ranks_[0]->Read(last), testing::ElementsAre(3));
    } else {
      ranks_[1]->AbortWorld("enough");
      EXPECT_EQ(ErrorOf(ranks_[0]->Read(last).status()).reason, Reason::kAborted);
    }
    Release some;  // a frame has room for so many
    for (int32_t i = 0; i <= kLinks; ++i) {
      some.tensors.push_back({i, generation});
      if (some.tensors.size() == 5000 || i == kLinks) ranks_[0]->Submit(std::exchange(some, {}));
    }
    EXPECT_TRUE(ranks_[0]->LastOutcome().ok()) << ranks_[0]->LastOutcome();
  }
}

TEST_F(NodeTest, ADeadRankIsNamedToThoseWhoWait) {
  Start(2);
  ranks_[0]->Register(0, AllReduceGraph(0, 2, TensorType(DType::kF32, {1}), "a.cc:1"));
  ranks_[0]->RunInline(0, {1}, {0, 1});
  const SessionId dying = ranks_[1]->session();
  loop_->PostOwn([dying](LocalNode& node, absl::Time now) { node.SessionDied(dying, now); });
  const Error error = ErrorOf(ranks_[0]->LastOutcome());
  EXPECT_EQ(error.code, absl::StatusCode::kAborted);
  EXPECT_EQ(error.reason, Reason::kPeerDied);
  EXPECT_EQ(error.culprit.rank, 1);
  EXPECT_EQ(error.culprit.pid, 1001);
}

// Of 2 ranks with pids 1000 and 1001.
TEST_F(NodeTest, EveryFailureIsOneLineForTheLog) {
  Mutex mutex;
  std::vector<std::string> lines;
  NodeOptions options;
  options.memory_limit_bytes = 3 * kLarge * static_cast<int64_t>(sizeof(float)) / 2;
  options.log_failure = [&](absl::string_view, absl::string_view line) {
    MutexLock lock(&mutex);
    lines.emplace_back(line);
  };
  const auto take = [&] {
    // What the node thread has begun is done.
    ranks_[0]->Call<bool>([](LocalNode&, absl::Time, auto* done) { done->Set(true); });
    MutexLock lock(&mutex);
    return std::exchange(lines, {});
  };
  options.sequencer.agree_timeout = absl::Milliseconds(50);
  Start(2, options);
  EXPECT_THAT(take(), testing::IsEmpty());
  for (int r = 0; r < 2; ++r) {
    ranks_[r]->Register(0, AllReduceGraph(r, 2, TensorType(DType::kF32, {2 + r}), "a.cc:1"));
    ranks_[r]->Register(1, OnesGraph());
    ranks_[r]->Register(2, AllReduceGraph(r, 2, TensorType(DType::kF32, {1}), "c.cc:1"));
    ranks_[r]->RunInline(0, std::vector<float>(2 + r, 1.0f), {0, 1});
  }
  Error error;
  const auto expect = [&](const std::string& where) {
    EXPECT_THAT(take(), testing::ElementsAre(absl::StrCat(
                            "failure: job=\"job\" ", where, " reason=", ReasonName(error.reason),
                            " error_id=", error.id.value(), ": ", error.message)));
  };
  // A mismatch of two is nobody's, a late or dead rank is the culprit, a refusal is the caller's.
  for (int r = 0; r < 2; ++r) error = ErrorOf(ranks_[r]->LastOutcome());
  EXPECT_EQ(error.reason, Reason::kMismatch);
  expect("rank=- pid=-");
  for (int r = 0; r < 2; ++r) ranks_[r]->NextEpoch();
  ranks_[0]->RunInline(2, {1}, {1, 1});
  error = ErrorOf(ranks_[0]->LastOutcome());
  EXPECT_EQ(error.reason, Reason::kAgreeTimeout);
  expect("rank=1 pid=1001");
  for (int r = 0; r < 2; ++r) ranks_[r]->NextEpoch();
  ranks_[1]->Submit(DirectRank::LocalRun(1, {}, {{2, 1}}));
  EXPECT_TRUE(ranks_[1]->LastOutcome().ok());
  ranks_[1]->Submit(DirectRank::LocalRun(1, {}, {{3, 1}}));
  error = ErrorOf(ranks_[1]->LastOutcome());
  EXPECT_EQ(error.reason, Reason::kOutOfMemory) << error.message;
  expect("rank=1 pid=1001");
  ranks_[1]->Submit(DirectRank::LocalRun(77, {}, {{4, 1}}));
  error = ErrorOf(ranks_[1]->LastOutcome());
  EXPECT_EQ(error.reason, Reason::kUnknownName);
  expect("rank=1 pid=1001");
  // A third process of that rank, and one that says another size.
  for (const int size : {2, 3}) {
    JoinRequest join;
    join.name = "job";
    join.size = size;
    join.rank = Rank(1);
    join.device = DeviceIndex(0);
    const absl::Status joined = ranks_[0]->Call<absl::Status>(
        [&](LocalNode& node, absl::Time now, Promise<absl::Status>* done) {
          node.JoinWorld(ranks_[0]->session(), join, now, [done](absl::StatusOr<WorldInfo> info) {
            done->Set(Detached(info.status()));
          });
        });
    error = ErrorOf(joined);
    EXPECT_EQ(error.reason, size == 2 ? Reason::kDuplicateRank : Reason::kWorldSize);
    expect("rank=1 pid=1000");
  }
  const SessionId dying = ranks_[1]->session();
  loop_->PostOwn([dying](LocalNode& node, absl::Time now) { node.SessionDied(dying, now); });
  ranks_[0]->NextEpoch();
  ranks_[0]->RunInline(2, {1}, {3, 1});
  error = ErrorOf(ranks_[0]->LastOutcome());
  EXPECT_EQ(error.culprit.pid, 1001);
  const std::vector<std::string> death = take();
  ASSERT_FALSE(death.empty());
  EXPECT_THAT(death[0], testing::HasSubstr("rank=1 pid=1001 reason=PEER_DIED error_id="));
  for (size_t i = 1; i < death.size(); ++i) {
    EXPECT_THAT(death[i], testing::Not(testing::HasSubstr("reason=PEER_DIED")));
  }
}

// Requests to join the world "late" of 3.
class NodeJoinTest : public NodeTest {
 protected:
  using Joined = Promise<absl::StatusOr<WorldInfo>>;

  static JoinRequest RequestOf(int rank, int device) {
    JoinRequest request;
    request.name = "late";
    request.size = 3;
    request.rank = Rank(rank);
    request.device = DeviceIndex(device);
    return request;
  }
  void Join(SessionId session, const JoinRequest& request, Joined* joined) {
    ranks_[0]->Call<bool>([&](LocalNode& node, absl::Time now, Promise<bool>* done) {
      node.JoinWorld(session, request, now,
                     [joined](absl::StatusOr<WorldInfo> info) { joined->Set(std::move(info)); });
      done->Set(true);
    });
  }
  Error RefusalOf(SessionId session, const JoinRequest& request) {
    Joined joined;
    Join(session, request, &joined);
    return ErrorOf(joined.Get().status());
  }
  SessionId SessionOf(int rank) const { return ranks_[static_cast<size_t>(rank)]->session(); }
};

// Rank 1 of 3 is not let in: rank 0, which waits for it, is told, and the name is free.
TEST_F(NodeJoinTest, ARefusedJoinIsToldToThoseWhoWaitForIt) {
  Start(3);
  struct Refused {
    Reason reason;
    int caller = 1;
    JoinRequest request = RequestOf(1, 1);
  };
  std::vector<Refused> all(8);
  all[0].reason = Reason::kWorldSize;
  all[0].request.size = 2;
  all[1].reason = Reason::kMismatch;
  all[1].request.check_call_sites = CheckCallSites::kWarn;
  all[2].reason = Reason::kQuota;  // rank 0 has the device
  all[2].caller = 0;
  all[2].request.device = DeviceIndex(0);
  all[3].reason = Reason::kUnknownName;
  all[3].request.device = DeviceIndex(2);
  // What is told of requests that make no sense.
  for (size_t i = 4; i < all.size(); ++i) all[i].reason = Reason::kMalformed;
  all[4].request.device = DeviceIndex(-1);
  all[5].request.size = -1;
  all[6].request.size = 1;
  all[7].request.not_understood = "exec_timeout: expected more";
  for (const Refused& refused : all) {
    SCOPED_TRACE(&refused - all.data());
    Joined waiting;
    Join(SessionOf(0), RequestOf(0, 0), &waiting);
    // Rank 0 does not wait for a second rank 0.
    EXPECT_EQ(RefusalOf(SessionOf(1), RequestOf(0, 1)).reason, Reason::kDuplicateRank);
    const Error why = RefusalOf(SessionOf(refused.caller), refused.request);
    const Error error = ErrorOf(waiting.Get().status());
    EXPECT_EQ(why.reason, refused.reason) << why.message;
    EXPECT_EQ(error.reason, why.reason);
    EXPECT_EQ(error.culprit.rank, 1);
    EXPECT_EQ(error.culprit.pid, 1000 + refused.caller);
    EXPECT_EQ(error.message,
              absl::StrCat("rank 1 (pid ", error.culprit.pid, ") was not let in: ", why.message));
  }
  Joined joined[3];
  for (int r = 0; r < 3; ++r) Join(SessionOf(r), RequestOf(r, r), &joined[r]);
  for (Joined& each : joined) EXPECT_TRUE(each.Get().ok());
}

// A refused request ends no world whose ranks do not wait for what it asked for.
TEST_F(NodeJoinTest, ARefusedJoinConcernsNobodyElse) {
  Start(3);
  const SessionId stranger =
      ranks_[0]
          ->Call<absl::StatusOr<SessionInfo>>([](LocalNode& node, absl::Time now, auto* done) {
            OpenSessionRequest open;
            open.tenant = "uid:7";
            open.lease = absl::Hours(1);
            done->Set(node.OpenSession(open, now));
          })
          ->id;
  Joined joined[3];
  for (int r = 0; r < 2; ++r) Join(SessionOf(r), RequestOf(r, r), &joined[r]);
  const auto expect_refused = [&](SessionId session, const JoinRequest& request) {
    const Error error = RefusalOf(session, request);
    EXPECT_EQ(error.reason, Reason::kMalformed) << error.message;
  };
  JoinRequest request = RequestOf(2, 2);
  request.size = 0;
  expect_refused(stranger, request);
  request.name = "later";
  expect_refused(SessionOf(2), request);
  // No rank of this world, or one that is there.
  for (const int rank : {-1, 3, 1}) {
    JoinRequest wrong = RequestOf(rank, 2);
    wrong.not_understood = "exec_timeout: expected more";
    expect_refused(SessionOf(2), wrong);
  }
  Join(SessionOf(2), RequestOf(2, 2), &joined[2]);
  for (Joined& each : joined) {
    const absl::StatusOr<WorldInfo> info = each.Get();
    EXPECT_TRUE(info.ok()) << info.status();
  }
}

// What is under way, and what waits for commands that have not come.
TEST_F(NodeTest, AbortAllEndsEveryWait) {
  Start(2);
  ranks_[0]->Register(0, AllReduceGraph(0, 2, TensorType(DType::kF32, {1}), "a.cc:1"));
  ranks_[0]->RunInline(0, {1}, {0, 1});
  Promise<absl::Status> later;
  Promise<absl::Status> read;
  loop_->PostOwn([&](LocalNode& node, absl::Time now) {
    node.WaitOutcome(ranks_[0]->session(), Sequence(77), now + absl::Hours(1),
                     [&](Outcome outcome) { later.Set(Detached(outcome.status)); });
    node.ReadTensor(
        ranks_[0]->session(), {0, 1}, now + absl::Hours(1),
        [&](absl::StatusOr<ReadableTensor> view) { read.Set(Detached(view.status())); });
    node.StartDraining();
    node.AbortAll(now);
  });
  EXPECT_EQ(ErrorOf(ranks_[0]->LastOutcome()).reason, Reason::kDraining);
  EXPECT_EQ(ErrorOf(later.Get()).reason, Reason::kDraining);
  EXPECT_EQ(ErrorOf(read.Get()).reason, Reason::kDraining);
  ranks_[1]->Register(0, OnesGraph());
  ranks_[1]->Submit(DirectRank::LocalRun(0, {}, {{1, 1}}));
  EXPECT_EQ(ErrorOf(ranks_[1]->LastOutcome()).reason, Reason::kDraining);
}

TEST_F(NodeTest, WhoIsLateForAnEndedEpochGetsItsCauseAlsoWithoutMemory) {
  NodeOptions options;
  options.memory_limit_bytes = 8 << 20;
  Start(2, options);
  for (int r = 0; r < 2; ++r) {
    ranks_[r]->Register(0, AllReduceGraph(r, 2, TensorType(DType::kF32, {4}), "a.cc:1"));
    ASSERT_TRUE(ranks_[r]->LastOutcome().ok());
  }
  // Less than a page is left of what their tenant may hold.
  const int64_t free_bytes =
      options.memory_limit_bytes / 8 * 7 - ranks_[0]->Stats().memory_used_bytes;
  ASSERT_TRUE(ranks_[0]->CreateStaging(free_bytes / 4096 * 4096).ok());
  ranks_[0]->RunInline(0, {1, 2, 3, 4}, {0, 1});
  const Error refused = ErrorOf(ranks_[0]->LastOutcome());
  EXPECT_EQ(refused.code, absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(refused.reason, Reason::kOutOfMemory) << refused.message;
  ranks_[1]->RunInline(0, {1, 2, 3, 4}, {0, 1});
  const Error peer_error = ErrorOf(ranks_[1]->LastOutcome());
  EXPECT_EQ(peer_error.code, absl::StatusCode::kAborted);
  EXPECT_EQ(peer_error.reason, Reason::kPeerRefused) << peer_error.message;
  EXPECT_EQ(peer_error.culprit.rank, 0);
  EXPECT_EQ(peer_error.culprit.pid, 1000);
}

// Nobody would pay for names that it is given without being asked.
TEST_F(NodeTest, WhoIsLateForAnEndedEpochNamesWhatThereIsMemoryFor) {
  constexpr int32_t kResults = 4000;
  constexpr int64_t kBytesPerName = 512;
  constexpr int64_t kNamesAtOnce = 64;  // are charged together
  NodeOptions options;
  options.memory_limit_bytes = 64 << 20;
  Start(1, options);
  DirectRank& rank = *ranks_[0];
  GraphBuilder builder(1, {SlotOf(0, 1)});
  const ValueIndex x = AddInput(&builder, TensorType(DType::kF32, {1}));
  const ValueIndex sum = AddAllReduce(&builder, x, 0, "a.cc:1");
  for (int32_t i = 0; i < kResults; ++i) AddOutput(&builder, sum);
  rank.Register(0, builder.Build());
  ASSERT_TRUE(rank.LastOutcome().ok()) << rank.LastOutcome();
  rank.AbortWorld("enough");
  int32_t slot = 0;
  // Returns how many results have names afterwards.
  const auto run_late = [&] {
    std::vector<TensorId> results;
    for (int32_t i = 0; i < kResults; ++i) results.push_back({slot++, 1});
    rank.Submit(rank.WorldRun(0, {DirectRank::Inline({1})}, results));
    EXPECT_EQ(ErrorOf(rank.LastOutcome()).reason, Reason::kAborted) << rank.LastOutcome();
    return rank.Call<int64_t>([&](LocalNode& node, absl::Time now, auto* done) {
      done->Set(node.Describe(rank.session(), now)->live_tensors);
    });
  };
  const int64_t idle = rank.Stats().memory_used_bytes;
  EXPECT_EQ(run_late(), kResults);
  EXPECT_GE(rank.Stats().memory_used_bytes - idle, kResults * kBytesPerName);
  EXPECT_EQ(ErrorOf(rank.Read({kResults - 1, 1}).status()).reason, Reason::kAborted);
  const int64_t free_bytes = options.memory_limit_bytes / 8 * 7 - rank.Stats().memory_used_bytes;
  ASSERT_TRUE(rank.CreateStaging(free_bytes / 4096 * 4096).ok());
  for (int i = 0; i < 3; ++i) EXPECT_LE(run_late(), kResults + kNamesAtOnce) << i;
  EXPECT_EQ(ErrorOf(rank.Read({slot - 1, 1}).status()).reason, Reason::kUnknownName);
}

// A result that the ranks have in common is reserved by the first of them to vote.
TEST_F(NodeTest, AnEndedEpochKeepsNoSharedResult) {
  Start(2);
  const TensorId ones{0, 1};
  for (int r = 0; r < 2; ++r) {
    ranks_[r]->Register(0, OnesGraph());
    ranks_[r]->Register(1, AllReduceGraph(r, 2, TensorType(DType::kF32, {kLarge}), "a.cc:1"));
    ranks_[r]->RunLocal(0, {}, ones);
    ASSERT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
  }
  int64_t used = 0;
  for (int32_t epoch = 1; epoch <= 3; ++epoch) {
    ranks_[0]->RunOn(1, ones, {epoch, 1});
    ranks_[0]->WaitUntilTaken();
    ranks_[1]->AbortWorld("enough");
    ranks_[1]->LeaveOut();
    EXPECT_EQ(ErrorOf(ranks_[0]->LastOutcome()).reason, Reason::kAborted);
    for (auto& rank : ranks_) rank->NextEpoch();
    if (epoch == 1) used = ranks_[0]->Stats().memory_used_bytes;
  }
  for (int r = 0; r < 2; ++r) ranks_[r]->RunOn(1, ones, {4, 1});
  for (int r = 0; r < 2; ++r) {
    EXPECT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
  }
  // One after the other they had the same memory.
  EXPECT_EQ(ranks_[0]->Stats().memory_used_bytes, used);
}

// There is memory for the smaller one's result and not for the other's: they disagree first.
TEST_F(NodeTest, RanksThatDisagreeAboutTheSizeAreToldThatWhateverMemoryThereIs) {
  NodeOptions options;
  options.memory_limit_bytes = 3 * kLarge * static_cast<int64_t>(sizeof(float)) / 2;
  Start(2, options);
  ranks_[1]->Register(0, OnesGraph());
  ranks_[1]->RunLocal(0, {}, {0, 1});
  for (int r = 0; r < 2; ++r) {
    ranks_[r]->Register(
        1, AllReduceGraph(r, 2, TensorType(DType::kF32, {r == 0 ? 1 : kLarge}), "a.cc:1"));
    ASSERT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
  }
  ranks_[0]->RunInline(1, {1}, {1, 1});
  ranks_[1]->RunOn(1, TensorId{0, 1}, {1, 1});
  for (int r = 0; r < 2; ++r) {
    const Error error = ErrorOf(ranks_[r]->LastOutcome());
    EXPECT_EQ(error.reason, Reason::kMismatch) << error.message;
  }
}

// Neither disagrees with the other: a list of pieces, and the same in one tensor.
TEST_F(NodeTest, WhoHasNoMemoryForAllPiecesInOneTensorIsToldSoWhereOthersHaveAList) {
  NodeOptions options;
  // Of which a tenant has seven eighths: for three inputs and two pieces, not for the tensor too.
  options.memory_limit_bytes = 8 * kLarge * static_cast<int64_t>(sizeof(float));
  StartOnSim(3, /*devices_per_domain=*/2, options);
  for (int r = 0; r < 3; ++r) {
    ranks_[r]->Register(0, OnesGraph());
    ranks_[r]->RunLocal(0, {}, {0, 1});
    GraphBuilder builder(1, {SlotOf(r, 3)});
    NodeSpec spec;
    spec.op = r == 1 ? "all_gather_into_tensor" : "all_gather";
    spec.inputs = {AddInput(&builder, TensorType(DType::kF32, {kLarge}))};
    spec.collective = Collective();
    spec.collective->kind = CollectiveKind::kAllGather;
    spec.collective->rank = GroupRank(r);
    AddOutput(&builder, (*builder.Emit(spec))[0]);
    ranks_[r]->Register(1, builder.Build());
    ASSERT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
  }
  for (int r = 0; r < 3; ++r) {
    ranks_[r]->RunOn(1, TensorId{0, 1}, {1, 1});
    ranks_[r]->WaitUntilTaken();
  }
  const Error error = ErrorOf(ranks_[1]->LastOutcome());
  EXPECT_EQ(error.reason, Reason::kOutOfMemory) << error.message;
}

// Rank 1 has done its part, and has been told of the timeout, when rank 0's late kernel ends.
TEST_F(NodeTest, AGangMayEndAfterItsExecTimeout) {
  NodeOptions options;
  options.sequencer.exec_timeout = absl::Seconds(1);
  Start(2, options, "launch delay device=0 for=2s");
  for (int r = 0; r < 2; ++r) {
    GraphBuilder builder(1, {SlotOf(r, 2)});
    const ValueIndex x = AddInput(&builder, TensorType(DType::kF32, {2}));
    AddOutput(&builder, AddOp(&builder, "neg", {AddAllReduce(&builder, x, r, "late.cc:1")}));
    ranks_[r]->Register(0, builder.Build());
  }
  for (int r = 0; r < 2; ++r) ranks_[r]->RunInline(0, {1, 2}, {0, 1});
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(ErrorOf(ranks_[r]->LastOutcome()).reason, Reason::kExecTimeout);
  }
  // A device does one thing after the other: what follows is behind the late kernel.
  ranks_[0]->Register(1, OnesGraph());
  ranks_[0]->RunLocal(1, {}, {1, 1});
  EXPECT_TRUE(ranks_[0]->LastOutcome().ok()) << ranks_[0]->LastOutcome();
  const auto is_idle = [&] {
    return ranks_[0]->Call<bool>(
        [](LocalNode& node, absl::Time, auto* done) { done->Set(node.Idle()); });
  };
  // A turn or two later.
  const absl::Time deadline = absl::Now() + kPatience;
  while (!is_idle()) ASSERT_LT(absl::Now(), deadline);
}

// Kernels that end when the test says so: neg of so many elements.
constexpr int64_t kGated = 7;
struct Gate {
  void Set(bool open) {
    MutexLock lock(&mutex);
    is_open = open;
    opened.SignalAll();
  }
  Mutex mutex;
  CondVar opened;
  bool is_open ABSL_GUARDED_BY(mutex) = false;
};
Gate gate;

class GatedNegate : public HostKernel {
 public:
  GatedNegate() : HostKernel(1, int64_t{1} << 30) {}  // nothing for the node thread
  absl::Status Run(const HostBuffers& buffers, int64_t, int64_t) const override {
    {
      MutexLock lock(&gate.mutex);
      const absl::Time deadline = absl::Now() + kPatience;
      while (!gate.is_open && absl::Now() < deadline) {
        gate.opened.WaitFor(&gate.mutex, deadline - absl::Now());
      }
    }
    const auto* const x = static_cast<const float*>(buffers.inputs[0]);
    for (int64_t i = 0; i < kGated; ++i) static_cast<float*>(buffers.outputs[0])[i] = -x[i];
    return absl::OkStatus();
  }
};

HostKernelOrError MakeGatedKernel(const NodeView& node, absl::Span<const TensorType> outputs) {
  if (node.op == "neg" && outputs[0].num_elements() == kGated) {
    return std::make_unique<GatedNegate>();
  }
  return MakeHostKernel(node, outputs);
}

// An all_reduce with a kernel in front of it, so that it is launched.
Graph LaunchedGraph(int rank, int size, const TensorType& type) {
  GraphBuilder builder(1, {SlotOf(rank, size)});
  NodeSpec kernel;
  kernel.op = "abs";
  kernel.inputs = {AddInput(&builder, type)};
  AddOutput(&builder, AddAllReduce(&builder, (*builder.Emit(kernel))[0], rank, "x.cc:1"));
  return builder.Build();
}

// Two worlds on the same devices, in the same order. The second one's gang stands behind the first
// one's and fails meanwhile; what it ends is its own.
TEST_F(NodeTest, AGangThatFailsFailsNoOtherWorldOfItsDevices) {
  gate.Set(false);
  StartOn(HostDevices(2, MakeGatedKernel), OneEach(2), {});
  for (int r = 0; r < 2; ++r) {
    ranks_.push_back(std::make_unique<DirectRank>(loop_.get(), r, 2, "other",
                                                  std::vector<DeviceIndex>{DeviceIndex(r)},
                                                  absl::Milliseconds(1)));
  }
  for (int r = 0; r < 2; ++r) ranks_[2 + r]->AwaitWorld();
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const TensorType type(DType::kF32, {kGated});
    const int rank = static_cast<int>(i) % 2;
    ranks_[i]->Register(
        0, i < 2 ? AllReduceGraph(rank, 2, type, "x.cc:1") : LaunchedGraph(rank, 2, type));
  }
  const std::vector<float> x = {1, 2, 3, 4, 5, 6, 7};
  ranks_[0]->Register(1, NegateGraph(kGated));
  for (auto& rank : ranks_) ASSERT_TRUE(rank->LastOutcome().ok()) << rank->LastOutcome();
  ranks_[0]->RunLocal(1, {DirectRank::Inline(x)}, {1, 1});
  ranks_[0]->RunOn(0, TensorId{1, 1}, {0, 1});
  ranks_[1]->RunInline(0, x, {0, 1});
  for (int r = 0; r < 2; ++r) ranks_[r]->WaitUntilTaken();
  for (int r = 0; r < 2; ++r) ranks_[2 + r]->RunInline(0, x, {0, 1});
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(ErrorOf(ranks_[2 + r]->LastOutcome()).reason, Reason::kExecTimeout);
  }
  gate.Set(true);
  for (int r = 0; r < 2; ++r) {
    EXPECT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
    EXPECT_THAT(*ranks_[r]->Read({0, 1}), testing::Each(0));
  }
}

// Whatever its devices still have to do, one that is small and whose operands are there is done;
// one that reads what they make, or has a kernel of its own, is not.
TEST_F(NodeTest, ASmallCollectiveDoesNotWaitForItsDevices) {
  gate.Set(false);
  StartOn(HostDevices(2, MakeGatedKernel), OneEach(2), {});
  const TensorType type(DType::kF32, {kGated});
  for (int r = 0; r < 2; ++r) {
    ranks_[r]->Register(0, AllReduceGraph(r, 2, type, "x.cc:1"));
    ranks_[r]->Register(1, LaunchedGraph(r, 2, type));
    ranks_[r]->Register(2, NegateGraph(kGated));
  }
  const std::vector<float> x = {1, 2, 3, 4, 5, 6, 7};
  ranks_[0]->RunLocal(2, {DirectRank::Inline(x)}, {0, 1});
  for (int r = 0; r < 2; ++r) ranks_[r]->RunInline(0, x, {1, 1});
  for (int r = 0; r < 2; ++r) {
    EXPECT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
    EXPECT_THAT(*ranks_[r]->Read({1, 1}), testing::ElementsAre(2, 4, 6, 8, 10, 12, 14));
  }
  const int64_t published = ranks_[0]->Stats().runs_published;
  ranks_[0]->RunOn(0, TensorId{0, 1}, {2, 1});
  ranks_[1]->RunInline(0, x, {2, 1});
  for (int r = 0; r < 2; ++r) ranks_[r]->RunInline(1, x, {3, 1});
  for (int r = 0; r < 2; ++r) ranks_[r]->WaitUntilTaken();
  EXPECT_EQ(ranks_[0]->Stats().runs_published, published);
  gate.Set(true);
  for (int r = 0; r < 2; ++r) {
    EXPECT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
    EXPECT_THAT(*ranks_[r]->Read({2, 1}), testing::Each(0));
    EXPECT_THAT(*ranks_[r]->Read({3, 1}), testing::ElementsAre(2, 4, 6, 8, 10, 12, 14));
  }
}

// What a tenant has its devices do, for however long, keeps no other tenant's work there waiting.
TEST_F(NodeTest, ATenantsWorkGoesOnBesideAnothersThatDoesNotEnd) {
  gate.Set(false);
  StartOn(HostDevices(2, MakeGatedKernel), OneEach(2), {});
  for (int r = 0; r < 2; ++r) {
    ranks_.push_back(std::make_unique<DirectRank>(loop_.get(), r, 2, "other",
                                                  std::vector<DeviceIndex>{DeviceIndex(r)},
                                                  absl::Duration(), CheckCallSites::kOff, "uid:1"));
  }
  const std::vector<float> x = {1, 2, 3, 4, 5, 6, 7};
  ranks_[0]->Register(1, NegateGraph(kGated));
  ranks_[0]->RunLocal(1, {DirectRank::Inline(x)}, {1, 1});
  ranks_[0]->WaitUntilTaken();
  for (int r = 0; r < 2; ++r) {
    DirectRank& other = *ranks_[2 + r];
    other.AwaitWorld();
    other.Register(0, AllReduceGraph(r, 2, TensorType(DType::kF32, {kLarge}), "x.cc:1"));
    other.Register(1, OnesGraph());
    other.RunLocal(1, {}, {0, 1});
    other.RunOn(0, TensorId{0, 1}, {1, 1});
  }
  for (int r = 0; r < 2; ++r) {
    EXPECT_TRUE(ranks_[2 + r]->LastOutcome().ok()) << ranks_[2 + r]->LastOutcome();
    EXPECT_THAT(*ranks_[2 + r]->Read({1, 1}), testing::Each(2));
  }
  gate.Set(true);
  EXPECT_TRUE(ranks_[0]->LastOutcome().ok()) << ranks_[0]->LastOutcome();
}

// Both are launched before the first is known to have failed; its device then goes on, and the
// second itself succeeds.
TEST_F(NodeTest, WhatIsComputedFromAFailedResultHasFailedToo) {
  Start(2, {}, "launch error device=0 times=2");
  for (int r = 0; r < 2; ++r) {
    ranks_[r]->Register(0, OnesGraph());
    ranks_[r]->Register(1, SameGraph(kLarge));
    ranks_[r]->Register(2, AllReduceGraph(r, 2, TensorType(DType::kF32, {kLarge}), "a.cc:1"));
    ASSERT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
  }
  const auto expect_failed = [this](int rank, TensorId id) {
    const Error error = ErrorOf(ranks_[rank]->LastOutcome());
    EXPECT_EQ(error.code, absl::StatusCode::kInternal) << error.message;
    EXPECT_EQ(error.reason, Reason::kExecFailed) << error.message;
    EXPECT_THAT(error.message, testing::HasSubstr("launch failed on device 0"));
    EXPECT_EQ(ErrorOf(ranks_[rank]->Read(id).status()).reason, Reason::kExecFailed);
  };
  // In a run of the rank's own.
  ranks_[0]->SubmitTogether(
      {DirectRank::LocalRun(0, {}, {{0, 1}}), DirectRank::LocalRun(1, {TensorId{0, 1}}, {{1, 1}})});
  expect_failed(0, {1, 1});
  // In a gang: on all of its ranks.
  ranks_[1]->RunLocal(0, {}, {0, 1});
  ranks_[1]->RunOn(2, TensorId{0, 1}, {1, 1});
  ranks_[0]->SubmitTogether(
      {DirectRank::LocalRun(0, {}, {{2, 1}}), ranks_[0]->WorldRun(2, {TensorId{2, 1}}, {{3, 1}})});
  expect_failed(0, {3, 1});
  expect_failed(1, {1, 1});
  EXPECT_EQ(ranks_[0]->Stats().runs_published, 1);  // rank 1's ones
}

}  // namespace
}  // namespace chorus::node
