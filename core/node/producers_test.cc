#include "core/node/producers.h"

#include <memory>
#include <vector>

#include "core/base/work.h"
#include "core/collective/vote.h"
#include "core/node/world.h"
#include "core/runtime/budget.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class ProducersTest : public ::testing::Test {
 protected:
  ProducersTest() {
    local_.plan.votes = std::make_shared<VoteTemplate>();
    auto voting = std::make_shared<VoteTemplate>();
    voting->participations.resize(1);
    voting_.plan.votes = voting;
  }

  RunState* NewRun(LoadedPlan* plan) {
    RunState* const run = runs_.Add();
    run->sequence = Sequence(++last_);
    run->plan = plan;
    auto cell = std::make_shared<Cell>();
    cell->producer = run->handle;
    run->outputs.push_back(std::move(cell));
    return run;
  }
  // A run that has voted in `world`, and makes one tensor.
  RunState* Voted(const std::shared_ptr<World>& world) {
    RunState* const run = NewRun(&voting_);
    run->world = world;
    run->phase = RunState::Phase::kVoted;
    return run;
  }
  // A run that reads the tensor of each of these `times` times. It has found its producers.
  RunState* Reader(LoadedPlan* plan, const std::vector<RunState*>& of, int times = 1) {
    RunState* const run = NewRun(plan);
    for (int i = 0; i < times; ++i) {
      for (RunState* producer : of) run->inputs.push_back(producer->outputs[0]);
    }
    producers_.Find(run);
    return run;
  }
  // A local run of these.
  RunState* Local(const std::vector<RunState*>& of, int times = 1) {
    RunState* const run = Reader(&local_, of, times);
    producers_.Await(run);
    return run;
  }
  // A run of `world` that has not voted yet.
  RunState* Voting(const std::shared_ptr<World>& world, const std::vector<RunState*>& of,
                   int times = 1) {
    RunState* const run = Reader(&voting_, of, times);
    run->world = world;
    return run;
  }

  // Of a run of `world_` that reads what these make.
  Adoption AdoptionOf(const std::vector<RunState*>& of) {
    Adoption adoption(&runs_, world_, Epoch(1));
    for (const RunState* run : of) adoption.Reach(run->handle);
    return adoption;
  }
  // The next one that joins; null: there is none.
  static RunState* Next(Adoption* adoption) {
    RunState* joined = nullptr;
    while (joined == nullptr && !adoption->done()) joined = adoption->Step();
    return joined;
  }

  const std::shared_ptr<World> world_ = std::make_shared<World>(Budget::OfNode(1 << 20));
  const std::shared_ptr<World> other_ = std::make_shared<World>(Budget::OfNode(1 << 20));
  LoadedPlan local_;
  LoadedPlan voting_;
  RunTable runs_;
  Producers producers_{&runs_};
  int64_t last_ = 0;
};

// A frame has room for 21,000 inputs.
TEST_F(ProducersTest, EachRunIsGoneByOnceHoweverManyInputsComeFromIt) {
  RunState* const voted = Voted(world_);
  RunState* const local = Local({voted}, 21000);
  EXPECT_THAT(voted->consumers, ElementsAre(local->handle));
  EXPECT_THAT(local->producers, ElementsAre(voted->handle));
  EXPECT_THAT(local->voted_producers, ElementsAre(voted->handle));
  EXPECT_EQ(local->blockers, 1);
  RunState* const reader = Voting(world_, {local, voted}, 21000);
  producers_.Await(reader);
  EXPECT_THAT(local->consumers, ElementsAre(reader->handle));
  EXPECT_THAT(voted->consumers, ElementsAre(local->handle)) << "the sequencer knows of the reader";
  EXPECT_THAT(reader->voted_producers, ElementsAre(voted->handle));
  EXPECT_EQ(reader->blockers, 1);
}

TEST_F(ProducersTest, WhatIsReachedOnManyWaysIsOneProducer) {
  constexpr int kVoted = 100;
  constexpr int kLocal = 50;
  std::vector<RunState*> voted;
  for (int i = 0; i < kVoted; ++i) voted.push_back(Voted(world_));
  std::vector<RunState*> locals;
  for (int i = 0; i < kLocal; ++i) locals.push_back(Local(voted));
  RunState* const last = Local(locals);
  EXPECT_EQ(last->voted_producers.size(), static_cast<size_t>(kVoted));
  EXPECT_EQ(last->blockers, kLocal);
  for (const RunState* run : voted) EXPECT_EQ(run->consumers.size(), static_cast<size_t>(kLocal));
}

TEST_F(ProducersTest, WhatIsLaunchedOrHasEndedIsNotWaitedFor) {
  RunState* const launched = Voted(world_);
  RunState* const ended = Voted(world_);
  RunState* const reader = Voting(world_, {launched, ended});
  launched->phase = RunState::Phase::kLaunched;
  runs_.Remove(ended->handle);
  producers_.Await(reader);
  EXPECT_EQ(reader->blockers, 0);
  EXPECT_THAT(reader->voted_producers, IsEmpty());
  EXPECT_THAT(launched->consumers, IsEmpty());
}

TEST_F(ProducersTest, RunsOfAnotherWorldBlockFromOutside) {
  RunState* const voted = Voted(other_);
  RunState* const reader = Voting(world_, {voted}, 3);
  producers_.Await(reader);
  EXPECT_THAT(voted->consumers, ElementsAre(reader->handle));
  EXPECT_EQ(reader->blockers, 1);
}

TEST_F(ProducersTest, LocalRunsBetweenTwoOfOneWorldJoinItInTheirOrder) {
  RunState* const voted = Voted(world_);
  RunState* const first = Local({voted}, 3);
  RunState* const second = Local({first, voted}, 3);
  RunState* const beside = Local({Voted(other_)});
  Adoption adoption = AdoptionOf({second, beside, second});
  EXPECT_EQ(Next(&adoption), first);
  EXPECT_EQ(first->world, world_);
  EXPECT_EQ(first->blockers, 0);
  EXPECT_THAT(first->voted_producers, ElementsAre(voted->handle));
  EXPECT_THAT(voted->consumers, ElementsAre(RunHandle(), second->handle)) << "places stay";
  first->phase = RunState::Phase::kVoted;
  EXPECT_EQ(Next(&adoption), second);
  EXPECT_EQ(second->blockers, 0);
  EXPECT_THAT(second->voted_producers, ElementsAre(voted->handle, first->handle));
  EXPECT_THAT(voted->consumers, IsEmpty());
  EXPECT_THAT(first->consumers, IsEmpty());
  second->phase = RunState::Phase::kVoted;
  EXPECT_EQ(Next(&adoption), nullptr);
  EXPECT_EQ(beside->world, nullptr);
  EXPECT_TRUE(AdoptionOf({second}).done()) << "it has voted";
}

TEST_F(ProducersTest, WhatIsLaunchedOrHasEndedMeanwhileIsLeftOut) {
  RunState* const voted = Voted(world_);
  RunState* const launched = Voted(world_);
  RunState* const ends = Local({voted});
  RunState* const fails = Local({voted});
  RunState* const is_free = Local({launched});
  RunState* const stays = Local({voted});
  Adoption adoption = AdoptionOf({ends, fails, is_free, stays});
  adoption.Step();
  runs_.Remove(ends->handle);
  fails->phase = RunState::Phase::kFailing;
  launched->phase = RunState::Phase::kLaunched;
  EXPECT_EQ(Next(&adoption), stays);
  EXPECT_EQ(Next(&adoption), nullptr);
  EXPECT_EQ(is_free->world, nullptr);
}

TEST_F(ProducersTest, ItsSequencerIsNotToldAgainOfWhatHasVotedThere) {
  RunState* const voted = Voted(world_);
  RunState* const local = Local({voted});
  EXPECT_EQ(producers_.ThroughLocals(*Voting(world_, {local})), 1);
  Adoption adoption = AdoptionOf({local});
  ASSERT_EQ(Next(&adoption), local);
  local->phase = RunState::Phase::kVoted;
  RunState* const reader = Voting(world_, {local});
  EXPECT_EQ(producers_.ThroughLocals(*reader), 0);
  producers_.Await(reader);
  EXPECT_THAT(reader->voted_producers, ElementsAre(local->handle));
  RunState* const elsewhere = Voting(other_, {local});
  EXPECT_EQ(producers_.ThroughLocals(*elsewhere), 1);
  producers_.Await(elsewhere);
  EXPECT_THAT(elsewhere->voted_producers, ElementsAre(local->handle, voted->handle));
}

// Of a thousand runs each may read what all before it make.
TEST_F(ProducersTest, AStepLooksAtWhatOneRunReadsAndCountsIt) {
  constexpr int kLocals = 100;
  constexpr int64_t kProducers = kLocals * (kLocals + 1) / 2;  // of all of them together
  std::vector<RunState*> made = {Voted(world_)};
  for (int i = 0; i < kLocals; ++i) made.push_back(Local(made));
  Adoption adoption = AdoptionOf({made.back()});
  int joined = 0;
  const WorkSlice slice;
  int64_t before = SliceWork();
  while (!adoption.done()) {
    if (RunState* const local = adoption.Step()) {
      local->phase = RunState::Phase::kVoted;
      ++joined;
    }
    EXPECT_LE(SliceWork() - before, 3 * kLocals);
    before = SliceWork();
  }
  EXPECT_EQ(joined, kLocals);
  EXPECT_GE(SliceWork(), 2 * kProducers) << "to find them, and to let them join";
}

}  // namespace
}  // namespace chorus::node
