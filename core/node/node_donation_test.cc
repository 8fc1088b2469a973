// Runs that give inputs away, for their outputs to have the memory.
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/backend/fault/fault_backend.h"
#include "core/backend/fault/fault_script.h"
#include "core/backend/sim/sim_backend.h"
#include "core/base/error.h"
#include "core/node/node_rig.h"
#include "core/ops/graph_builder.h"
#include "core/ops/host_kernel.h"
#include "core/ops/host_kernels.h"
#include "core/transport/command.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

// A step: its first input, negated, may take that input's memory; its second one is all_reduced.
Graph StepGraph(int rank, int size, int64_t reduced) {
  GraphBuilder builder(1, {SlotOf(rank, size)});
  GraphInput state;
  state.type = TensorType(DType::kF32, {kLarge});
  state.role = InputRole::kState;
  state.donatable = true;
  const ValueIndex negated = AddOp(&builder, "neg", {builder.AddInput(state)});
  const ValueIndex x = AddInput(&builder, TensorType(DType::kF32, {reduced}));
  const ValueIndex sum = AddAllReduce(&builder, x, rank, "step.cc:1");
  AddOutput(&builder, negated, /*may_alias=*/0);
  AddOutput(&builder, sum);
  return builder.Build();
}

// The beginning of a step with two inputs: the first, large and negated, may take its own memory.
// The second, of two elements and negated before anything is written there, is returned.
ValueIndex BeginStep(GraphBuilder* builder) {
  const ValueIndex state = AddInput(builder, TensorType(DType::kF32, {kLarge}), true);
  const ValueIndex x = AddInput(builder, TensorType(DType::kF32, {2}));
  const ValueIndex before = AddOp(builder, "neg", {x});
  AddOutput(builder, AddOp(builder, "neg", {state}), /*may_alias=*/0);
  return before;
}

// In which nothing may fail.
Graph SoundStepGraph() {
  GraphBuilder builder(1, {});
  AddOutput(&builder, BeginStep(&builder));
  return builder.Build();
}

// A whole number of `x`, divided by 1: that may fail. Where nothing may, a run without collectives
// holds nothing back.
ValueIndex Divided(GraphBuilder* builder, ValueIndex x) {
  NodeSpec cast;
  cast.op = "cast";
  cast.attributes = {{"dtype", "i64"}};
  cast.inputs = {x};
  const ValueIndex whole = (*builder->Emit(cast))[0];
  NodeSpec one;
  one.op = "fill";
  one.attributes = TypeAttributes(TensorType(DType::kI64, {}));
  one.attributes.push_back({"value", int64_t{1}});
  return AddOp(builder, "div", {whole, (*builder->Emit(one))[0]});
}
Graph LocalStepGraph() {
  GraphBuilder builder(1, {});
  AddOutput(&builder, Divided(&builder, BeginStep(&builder)));
  return builder.Build();
}

class DonationTest : public NodeTest {
 protected:
  static constexpr int64_t kBytes = kLarge * static_cast<int64_t>(sizeof(float));
  const TensorId given_{0, 1};

  void Begin(absl::string_view faults = "", const NodeOptions& options = {}) {
    Start(2, options, faults);
    Prepare();
  }
  // Every rank has one large tensor of ones, and the step's graphs.
  void Prepare() {
    // Small buffers have their arena before memory is looked at.
    for (int r = 0; r < 2; ++r) {
      ranks_[r]->Register(4, AllReduceGraph(r, 2, TensorType(DType::kF32, {2}), "small.cc:1"));
      ranks_[r]->RunInline(4, {1, 2}, {6, 1});
    }
    for (int r = 0; r < 2; ++r) {
      ASSERT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
      ranks_[r]->Register(0, OnesGraph());
      ranks_[r]->Register(1, SameGraph(kLarge));
      ranks_[r]->Register(2, StepGraph(r, 2, 2));
      ranks_[r]->Register(3, StepGraph(r, 2, 3));
      ranks_[r]->RunLocal(0, {}, given_);
      ASSERT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
    }
  }
  // So many steps, each from the result of the one before: tensors 10, 11 and so on.
  std::vector<CommandBody> Steps(int rank, int count) {
    std::vector<CommandBody> bodies;
    for (int i = 0; i < count; ++i) {
      const TensorId from = i == 0 ? given_ : TensorId{9 + i, 1};
      bodies.push_back(ranks_[rank]->StepRun(2, from, 2, {10 + i, 1}, {20 + i, 1}));
    }
    return bodies;
  }
  void GiveWhatIsToBeRead() {
    DirectRank& rank = *ranks_[0];
    rank.Register(5, NegateGraph(kLarge));
    chorus::Run next = DirectRank::LocalRun(5, {TensorId{1, 1}}, {{2, 1}});
    next.donate = {true};
    rank.SubmitTogether(
        {DirectRank::LocalRun(0, {}, {{1, 1}}), MakeReadable{{{1, 1}}}, std::move(next)});
    EXPECT_TRUE(rank.LastOutcome().ok()) << rank.LastOutcome();
    ExpectAll(0, {2, 1}, -1);
    ExpectAll(0, {1, 1}, 1);
    EXPECT_EQ(rank.Stats().paths.donated_bytes, 0);
  }
  void ExpectAll(int rank, TensorId id, float value) {
    const auto got = ranks_[rank]->Read(id);
    ASSERT_TRUE(got.ok()) << got.status();
    ASSERT_EQ(got->size(), static_cast<size_t>(kLarge));
    for (int64_t i = 0; i < kLarge; ++i) {
      if ((*got)[i] != value) FAIL() << "element " << i << " is " << (*got)[i];
    }
  }
};

TEST_F(DonationTest, TheResultHasTheMemoryAndTheNameIsGone) {
  Begin();
  const int64_t used = ranks_[0]->Stats().memory_used_bytes;
  for (int r = 0; r < 2; ++r) ranks_[r]->RunStep(2, given_, 2, {1, 1}, {2, 1});
  for (int r = 0; r < 2; ++r) {
    EXPECT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
    ExpectAll(r, {1, 1}, -1);
    const Error error = ErrorOf(ranks_[r]->Read(given_).status());
    EXPECT_EQ(error.reason, Reason::kDonated);
    EXPECT_EQ(error.code, absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(error.message, testing::HasSubstr(absl::StrCat("the tensor was donated to run ",
                                                               ranks_[r]->last_sequence().value(),
                                                               ", whose result has its memory")));
  }
  EXPECT_EQ(ranks_[0]->Stats().paths.donated_bytes, 2 * kBytes);
  EXPECT_EQ(ranks_[0]->Stats().memory_used_bytes, used);
  // And on, with what the step has made.
  for (int r = 0; r < 2; ++r) ranks_[r]->RunStep(2, {1, 1}, 2, {4, 1}, {5, 1});
  for (int r = 0; r < 2; ++r) ExpectAll(r, {4, 1}, 1);
  EXPECT_EQ(ranks_[0]->Stats().memory_used_bytes, used);
  // A run that uses it is refused with the same.
  for (int r = 0; r < 2; ++r) {
    ranks_[r]->RunLocal(1, {given_}, {3, 1});
    EXPECT_EQ(ErrorOf(ranks_[r]->LastOutcome()).reason, Reason::kDonated);
  }
}

// However many inputs runs are given, the names of each run's stand for one error: nobody else's is
// forgotten.
TEST_F(DonationTest, ManyDonationsTakeNobodysErrors) {
  constexpr int32_t kEach = 700;
  constexpr uint32_t kRuns = 3;  // together more than are kept (ErrorStore)
  Start(1);
  DirectRank& rank = *ranks_[0];
  GraphBuilder made(1, {});
  GraphBuilder negated(1, {});
  for (int32_t i = 0; i < kEach; ++i) {
    AddOutput(&made, AddFill(&made, 1, i));
    const ValueIndex x = AddInput(&negated, TensorType(DType::kF32, {1}), /*donatable=*/true);
    AddOutput(&negated, AddOp(&negated, "neg", {x}), /*may_alias=*/i);
  }
  rank.Register(0, made.Build());
  rank.Register(1, negated.Build());
  rank.RunLocal(1, {}, {5000, 1});  // wants inputs
  const Error before = ErrorOf(rank.LastOutcome());
  ASSERT_NE(before.id, ErrorId());
  for (uint32_t number = 1; number <= kRuns; ++number) {
    SCOPED_TRACE(number);
    std::vector<TensorId> given;
    std::vector<TensorId> results;
    for (int32_t i = 0; i < kEach; ++i) {
      given.push_back({i, number});
      results.push_back({kEach + i, number});
    }
    rank.Submit(DirectRank::LocalRun(0, {}, given));
    ASSERT_TRUE(rank.LastOutcome().ok()) << rank.LastOutcome();
    chorus::Run run = DirectRank::LocalRun(1, {given.begin(), given.end()}, results);
    run.donate.assign(kEach, true);
    rank.Submit(std::move(run));
    ASSERT_TRUE(rank.LastOutcome().ok()) << rank.LastOutcome();
    const Error first = ErrorOf(rank.Read(given.front()).status());
    const Error last = ErrorOf(rank.Read(given.back()).status());
    EXPECT_EQ(first.reason, Reason::kDonated);
    EXPECT_EQ(first.id, last.id);
    Release release;
    release.tensors = given;
    release.tensors.insert(release.tensors.end(), results.begin(), results.end());
    rank.Submit(std::move(release));
  }
  EXPECT_EQ(rank.Stats().paths.donated_bytes, int64_t{4} * kEach * kRuns);
  const auto found = rank.Call<absl::StatusOr<Error>>(
      [&before](LocalNode& node, absl::Time, Promise<absl::StatusOr<Error>>* done) {
        done->Set(node.FindError(before.id, "uid:0"));
      });
  EXPECT_TRUE(found.ok()) << found.status();
}

TEST_F(DonationTest, ARefusedRunGivesItBack) {
  Begin();
  ranks_[0]->RunStep(2, given_, 2, {1, 1}, {2, 1});
  // Until its fate is known nobody else may hold it.
  const Error promised = ErrorOf(ranks_[0]->Read(given_).status());
  EXPECT_EQ(promised.reason, Reason::kDonated);
  EXPECT_THAT(promised.message, testing::HasSubstr("not launched yet"));
  // A caller that is told of the refusal finds it there again.
  Promise<absl::Status> outcome;
  const SessionId session = ranks_[0]->session();
  const Sequence step = ranks_[0]->last_sequence();
  loop_->PostOwn([&](LocalNode& node, absl::Time now) {
    node.WaitOutcome(session, step, now + kPatience, [&, now](const Outcome&) {
      node.ReadTensor(session, given_, now + kPatience,
                      [&](const absl::StatusOr<ReadableTensor>& view) {
                        outcome.Set(Detached(view.status()));
                      });
    });
  });
  ranks_[1]->RunStep(3, given_, 3, {1, 1}, {2, 1});
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(ErrorOf(ranks_[r]->LastOutcome()).reason, Reason::kMismatch);
    ExpectAll(r, given_, 1);
    ranks_[r]->NextEpoch();
  }
  const absl::Status there = outcome.Get();
  EXPECT_TRUE(there.ok()) << there;
  EXPECT_EQ(ranks_[0]->Stats().paths.donated_bytes, 0);
  for (int r = 0; r < 2; ++r) ranks_[r]->RunStep(2, given_, 2, {3, 1}, {4, 1});
  for (int r = 0; r < 2; ++r) ExpectAll(r, {3, 1}, -1);
  EXPECT_EQ(ranks_[0]->Stats().paths.donated_bytes, 2 * kBytes);
}

TEST_F(DonationTest, WithASecondReferenceItIsLeftAlone) {
  Begin();
  for (int r = 0; r < 2; ++r) ranks_[r]->RunLocal(1, {given_}, {5, 1});
  for (int r = 0; r < 2; ++r) EXPECT_TRUE(ranks_[r]->LastOutcome().ok());
  const int64_t used = ranks_[0]->Stats().memory_used_bytes;
  for (int r = 0; r < 2; ++r) ranks_[r]->RunStep(2, given_, 2, {1, 1}, {2, 1});
  for (int r = 0; r < 2; ++r) {
    EXPECT_TRUE(ranks_[r]->LastOutcome().ok());
    ExpectAll(r, {1, 1}, -1);
    ExpectAll(r, given_, 1);
    ExpectAll(r, {5, 1}, 1);
  }
  EXPECT_EQ(ranks_[0]->Stats().paths.donated_bytes, 0);
  EXPECT_GE(ranks_[0]->Stats().memory_used_bytes, used + 2 * kBytes);
}

// Launched, but the collective failed: what would have been written there is held back.
TEST_F(DonationTest, AFailureOfTheCollectiveLeavesItIntact) {
  Begin("collective error device=1 skip=1");  // the first is no step
  for (int r = 0; r < 2; ++r) ranks_[r]->RunStep(2, given_, 2, {1, 1}, {2, 1});
  for (int r = 0; r < 2; ++r) {
    EXPECT_FALSE(ranks_[r]->LastOutcome().ok());
    EXPECT_FALSE(ranks_[r]->Read({1, 1}).ok());
    ExpectAll(r, given_, 1);
    ranks_[r]->NextEpoch();
  }
  EXPECT_EQ(ranks_[0]->Stats().paths.donated_bytes, 0);
  for (int r = 0; r < 2; ++r) ranks_[r]->RunStep(2, given_, 2, {3, 1}, {4, 1});
  for (int r = 0; r < 2; ++r) ExpectAll(r, {3, 1}, -1);
}

// The device of rank 0 fails in what comes after the collective: what stands there is unknown.
TEST_F(DonationTest, AFailureAfterTheCollectiveLosesIt) {
  Begin("launch error device=0 skip=1");  // the first makes what is given
  for (int r = 0; r < 2; ++r) ranks_[r]->RunStep(2, given_, 2, {1, 1}, {2, 1});
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(ErrorOf(ranks_[r]->LastOutcome()).reason, Reason::kExecFailed);
    EXPECT_FALSE(ranks_[r]->Read({1, 1}).ok());
    const Error error = ErrorOf(ranks_[r]->Read(given_).status());
    EXPECT_EQ(error.reason, Reason::kDonated);
    EXPECT_THAT(error.message, testing::HasSubstr("failed after it had written there"));
  }
  EXPECT_EQ(ranks_[0]->Stats().paths.donated_bytes, 0);
}

// It may still be written: what was given away is not back before the devices have done with it.
TEST_F(DonationTest, ALateRunKeepsItWhileItIsUnderWay) {
  NodeOptions options;
  options.sequencer.exec_timeout = absl::Seconds(1);
  Begin("launch delay device=0 skip=1 for=2s", options);  // the first makes what is given
  for (int r = 0; r < 2; ++r) ranks_[r]->RunStep(2, given_, 2, {1, 1}, {2, 1});
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(ErrorOf(ranks_[r]->LastOutcome()).reason, Reason::kExecTimeout);
    EXPECT_EQ(ErrorOf(ranks_[r]->Read(given_).status()).reason, Reason::kDonated);
  }
}

// Steps follow one another without waiting: each is given the memory of what the one before it has
// not computed yet.
TEST_F(DonationTest, StepsUnderWayHandTheirMemoryOn) {
  for (const bool sim : {false, true}) {
    if (sim) {
      TearDown();
      ranks_.clear();
      StartOnSim(2);
      Prepare();
    } else {
      Begin();
    }
    const int64_t used = ranks_[0]->Stats().memory_used_bytes;
    for (int r = 0; r < 2; ++r) ranks_[r]->SubmitTogether(Steps(r, 5));
    for (int r = 0; r < 2; ++r) {
      EXPECT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
    }
    // Sums are small.
    EXPECT_LT(ranks_[0]->Stats().memory_used_bytes, used + kBytes);
    for (int r = 0; r < 2; ++r) {
      ExpectAll(r, {14, 1}, -1);
      for (int step = 0; step < 5; ++step) {
        const TensorId id{step == 0 ? 0 : 9 + step, 1};
        EXPECT_EQ(ErrorOf(ranks_[r]->Read(id).status()).reason, Reason::kDonated) << step;
      }
    }
    EXPECT_EQ(ranks_[0]->Stats().paths.donated_bytes, 5 * 2 * kBytes);
  }
}

// One of the steps under way fails: what went into the first that has failed is there again, the
// same on every rank, what came before is gone, and all later steps have failed for its reason,
// though they were launched.
TEST_F(DonationTest, AFailedStepLeavesWhatWentIntoIt) {
  // A collective of no step comes first; each step has its own and the one that commits.
  for (int skip = 1; skip <= 10; ++skip) {
    const int device = skip % 2;
    SCOPED_TRACE(absl::StrCat("collective error device=", device, " skip=", skip));
    TearDown();
    ranks_.clear();
    Begin(absl::StrCat("collective error device=", device, " skip=", skip));
    for (int r = 0; r < 2; ++r) ranks_[r]->SubmitTogether(Steps(r, 5));
    int good[2] = {-1, -1};  // steps that are done
    for (int r = 0; r < 2; ++r) {
      const Error last = ErrorOf(ranks_[r]->LastOutcome());
      EXPECT_EQ(last.reason, Reason::kExecFailed);
      for (int done = 5; done >= 0; --done) {
        const TensorId id = done == 0 ? given_ : TensorId{9 + done, 1};
        const Error error = ErrorOf(ranks_[r]->Read(id).status());
        if (good[r] >= 0) {
          EXPECT_EQ(error.reason, Reason::kDonated) << done << ": " << error.message;
        } else if (error.code == absl::StatusCode::kOk) {
          good[r] = done;
          ExpectAll(r, id, done % 2 == 0 ? 1 : -1);
        } else {
          EXPECT_EQ(error.id, last.id) << done << ": " << error.message;
        }
      }
      ranks_[r]->NextEpoch();
    }
    ASSERT_GE(good[0], 0);
    ASSERT_EQ(good[0], good[1]);
    EXPECT_LE(good[0], (skip - 1) / 2);
    // And on from there.
    const TensorId from = good[0] == 0 ? given_ : TensorId{9 + good[0], 1};
    for (int r = 0; r < 2; ++r) ranks_[r]->RunStep(2, from, 2, {30, 1}, {31, 1});
    for (int r = 0; r < 2; ++r) ExpectAll(r, {30, 1}, good[0] % 2 == 0 ? -1 : 1);
  }
}

// A kernel of one rank fails, before anything is written: the other rank, whose device saw nothing
// wrong, must not have written either.
TEST_F(DonationTest, AKernelThatFailsOnOneRankHoldsAllBack) {
  Begin("launch error device=1 skip=1");  // the first makes what is given
  for (int r = 0; r < 2; ++r) {
    GraphBuilder builder(1, {SlotOf(r, 2)});
    AddOutput(&builder, AddAllReduce(&builder, BeginStep(&builder), r, "step.cc:1"));
    ranks_[r]->Register(5, builder.Build());
    ranks_[r]->RunStep(5, given_, 2, {1, 1}, {2, 1});
  }
  for (int r = 0; r < 2; ++r) {
    const Error error = ErrorOf(ranks_[r]->LastOutcome());
    EXPECT_EQ(error.reason, Reason::kExecFailed);
    EXPECT_THAT(error.message, testing::HasSubstr("rank 1: "));
    EXPECT_THAT(error.message, testing::HasSubstr("launch failed on device 1"));
    EXPECT_EQ(error.culprit.rank, 1);
    ExpectAll(r, given_, 1);
    ranks_[r]->NextEpoch();
  }
  for (int r = 0; r < 2; ++r) ranks_[r]->RunStep(5, given_, 2, {3, 1}, {4, 1});
  for (int r = 0; r < 2; ++r) ExpectAll(r, {3, 1}, -1);
}

// The same where the ranks have work in common besides, and only one of them gives something away.
TEST_F(DonationTest, AFailureHoldsBackADonorThatSharesWorkWithOneThatIsNone) {
  Begin("launch error device=1 skip=1");  // the first makes what is given
  for (int r = 0; r < 2; ++r) {
    GraphBuilder builder(1, {SlotOf(r, 2)});
    const ValueIndex before = BeginStep(&builder);
    const ValueIndex total = AddOp(&builder, "sum", {AddAllReduce(&builder, before, r, "a.cc:1")});
    NodeSpec spread;
    spread.op = "expand";
    spread.inputs = {total};
    spread.attributes = {{"dims", std::vector<int64_t>{kLarge}}};
    AddOutput(&builder, (*builder.Emit(std::move(spread)))[0]);
    ranks_[r]->Register(5, builder.Build());
    chorus::Run run = ranks_[r]->StepRun(5, given_, 2, {1, 1}, {2, 1});
    if (r == 1) run.donate.clear();
    ranks_[r]->Submit(run);
  }
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(ErrorOf(ranks_[r]->LastOutcome()).reason, Reason::kExecFailed);
    ExpectAll(r, given_, 1);
    ranks_[r]->NextEpoch();
  }
  EXPECT_EQ(ranks_[0]->Stats().shared_kernels, 2);
}

// So without other ranks: what may fail comes before what is written.
TEST_F(DonationTest, AKernelOfALocalStepThatFailsLeavesItIntact) {
  Begin("launch error device=0 skip=1");  // the first makes what is given
  DirectRank& rank = *ranks_[0];
  rank.Register(5, LocalStepGraph());
  for (const int32_t slot : {1, 3}) {
    chorus::Run run =
        DirectRank::LocalRun(5, {given_, DirectRank::Inline({1, 2})}, {{slot, 1}, {slot + 1, 1}});
    run.donate = {true, false};
    rank.Submit(run);
    EXPECT_EQ(rank.LastOutcome().ok(), slot == 3) << rank.LastOutcome();
    if (slot == 1) ExpectAll(0, given_, 1);
  }
  ExpectAll(0, {3, 1}, -1);
  EXPECT_EQ(rank.Stats().paths.donated_bytes, kBytes);
}

// The step is launched by then.
TEST_F(DonationTest, BytesThatDoNotArriveLeaveItIntact) {
  for (const bool created : {false, true}) {
    SCOPED_TRACE(created);
    ranks_.clear();
    loop_.reset();
    SimBackendOptions sim;
    sim.devices = 2;
    sim.make_kernel = MakeHostKernel;
    // The first are inline bytes of what Prepare() runs.
    StartOn(CreateFaultBackend(CreateSimBackend(sim),
                               *ParseFaultScript("copy error device=0 skip=1"), nullptr),
            OneEach(2), {});
    Prepare();
    DirectRank& rank = *ranks_[0];
    rank.Register(5, SoundStepGraph());
    ClientMemory memory(&rank, 2);
    for (const int32_t slot : {1, 3}) {
      const TensorId made{slot + 20, 1};
      CreateTensor create;
      create.tensor = made;
      create.type = TensorType(DType::kF32, {2});
      create.source = memory.From(0).into;
      chorus::Run run =
          DirectRank::LocalRun(5, {given_, memory.From(0).into}, {{slot, 1}, {slot + 1, 1}});
      if (created) run.inputs[1] = made;
      run.donate = {true, false};
      created ? rank.SubmitTogether({create, run}) : rank.Submit(run);
      EXPECT_EQ(rank.LastOutcome().ok(), slot == 3) << rank.LastOutcome();
      if (slot == 3) continue;
      EXPECT_THAT(std::string(rank.LastOutcome().message()), testing::HasSubstr("injected"));
      ExpectAll(0, given_, 1);
    }
    ExpectAll(0, {3, 1}, -1);
  }
}

// The steps behind it are launched by then, with the memory that the first gives back.
TEST_F(DonationTest, StepsBehindAFailedOneWriteNothing) {
  Begin("launch error device=0 skip=1");  // the first makes what is given
  DirectRank& rank = *ranks_[0];
  rank.Register(5, LocalStepGraph());
  std::vector<CommandBody> steps;
  for (int i = 0; i < 3; ++i) {
    const TensorId from = i == 0 ? given_ : TensorId{9 + i, 1};
    chorus::Run run =
        DirectRank::LocalRun(5, {from, DirectRank::Inline({1, 2})}, {{10 + i, 1}, {20 + i, 1}});
    run.donate = {true, false};
    steps.push_back(std::move(run));
  }
  rank.SubmitTogether(std::move(steps));
  const Error last = ErrorOf(rank.LastOutcome());
  EXPECT_THAT(last.message, testing::HasSubstr("launch failed on device 0"));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(ErrorOf(rank.Read({10 + i, 1}).status()).id, last.id);
  ExpectAll(0, given_, 1);
  EXPECT_EQ(rank.Stats().paths.donated_bytes, 0);
}

// What fails is not what the step reads, but what that was made of: by its own device, or together
// with others, of which one alone knows.
TEST_F(DonationTest, WhatFailsRunsBeforeAStepLeavesItIntact) {
  enum class Between { kLocal, kCollective, kCollectiveAndLocal };
  for (const Between between :
       {Between::kLocal, Between::kCollective, Between::kCollectiveAndLocal}) {
    SCOPED_TRACE(static_cast<int>(between));
    const bool collective = between != Between::kLocal;
    ranks_.clear();
    loop_.reset();
    Begin("launch error device=1 skip=2");  // the first make what is given, and what is read
    const TensorType type(DType::kF32, {kLarge});
    for (int r = 0; r < 2; ++r) {
      DirectRank& rank = *ranks_[r];
      GraphBuilder first(1, {});
      const ValueIndex x = AddInput(&first, type);
      AddOutput(&first, AddOp(&first, "neg", {x}));
      AddOutput(&first, Divided(&first, x));
      rank.Register(5, first.Build());
      rank.Register(6, AllReduceGraph(r, 2, type, "sum.cc:1"));
      rank.Register(7, NegateGraph(kLarge));
      GraphBuilder step(1, {});
      const ValueIndex state = AddInput(&step, type, /*donatable=*/true);
      const ValueIndex sum = AddOp(&step, "add", {state, AddInput(&step, type)});
      AddOutput(&step, sum, /*may_alias=*/0);
      rank.Register(8, step.Build());
      rank.RunLocal(0, {}, {10, 1});
      TensorId last{11, 1};
      std::vector<CommandBody> bodies = {
          DirectRank::LocalRun(5, {TensorId{10, 1}}, {last, {14, 1}})};
      if (collective) {
        bodies.push_back(rank.WorldRun(6, {last}, {{12, 1}}));
        last = {12, 1};
      }
      if (between != Between::kCollective) {
        bodies.push_back(DirectRank::LocalRun(7, {last}, {{13, 1}}));
        last = {13, 1};
      }
      chorus::Run next = DirectRank::LocalRun(8, {given_, last}, {{15, 1}});
      next.donate = {true, false};
      bodies.push_back(std::move(next));
      rank.SubmitTogether(std::move(bodies));
    }
    if (!collective) {
      EXPECT_TRUE(ranks_[0]->LastOutcome().ok()) << ranks_[0]->LastOutcome();
    }
    for (int r = collective ? 0 : 1; r < 2; ++r) {
      EXPECT_THAT(std::string(ranks_[r]->LastOutcome().message()),
                  testing::HasSubstr("launch failed on device 1"));
      ExpectAll(r, given_, 1);
    }
    EXPECT_EQ(ranks_[0]->Stats().paths.donated_bytes, collective ? 0 : kBytes);
  }
}

// A result of a run under way that others have, or may come to have, is not given on.
TEST_F(DonationTest, WhatARunUnderWayGivesToOthersIsLeftAlone) {
  Begin();
  for (int r = 0; r < 2; ++r) {
    const TensorType type(DType::kF32, {kLarge});
    for (const int32_t graph : {5, 6}) {
      GraphBuilder builder(1, {SlotOf(r, 2)});
      const ValueIndex made = AddOp(&builder, "neg", {AddInput(&builder, type)});
      const ValueIndex sum = AddAllReduce(&builder, made, r, "a.cc:1");
      AddOutput(&builder, made);
      // 5: what a collective reads. 6: twice.
      AddOutput(&builder, graph == 5 ? sum : made);
      if (graph == 6) AddOutput(&builder, sum);
      ranks_[r]->Register(graph, builder.Build());
    }
    std::vector<CommandBody> bodies;
    bodies.push_back(ranks_[r]->WorldRun(5, {given_}, {{1, 1}, {2, 1}}));
    bodies.push_back(ranks_[r]->StepRun(2, {1, 1}, 2, {3, 1}, {4, 1}));
    bodies.push_back(ranks_[r]->WorldRun(6, {given_}, {{11, 1}, {12, 1}, {13, 1}}));
    bodies.push_back(ranks_[r]->StepRun(2, {11, 1}, 2, {14, 1}, {15, 1}));
    // A second reader.
    bodies.push_back(ranks_[r]->StepRun(2, given_, 2, {21, 1}, {22, 1}));
    bodies.push_back(DirectRank::LocalRun(1, {TensorId{21, 1}}, {{23, 1}}));
    bodies.push_back(ranks_[r]->StepRun(2, {21, 1}, 2, {24, 1}, {25, 1}));
    ranks_[r]->SubmitTogether(std::move(bodies));
  }
  for (int r = 0; r < 2; ++r) {
    EXPECT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
    ExpectAll(r, {1, 1}, -1);
    ExpectAll(r, {3, 1}, 1);
    ExpectAll(r, {11, 1}, -1);
    ExpectAll(r, {12, 1}, -1);
    ExpectAll(r, {14, 1}, 1);
    ExpectAll(r, {21, 1}, -1);
    ExpectAll(r, {23, 1}, -1);
    ExpectAll(r, {24, 1}, 1);
  }
  EXPECT_EQ(ranks_[0]->Stats().paths.donated_bytes, 0);
}

// What stands in the way is found after the promise.
TEST_F(DonationTest, ARunThatGetsNoMemoryGivesItBack) {
  NodeOptions options;
  options.memory_limit_bytes = 7 * kBytes / 2;  // for three tensors: no sum of one of them
  Begin("", options);
  DirectRank& rank = *ranks_[0];
  rank.RunLocal(0, {}, {1, 1});
  rank.Register(5, StepGraph(0, 2, kLarge));
  chorus::Run step = rank.WorldRun(5, {given_, TensorId{1, 1}}, {{2, 1}, {3, 1}});
  step.donate = {true, false};
  rank.Submit(std::move(step));
  EXPECT_EQ(ErrorOf(rank.LastOutcome()).reason, Reason::kOutOfMemory);
  ExpectAll(0, given_, 1);
  EXPECT_EQ(rank.Stats().paths.donated_bytes, 0);
}

// Another run reads it, which on rank 0 is not launched when the step is submitted.
TEST_F(DonationTest, WhatAnotherRunReadsIsLeftAlone) {
  Begin();
  for (int r = 0; r < 2; ++r) {
    ranks_[r]->Register(5, AllReduceGraph(r, 2, TensorType(DType::kF32, {kLarge}), "a.cc:1"));
    ranks_[r]->SubmitTogether({ranks_[r]->WorldRun(5, {given_}, {{3, 1}}),
                               ranks_[r]->StepRun(2, given_, 2, {1, 1}, {2, 1})});
  }
  for (int r = 0; r < 2; ++r) {
    EXPECT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
    ExpectAll(r, {1, 1}, -1);
    ExpectAll(r, {3, 1}, 2);
    ExpectAll(r, given_, 1);
  }
  EXPECT_EQ(ranks_[0]->Stats().paths.donated_bytes, 0);
}

TEST_F(DonationTest, ItTakesARunAGraphAndAResultThatPermitIt) {
  Begin();
  DirectRank& rank = *ranks_[0];
  rank.Register(5, NegateGraph(kLarge));
  chorus::Run run = DirectRank::LocalRun(5, {given_}, {{1, 1}});
  run.donate = {false};
  rank.Submit(run);
  ExpectAll(0, {1, 1}, -1);
  ExpectAll(0, given_, 1);
  // A result that nobody wants takes over nothing.
  run.donate = {true};
  run.outputs[0].kind = OutBinding::Kind::kDiscard;
  rank.Submit(run);
  EXPECT_TRUE(rank.LastOutcome().ok()) << rank.LastOutcome();
  ExpectAll(0, given_, 1);
  chorus::Run same = DirectRank::LocalRun(1, {given_}, {{2, 1}});
  same.donate = {true};
  rank.Submit(same);
  const absl::Status refused = rank.LastOutcome();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  EXPECT_THAT(std::string(refused.message()), testing::HasSubstr("cannot be donated"));
  EXPECT_EQ(rank.Stats().paths.donated_bytes, 0);
  run.outputs[0].kind = OutBinding::Kind::kFresh;
  run.outputs[0].id = {3, 1};
  rank.Submit(run);
  ExpectAll(0, {3, 1}, -1);
  const Error gone = ErrorOf(rank.Read(given_).status());
  EXPECT_EQ(gone.reason, Reason::kDonated);
  EXPECT_THAT(gone.message, testing::HasSubstr("whose result has its memory"));
  EXPECT_EQ(rank.Stats().paths.donated_bytes, kBytes);
}

// They have no memory to give.
TEST_F(DonationTest, BytesBesideTheRunAndEmptyTensorsMayBeGivenToo) {
  Begin();
  DirectRank& rank = *ranks_[0];
  rank.Register(5, NegateGraph(2));
  chorus::Run run = DirectRank::LocalRun(5, {DirectRank::Inline({1, 2})}, {{1, 1}});
  run.donate = {true};
  rank.Submit(run);
  EXPECT_THAT(*rank.Read({1, 1}), testing::ElementsAre(-1, -2));
  CreateTensor create;
  create.tensor = {2, 1};
  create.type = TensorType(DType::kF32, {0});
  create.device = DeviceIndex(0);
  create.source = DirectRank::Inline({});
  rank.Submit(std::move(create));
  rank.Register(6, NegateGraph(0));
  run = DirectRank::LocalRun(6, {TensorId{2, 1}}, {{3, 1}});
  run.donate = {true};
  rank.Submit(run);
  EXPECT_THAT(*rank.Read({3, 1}), testing::IsEmpty());
  EXPECT_EQ(rank.Stats().paths.donated_bytes, 0);
}

// A reader that waits for it would come when the next run has written there.
TEST_F(DonationTest, WhatIsToBeReadIsLeftAlone) {
  Begin();
  GiveWhatIsToBeRead();
}
TEST_F(DonationTest, WhatIsToBeReadIsLeftAloneOnSim) {
  StartOnSim(2);
  Prepare();
  GiveWhatIsToBeRead();
}

// There readers have a copy, which is of what stood there before.
TEST_F(DonationTest, OnSimTheResultIsRead) {
  StartOnSim(2);
  Prepare();
  for (int r = 0; r < 2; ++r) ExpectAll(r, given_, 1);
  for (int r = 0; r < 2; ++r) ranks_[r]->RunStep(2, given_, 2, {1, 1}, {2, 1});
  for (int r = 0; r < 2; ++r) ExpectAll(r, {1, 1}, -1);
  EXPECT_EQ(ranks_[0]->Stats().paths.donated_bytes, 2 * kBytes);
}

}  // namespace
}  // namespace chorus::node
