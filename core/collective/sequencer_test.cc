#include "core/collective/sequencer.h"

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/counting_heap.h"
#include "core/base/work.h"
#include "core/collective/sequencer_tables.h"
#include "core/collective/test_rows.h"
#include "core/collective/test_run.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;
using Actions = Sequencer::Actions;
using Kind = SequencerAction::Kind;

const GroupId kWorld(0);

absl::Time At(double seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

Sequencer World(int size, size_t rows_per_event = SequencerOptions().rows_per_event,
                size_t newest_pending = SequencerOptions().newest_pending) {
  SequencerOptions options;
  options.rows_per_event = rows_per_event;
  options.newest_pending = newest_pending;
  options.agree_timeout = absl::Seconds(60);
  options.exec_timeout = absl::Seconds(300);
  options.mismatch_grace = absl::ZeroDuration();
  Sequencer sequencer(size, options);
  for (int rank = 0; rank < size; ++rank) sequencer.SetMember(Rank(rank), {100 + rank, ""});
  return sequencer;
}

GroupId AddGroup(Sequencer* sequencer, const std::vector<int32_t>& members) {
  std::vector<Rank> ranks;
  for (const int32_t member : members) ranks.push_back(Rank(member));
  return *sequencer->AddGroup(ranks[0], ranks);
}

// Runs that are asked to follow another order than their own do; what comes of it.
Actions Follow(Sequencer* sequencer, const Actions& actions) {
  Actions rest;
  for (const SequencerAction& action : actions) {
    if (action.kind == Kind::kReserve) {
      sequencer->Reserved(action.run, At(0), &rest);
    } else {
      rest.push_back(action);
    }
  }
  return rest;
}

// Submits and returns what came of it; the vote itself must be accepted.
Actions Submitted(Sequencer* sequencer, TestRun run, absl::Time now = At(0)) {
  Actions actions;
  const absl::Status status = sequencer->Submit(run.Build(), now, &actions);
  EXPECT_TRUE(status.ok()) << status;
  return actions;
}
Actions Cast(Sequencer* sequencer, TestRun run, absl::Time now = At(0)) {
  return Follow(sequencer, Submitted(sequencer, std::move(run), now));
}

// Refused, and as if it had never come.
absl::Status Refused(Sequencer* sequencer, TestRun run) {
  const std::string before = sequencer->CanonicalState();
  const size_t size = sequencer->StateSize();
  Actions actions;
  const absl::Status status = sequencer->Submit(run.Build(), At(0), &actions);
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(actions, IsEmpty());
  EXPECT_EQ(sequencer->CanonicalState(), before);
  EXPECT_EQ(sequencer->StateSize(), size);
  return status;
}

std::vector<int64_t> Launched(const Actions& actions) {
  std::vector<int64_t> runs;
  for (const SequencerAction& action : actions) {
    if (action.kind != Kind::kLaunch) continue;
    for (const RunHandle run : action.runs) runs.push_back(run.value());
  }
  return runs;
}

// Events, each in a slice of its own.
struct Slices {
  int64_t largest = 0;
  int count = 0;
  Actions InOne(const std::function<void(Actions*)>& event) {
    const WorkSlice slice;
    Actions actions;
    event(&actions);
    largest = std::max(largest, SliceWork());
    ++count;
    return actions;
  }
  // What earlier ones had no time for.
  Actions GoOn(Sequencer* sequencer, absl::Time now = At(0),
               int most = std::numeric_limits<int>::max()) {
    Actions all;
    while (sequencer->NextDeadline() <= now && most-- > 0) {
      for (SequencerAction& action :
           InOne([&](Actions* actions) { sequencer->Advance(now, actions); })) {
        all.push_back(std::move(action));
      }
    }
    return all;
  }
};

std::vector<int64_t> Failed(const Actions& actions) {
  std::vector<int64_t> runs;
  for (const SequencerAction& action : OneByOne(actions)) {
    if (action.kind == Kind::kFail) runs.push_back(action.run.value());
  }
  return runs;
}

// The error of the epoch that these actions end; all failed runs have the same.
Error EndedBy(const Actions& actions) {
  if (actions.empty() || actions.back().kind != Kind::kEpochEnded) {
    ADD_FAILURE() << "no epoch ended";
    return Error();
  }
  const Error& cause = *actions.back().error;
  for (const SequencerAction& action : actions) {
    EXPECT_NE(action.kind, Kind::kLaunch);
    EXPECT_EQ(action.error->message, cause.message);
    EXPECT_EQ(action.error->reason, cause.reason);
  }
  return cause;
}

InstanceKey WorldKey(int64_t since, int64_t call) {
  InstanceKey key;
  key.since = Epoch(since);
  key.at.call = call;
  return key;
}

// Calls `first` to `next` of the world's group in step 0, which the rank could not make.
RefusedMember RefusedAt(int32_t rank, int64_t first, int64_t next) {
  RefusedMember member;
  member.rank = Rank(rank);
  RefusedCalls calls;
  calls.first = first;
  calls.next = next;
  member.calls = {calls};
  return member;
}

TestRun Simple(const Sequencer& sequencer, int64_t run, int32_t member, int64_t base) {
  return OneAllReduce(run, sequencer.epoch(), kWorld, sequencer.size(), member, base);
}

// The same, holding a tape entry.
TestRun WithTape(const Sequencer& sequencer, int64_t run, int32_t member, int64_t base) {
  TestRun result(run, sequencer.epoch());
  result.AllReduce(result.Slot(kWorld, sequencer.size(), {member}, {base}), member).wants_grad =
      true;
  return result;
}

TestRun Gradient(const Sequencer& sequencer, int64_t run, int32_t member,
                 const InstanceKey& forward, int32_t request, int64_t step = 0) {
  TestRun result(run, sequencer.epoch(), step);
  result.GradientOf(forward, request, result.Slot(kWorld, sequencer.size(), {member}, {0}), member);
  return result;
}

// Launches the next all_reduce of the world with everyone's tape.
InstanceKey Forward(Sequencer* sequencer, int64_t first_run, int64_t base,
                    const std::vector<int32_t>& without_tape = {}) {
  Actions actions;
  for (int32_t member = 0; member < sequencer->size(); ++member) {
    const bool tape =
        std::find(without_tape.begin(), without_tape.end(), member) == without_tape.end();
    actions = Cast(sequencer, tape ? WithTape(*sequencer, first_run + member, member, base)
                                   : Simple(*sequencer, first_run + member, member, base));
  }
  EXPECT_THAT(Launched(actions), SizeIs(sequencer->size()));
  return WorldKey(1, base);
}

// --- Closing and launching ----------------------------------------------------------------------

TEST(SequencerTest, LaunchesWhenTheLastMemberHasVoted) {
  Sequencer sequencer = World(3);
  EXPECT_THAT(Cast(&sequencer, Simple(sequencer, 12, 2, 0)), IsEmpty());
  EXPECT_THAT(Cast(&sequencer, Simple(sequencer, 10, 0, 0)), IsEmpty());
  const Actions actions = Cast(&sequencer, Simple(sequencer, 11, 1, 0));
  ASSERT_THAT(actions, SizeIs(1));
  EXPECT_EQ(actions[0].kind, Kind::kLaunch);
  EXPECT_EQ(actions[0].ticket, Ticket(1));
  ASSERT_THAT(actions[0].instances, SizeIs(1));
  const LaunchedInstance& instance = actions[0].instances[0];
  EXPECT_EQ(instance.key, WorldKey(1, 0));
  ASSERT_THAT(instance.parts, SizeIs(3));
  for (int32_t member = 0; member < 3; ++member) {
    EXPECT_EQ(instance.parts[member].member, GroupRank(member));
    EXPECT_EQ(instance.parts[member].run, RunHandle(10 + member));
  }
  EXPECT_THAT(instance.absent, IsEmpty());
}

TEST(SequencerTest, RanksMayRunAheadOfEachOther) {
  Sequencer sequencer = World(2);
  for (int64_t i = 0; i < 5; ++i) {
    EXPECT_THAT(Cast(&sequencer, Simple(sequencer, i, 0, i)), IsEmpty());
  }
  for (int64_t i = 0; i < 5; ++i) {
    const Actions actions = Cast(&sequencer, Simple(sequencer, 10 + i, 1, i));
    EXPECT_THAT(Launched(actions), ElementsAre(i, 10 + i));
    EXPECT_EQ(actions[0].ticket, Ticket(i + 1));
  }
}

TEST(SequencerTest, ALocalRunLaunchesAtOnceOrAfterItsProducer) {
  Sequencer sequencer = World(2);
  EXPECT_THAT(Launched(Cast(&sequencer, TestRun(1, Epoch(1)))), ElementsAre(1));
  Cast(&sequencer, Simple(sequencer, 2, 0, 0));
  TestRun consumer(3, Epoch(1));
  consumer.producers() = {RunHandle(2)};
  EXPECT_THAT(Cast(&sequencer, consumer), IsEmpty());
  const Actions actions = Cast(&sequencer, Simple(sequencer, 4, 1, 0));
  ASSERT_THAT(actions, SizeIs(2));
  EXPECT_THAT(Launched(actions), ElementsAre(2, 4, 3));
  EXPECT_LT(actions[0].ticket, actions[1].ticket);
}

TEST(SequencerTest, AClosedGangWaitsForItsProducersTicket) {
  Sequencer sequencer = World(2);
  const GroupId pair = AddGroup(&sequencer, {0, 1});
  Cast(&sequencer, Simple(sequencer, 1, 0, 0));
  TestRun consumer = OneAllReduce(2, Epoch(1), pair, 2, 0, 0);
  consumer.producers() = {RunHandle(1)};
  Cast(&sequencer, consumer);
  EXPECT_THAT(Cast(&sequencer, OneAllReduce(3, Epoch(1), pair, 2, 1, 0)), IsEmpty());
  const Actions actions = Cast(&sequencer, Simple(sequencer, 4, 1, 0));
  ASSERT_THAT(actions, SizeIs(2));
  EXPECT_THAT(actions[0].runs, ElementsAre(RunHandle(1), RunHandle(4)));
  EXPECT_THAT(actions[1].runs, ElementsAre(RunHandle(2), RunHandle(3)));
  EXPECT_LT(actions[0].ticket, actions[1].ticket);
}

TEST(SequencerTest, ALongChainOfBlockedGangsIsLaunchedInOrder) {
  Sequencer sequencer = World(2);
  constexpr int kLength = 500;
  for (int side = 0; side < 2; ++side) {
    for (int i = 0; i < kLength; ++i) {
      TestRun run = OneAllReduce(side * 1000 + i, Epoch(1), kWorld, 2, side, i);
      if (i > 0) run.producers() = {RunHandle(side * 1000 + i - 1)};
      if (i == 0 && side == 1) run.BlockExternally();
      EXPECT_THAT(Cast(&sequencer, run), IsEmpty());
    }
  }
  Actions actions;
  sequencer.Unblock(RunHandle(1000), At(0), &actions);
  ASSERT_THAT(actions, SizeIs(kLength));
  for (int i = 0; i < kLength; ++i) {
    EXPECT_EQ(actions[i].ticket, Ticket(i + 1));
    EXPECT_THAT(actions[i].runs, ElementsAre(RunHandle(i), RunHandle(1000 + i)));
  }
}

TEST(SequencerTest, RunsWithSeveralInstancesFormOneGang) {
  Sequencer sequencer = World(3);
  const GroupId left = AddGroup(&sequencer, {0, 1});
  const GroupId right = AddGroup(&sequencer, {1, 2});
  Cast(&sequencer, OneAllReduce(1, Epoch(1), left, 2, 0, 0));
  TestRun both(2, Epoch(1));
  both.AllReduce(both.Slot(left, 2, {1}, {0}), 1);
  both.AllReduce(both.Slot(right, 2, {0}, {0}), 0);
  EXPECT_THAT(Cast(&sequencer, both), IsEmpty());
  const Actions actions = Cast(&sequencer, OneAllReduce(3, Epoch(1), right, 2, 1, 0));
  ASSERT_THAT(actions, SizeIs(1));
  EXPECT_THAT(actions[0].runs, ElementsAre(RunHandle(1), RunHandle(2), RunHandle(3)));
  EXPECT_THAT(actions[0].instances, SizeIs(2));
}

TEST(SequencerTest, OneSessionMayHoldSeveralMembers) {
  Sequencer sequencer = World(3);
  TestRun two(1, Epoch(1));
  const int32_t slot = two.Slot(kWorld, 3, {0, 2}, {0, 0});
  two.AllReduce(slot, 0);
  two.AllReduce(slot, 2);
  Cast(&sequencer, two);
  const Actions actions = Cast(&sequencer, Simple(sequencer, 2, 1, 0));
  ASSERT_THAT(Launched(actions), ElementsAre(1, 2));
  const std::vector<LaunchedInstance::Part>& parts = actions[0].instances[0].parts;
  ASSERT_THAT(parts, SizeIs(3));
  EXPECT_EQ(parts[0].participation, 0);
  EXPECT_EQ(parts[1].run, RunHandle(2));
  EXPECT_EQ(parts[2].participation, 1);
}

TEST(SequencerTest, TwoSlotsOfOneGroupShareItsCount) {
  Sequencer sequencer = World(2);
  for (int32_t member = 0; member < 2; ++member) {
    TestRun run(member, Epoch(1));
    const int32_t a = run.Slot(kWorld, 2, {member}, {0});
    const int32_t b = run.Slot(kWorld, 2, {member}, {0});
    run.AllReduce(a, member);
    run.AllReduce(b, member);
    run.AllReduce(a, member);
    const Actions actions = Cast(&sequencer, run);
    if (member == 0) continue;
    ASSERT_THAT(Launched(actions), SizeIs(2));
    for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(actions[0].instances[i].key, WorldKey(1, i));
  }
}

TEST(SequencerTest, ExternallyBlockedRunsWaitAndTimeOut) {
  Sequencer sequencer = World(2);
  TestRun blocked = Simple(sequencer, 1, 0, 0);
  blocked.BlockExternally();
  Cast(&sequencer, blocked);
  EXPECT_THAT(Cast(&sequencer, Simple(sequencer, 2, 1, 0)), IsEmpty());
  Sequencer other = sequencer;
  Actions actions;
  sequencer.Unblock(RunHandle(1), At(1), &actions);
  EXPECT_THAT(Launched(actions), ElementsAre(1, 2));

  actions.clear();
  other.Advance(At(60), &actions);  // both have asked: the other world has its time
  EXPECT_THAT(actions, IsEmpty());
  EXPECT_EQ(other.NextDeadline(), At(360));
  other.Advance(At(360), &actions);
  EXPECT_THAT(Failed(actions), ElementsAre(1, 2));
  EXPECT_EQ(EndedBy(actions).reason, Reason::kAgreeTimeout);
  EXPECT_EQ(EndedBy(actions).culprit.rank, 0);
  EXPECT_EQ(other.NextDeadline(), absl::InfiniteFuture());
}

// --- Order --------------------------------------------------------------------------------------

TEST(SequencerOrderTest, TheUnionOfTheRanksDependencesIsSorted) {
  // Rank 0 needs B before A; rank 1 has no opinion and asks for A first.
  Sequencer sequencer = World(2);
  const GroupId a = AddGroup(&sequencer, {0, 1});
  const GroupId b = AddGroup(&sequencer, {1, 0});
  for (int64_t round = 0; round < 3; ++round) {  // later rounds take the order that is known
    TestRun zero(round * 2, Epoch(1));
    zero.AllReduce(zero.Slot(b, 2, {1}, {round}), 1);
    zero.AllReduce(zero.Slot(a, 2, {0}, {round}), 0, {0});
    Cast(&sequencer, zero);
    TestRun one(round * 2 + 1, Epoch(1));
    one.AllReduce(one.Slot(a, 2, {1}, {round}), 1);
    one.AllReduce(one.Slot(b, 2, {0}, {round}), 0);
    const Actions actions = Cast(&sequencer, one);
    ASSERT_THAT(actions, SizeIs(1));
    ASSERT_THAT(actions[0].instances, SizeIs(2));
    EXPECT_EQ(actions[0].instances[0].key.group, b);
    EXPECT_EQ(actions[0].instances[1].key.group, a);
    EXPECT_EQ(actions[0].instances[1].key.at.call, round);
  }
}

TEST(SequencerOrderTest, ACircleInsideAGangIsPrinted) {
  Sequencer sequencer = World(2);
  const GroupId a = AddGroup(&sequencer, {0, 1});
  const GroupId b = AddGroup(&sequencer, {1, 0});
  TestRun zero(1, Epoch(1));
  zero.AllReduce(zero.Slot(a, 2, {0}, {0}), 0);
  zero.AllReduce(zero.Slot(b, 2, {1}, {0}), 1, {0});
  Cast(&sequencer, zero);
  TestRun one(2, Epoch(1));
  one.AllReduce(one.Slot(b, 2, {0}, {0}), 0);
  one.AllReduce(one.Slot(a, 2, {1}, {0}), 1, {0});
  const Actions actions = Cast(&sequencer, one);
  EXPECT_THAT(Failed(actions), ElementsAre(1, 2));
  const Error error = EndedBy(actions);
  EXPECT_EQ(error.code, absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(error.reason, Reason::kOrderCycle);
  EXPECT_THAT(error.message,
              AllOf(HasSubstr("circle"), HasSubstr("group 1"), HasSubstr("group 2"),
                    HasSubstr("rank 0"), HasSubstr("rank 1"), HasSubstr("rank1.cc:11")));
}

TEST(SequencerOrderTest, ACircleBetweenGangsIsPrinted) {
  Sequencer sequencer = World(2);
  const GroupId a = AddGroup(&sequencer, {0, 1});
  const GroupId b = AddGroup(&sequencer, {1, 0});
  Cast(&sequencer, OneAllReduce(1, Epoch(1), a, 2, 0, 0));
  TestRun second = OneAllReduce(2, Epoch(1), b, 2, 1, 0);
  second.producers() = {RunHandle(1)};
  Cast(&sequencer, second);
  Cast(&sequencer, OneAllReduce(3, Epoch(1), b, 2, 0, 0));
  TestRun fourth = OneAllReduce(4, Epoch(1), a, 2, 1, 0);
  fourth.producers() = {RunHandle(3)};
  const Actions actions = Cast(&sequencer, fourth);
  EXPECT_THAT(Failed(actions), ElementsAre(1, 2, 3, 4));
  const Error error = EndedBy(actions);
  EXPECT_EQ(error.reason, Reason::kOrderCycle);
  EXPECT_THAT(error.message,
              AllOf(HasSubstr("waits for"), HasSubstr("group 1"), HasSubstr("group 2"),
                    HasSubstr("rank 0"), HasSubstr("rank 1"), HasSubstr("rank1.cc:10")));
}

// Of a world of three, rank 0 asks for calls of A = {0, 1}, B = {0, 2} and A one by one, each fed
// by the one before; rank 1 compiled its two of A. The middle one has so many results. What the
// last vote comes to.
Actions CompiledAroundAnother(Sequencer* sequencer, int64_t results) {
  const GroupId a = AddGroup(sequencer, {0, 1});
  const GroupId b = AddGroup(sequencer, {0, 2});
  TestRun compiled(1, Epoch(1));
  const int32_t slot = compiled.Slot(a, 2, {1}, {0});
  compiled.AllReduce(slot, 1);
  compiled.AllReduce(slot, 1, {0});
  Cast(sequencer, compiled);
  Cast(sequencer, OneAllReduce(2, Epoch(1), a, 2, 0, 0));
  TestRun middle = OneAllReduce(3, Epoch(1), b, 2, 0, 0);
  middle.producers() = {RunHandle(2)};
  middle.vote().results = results;
  Cast(sequencer, middle);
  TestRun last = OneAllReduce(4, Epoch(1), a, 2, 0, 1);
  last.producers() = {RunHandle(3)};
  Cast(sequencer, last);
  return Cast(sequencer, OneAllReduce(5, Epoch(1), b, 2, 1, 0));
}

TEST(SequencerOrderTest, GangsThatWaitForEachOtherLaunchTogetherIfTheyHaveAnOrder) {
  Sequencer sequencer = World(3);
  const Actions actions = CompiledAroundAnother(&sequencer, /*results=*/0);
  ASSERT_THAT(actions, SizeIs(1));
  EXPECT_THAT(actions[0].runs, SizeIs(5));
  ASSERT_THAT(actions[0].instances, SizeIs(3));
  const GroupId a(1);
  const GroupId b(2);
  EXPECT_EQ(actions[0].instances[0].key.group, a);
  EXPECT_EQ(actions[0].instances[1].key.group, b);
  EXPECT_EQ(actions[0].instances[2].key.group, a);
}

// Rank 0 asks for calls in pairs, rank 1 for the second of a pair together with the first of the
// next one: each vote makes the same gang longer.
TEST(SequencerGangSizeTest, AVoteThatWouldMakeAGangTooLargeIsRefused) {
  SequencerOptions options;
  options.max_gang_size = 8;
  Sequencer sequencer(2, options);
  const auto two = [](int64_t handle, int32_t rank, int64_t call, int64_t results) {
    TestRun run(handle, Epoch(1));
    const int32_t slot = run.Slot(kWorld, 2, {rank}, {call});
    run.AllReduce(slot, rank);
    run.AllReduce(slot, rank);
    run.vote().results = results;
    return run;
  };
  // Two gangs of four: together they are as many as one may have, but they are not one.
  Cast(&sequencer, two(1, 0, 0, 2));
  Cast(&sequencer, two(2, 0, 2, 2));
  Cast(&sequencer, Simple(sequencer, 3, 1, 0));
  const absl::Status large = Refused(&sequencer, two(4, 1, 1, 0));
  EXPECT_EQ(ErrorOf(large).reason, Reason::kQuota);
  EXPECT_THAT(large.message(), AllOf(HasSubstr("has 11 collectives and results"),
                                     HasSubstr("at most 8"), HasSubstr("--max_gang_size")));
  EXPECT_THAT(Launched(Cast(&sequencer, Simple(sequencer, 5, 1, 1))), ElementsAre(1, 3, 5));
  EXPECT_EQ(ErrorOf(Refused(&sequencer, two(6, 1, 2, 3))).reason, Reason::kQuota);
  EXPECT_THAT(Launched(Cast(&sequencer, two(7, 1, 2, 2))), ElementsAre(2, 7));
  // What is launched, and what has failed, counts no more.
  Cast(&sequencer, two(8, 0, 4, 4));
  Actions actions;
  sequencer.Withdraw(RunHandle(8), Error(), At(0), &actions);
  EXPECT_THAT(Failed(actions), ElementsAre(8));
  Cast(&sequencer, two(9, 0, 6, 2));
  EXPECT_THAT(Launched(Cast(&sequencer, two(10, 1, 6, 2))), ElementsAre(9, 10));
  Cast(&sequencer, two(11, 0, 8, 4));
  sequencer.Abort(Error(), At(0), &actions);
  TestRun next = Simple(sequencer, 12, 0, 10);
  next.vote().results = 6;
  Cast(&sequencer, std::move(next));
  EXPECT_THAT(Launched(Cast(&sequencer, Simple(sequencer, 13, 1, 10))), ElementsAre(12, 13));
}

// Each seat of what a vote makes is looked at, also of those that never vote.
TEST(SequencerGangSizeTest, AVoteForMoreSeatsThanAGangMayHaveIsRefused) {
  SequencerOptions options;
  options.max_gang_size = 8;
  Sequencer sequencer(4, options);
  TestRun run(1, Epoch(1));
  const int32_t slot = run.Slot(kWorld, 4, {0}, {0});
  run.AllReduce(slot, 0);
  run.AllReduce(slot, 0);
  TestRun three = run;
  three.AllReduce(slot, 0);
  EXPECT_THAT(Refused(&sequencer, three).message(), HasSubstr("has 12 collectives"));
  EXPECT_THAT(Cast(&sequencer, run), IsEmpty());
  RefusedMember member = RefusedAt(0, 2, 3);
  member.calls.resize(5, member.calls[0]);
  EXPECT_EQ(sequencer.SeatsOf({member, member}), 40);
  member.calls.resize(1);
  member.calls[0].source = GroupRank(0);
  member.calls[0].destination = GroupRank(1);
  EXPECT_EQ(sequencer.SeatsOf({member}), 2) << "a pair's ends";
}

TEST(SequencerGangSizeTest, ACircleThatMakesAGangTooLargeEndsTheEpoch) {
  for (const int64_t most : {9, 8}) {
    SequencerOptions options;
    options.max_gang_size = most;
    Sequencer sequencer(3, options);
    const Actions actions = CompiledAroundAnother(&sequencer, /*results=*/3);
    if (most == 9) {
      EXPECT_THAT(Launched(actions), SizeIs(5));
      continue;
    }
    EXPECT_THAT(Failed(actions), SizeIs(5));
    const Error error = EndedBy(actions);
    EXPECT_EQ(error.reason, Reason::kQuota);
    EXPECT_THAT(error.message, HasSubstr("has 9 collectives and results"));
    EXPECT_THAT(error.instance, HasSubstr("group "));
  }
}

TEST(SequencerOrderTest, ARunThatNeedsItsOwnCollectiveIsACircle) {
  // Two members in one session, the second fed by the first one's result of the same collective.
  Sequencer sequencer = World(2);
  TestRun run(1, Epoch(1));
  const int32_t slot = run.Slot(kWorld, 2, {0, 1}, {0, 0});
  run.AllReduce(slot, 0);
  run.AllReduce(slot, 1, {0});
  EXPECT_EQ(EndedBy(Cast(&sequencer, run)).reason, Reason::kOrderCycle);

  Cast(&sequencer, Simple(sequencer, 2, 0, 1));
  TestRun consumer = Simple(sequencer, 3, 1, 1);
  consumer.producers() = {RunHandle(2)};
  EXPECT_EQ(EndedBy(Cast(&sequencer, consumer)).reason, Reason::kOrderCycle);
}

// Runs in a row that each wait for all before them. The first is held up, from outside or by a
// member; whichever closes them, and in whatever order, no event has more than a slice of work.
TEST(SequencerLaunchTest, ManyThatWaitForAllBeforeThemAreLaunchedInSlices) {
  constexpr int64_t kRuns = 600;  // 180,000 dependences
  for (const bool from_outside : {false, true}) {
    SCOPED_TRACE(from_outside);
    Sequencer sequencer = World(2);
    const GroupId other = AddGroup(&sequencer, {0, 1});
    Slices slices;
    std::vector<int64_t> launched;
    const auto note = [&](const Actions& actions) {
      for (const int64_t run : Launched(actions)) launched.push_back(run);
    };
    const auto vote = [&](int64_t rank, int64_t call) {
      // The first is another group's, so that nobody passes it.
      TestRun run = OneAllReduce(1 + rank * kRuns + call, Epoch(1), call == 0 ? other : kWorld, 2,
                                 static_cast<int32_t>(rank), std::max<int64_t>(call - 1, 0));
      for (int64_t before = 0; before < call; ++before) {
        const RunHandle producer(1 + rank * kRuns + before);
        if (sequencer.IsPending(producer)) run.producers().push_back(producer);
      }
      if (from_outside && rank == 0 && call == 0) run.BlockExternally();
      note(slices.InOne([&](Actions* actions) {
        ASSERT_TRUE(sequencer.Submit(run.Build(), At(0), actions).ok());
      }));
    };
    for (int64_t call = 0; call < kRuns; ++call) vote(0, call);
    for (int64_t call = from_outside ? 0 : 1; call < kRuns; ++call) vote(1, call);
    const int votes = slices.count;
    note(slices.GoOn(&sequencer));
    EXPECT_THAT(launched, IsEmpty());
    const int searched = slices.count;
    if (from_outside) {
      note(
          slices.InOne([&](Actions* actions) { sequencer.Unblock(RunHandle(1), At(0), actions); }));
    } else {
      vote(1, 0);
    }
    note(slices.GoOn(&sequencer));
    EXPECT_LE(slices.largest, kMaxSliceWork);
    EXPECT_GT(slices.count, searched + 10);
    EXPECT_GT(searched, votes);
    ASSERT_THAT(launched, SizeIs(2 * kRuns));
    for (int64_t call = 0; call < kRuns; ++call) {
      EXPECT_THAT(absl::MakeSpan(launched).subspan(2 * call, 2),
                  UnorderedElementsAre(1 + call, 1 + kRuns + call));
    }
  }
}

// Runs that one of rank 1 makes one gang each read as many results, all together 90,000: of others,
// or each other's. What they wait for is counted in slices, and goes on meanwhile or afterwards.
TEST(SequencerLaunchTest, WhatManyRunsOfAGangWaitForIsCountedInSlices) {
  constexpr int64_t kRuns = 300;
  for (const bool of_others : {false, true}) {
    // After so many slices of the count the first result is there.
    for (const int meanwhile : {0, 1, 7, 1000}) {
      SCOPED_TRACE(absl::StrCat(of_others, " ", meanwhile));
      Sequencer sequencer = World(2);
      TestRun first(1, Epoch(1));
      first.BlockExternally();
      EXPECT_THAT(Cast(&sequencer, first), IsEmpty());
      for (int64_t i = 0; i < kRuns && of_others; ++i) {
        TestRun local(1000 + i, Epoch(1));
        local.producers() = {RunHandle(1)};
        EXPECT_THAT(Cast(&sequencer, local), IsEmpty());
      }
      TestRun all(5000, Epoch(1));
      const int32_t slot = all.Slot(kWorld, 2, {1}, {0});
      for (int64_t i = 0; i < kRuns; ++i) {
        all.AllReduce(slot, 1);
        TestRun run = OneAllReduce(2000 + i, Epoch(1), kWorld, 2, 0, i);
        if (!of_others) run.producers() = {RunHandle(1)};
        for (int64_t read = 0; read < (of_others ? kRuns : i); ++read) {
          run.producers().push_back(RunHandle(of_others ? 1000 + read : 2000 + read));
          if (!of_others) run.producers().push_back(RunHandle(2000 + read));
        }
        EXPECT_THAT(Cast(&sequencer, run), IsEmpty());
      }

      Slices slices;
      Actions actions = slices.InOne(
          [&](Actions* closed) { ASSERT_TRUE(sequencer.Submit(all.Build(), At(0), closed).ok()); });
      for (SequencerAction& action : slices.GoOn(&sequencer, At(0), meanwhile)) {
        actions.push_back(std::move(action));
      }
      EXPECT_THAT(actions, IsEmpty());
      EXPECT_LE(slices.largest, kMaxSliceWork);
      if (meanwhile == 1000) {
        EXPECT_GT(slices.count, 30);
      } else {
        EXPECT_EQ(slices.count, 1 + meanwhile);
        EXPECT_LE(sequencer.NextDeadline(), At(0));
      }
      actions = slices.InOne(
          [&](Actions* unblocked) { sequencer.Unblock(RunHandle(1), At(0), unblocked); });
      for (SequencerAction& action : slices.GoOn(&sequencer)) actions.push_back(std::move(action));
      ASSERT_THAT(actions, SizeIs(of_others ? 2 + kRuns : 2));
      EXPECT_THAT(actions.front().runs, ElementsAre(RunHandle(1)));
      EXPECT_THAT(actions.back().runs, SizeIs(1 + kRuns));
      EXPECT_THAT(Launched(actions), SizeIs(of_others ? 2 + 2 * kRuns : 2 + kRuns));
      EXPECT_EQ(sequencer.LiveRows() - 2 * actions.size(), World(2).LiveRows());
    }
  }
}

// The search for a circle goes on in later slices, beside launches and failures of what it has come
// to; what it finds then is one gang.
TEST(SequencerLaunchTest, ACircleIsFoundOverSlices) {
  constexpr int64_t kBetween = 3000;
  enum class Meanwhile { kNothing, kLaunch, kFailure };
  for (const Meanwhile meanwhile : {Meanwhile::kNothing, Meanwhile::kLaunch, Meanwhile::kFailure}) {
    SCOPED_TRACE(static_cast<int>(meanwhile));
    Sequencer sequencer = World(2);
    // Rank 0 makes calls 0 and 1 in one run, and rank 1 between them what reads the one and is read
    // for the other.
    TestRun first(1, Epoch(1));
    first.AllReduce(first.Slot(kWorld, 2, {1}, {0}), 1);
    EXPECT_THAT(Cast(&sequencer, first), IsEmpty());
    TestRun blocked(2, Epoch(1));
    blocked.BlockExternally();
    EXPECT_THAT(Cast(&sequencer, blocked), IsEmpty());
    std::vector<RunHandle> between;
    for (int64_t run = 0; run < kBetween; ++run) {
      TestRun local(10 + run, Epoch(1));
      local.producers() = {run == 0 ? RunHandle(2) : RunHandle(9 + run)};
      if (run == kBetween / 2) local.producers().push_back(RunHandle(1));
      EXPECT_THAT(Cast(&sequencer, local), IsEmpty());
    }
    TestRun second(3, Epoch(1));
    second.AllReduce(second.Slot(kWorld, 2, {1}, {1}), 1);
    second.producers() = {RunHandle(9 + kBetween)};
    EXPECT_THAT(Cast(&sequencer, second), IsEmpty());
    TestRun both(4, Epoch(1));
    const int32_t slot = both.Slot(kWorld, 2, {0}, {0});
    both.AllReduce(slot, 0);
    both.AllReduce(slot, 0);
    Actions actions;
    {
      const WorkSlice slice;
      ASSERT_TRUE(sequencer.Submit(both.Build(), At(0), &actions).ok());
      EXPECT_LE(SliceWork(), kMaxSliceWork);
    }
    EXPECT_THAT(actions, IsEmpty());
    ASSERT_LE(sequencer.NextDeadline(), At(0));
    if (meanwhile == Meanwhile::kFailure) {
      sequencer.Withdraw(RunHandle(10), Error(Reason::kBadType), At(0), &actions);
      // All that waits for it, and that is all but what comes before it.
      EXPECT_THAT(Failed(actions), SizeIs(kBetween + 3));
      actions.clear();
      sequencer.Advance(At(0), &actions);
      EXPECT_GT(sequencer.NextDeadline(), At(0));
      EXPECT_THAT(actions, IsEmpty());
      continue;
    }
    if (meanwhile == Meanwhile::kLaunch) {
      const WorkSlice slice;
      sequencer.Unblock(RunHandle(2), At(0), &actions);
    }
    while (sequencer.NextDeadline() <= At(0)) {
      const WorkSlice slice;
      sequencer.Advance(At(0), &actions);
    }
    if (meanwhile == Meanwhile::kNothing) {
      EXPECT_THAT(actions, IsEmpty());
      sequencer.Unblock(RunHandle(2), At(0), &actions);
    }
    EXPECT_THAT(Failed(actions), IsEmpty());
    EXPECT_THAT(Launched(actions), SizeIs(kBetween + 4));
    EXPECT_EQ(sequencer.LiveRows() - actions.size(), World(2).LiveRows() + actions.size());
  }
}

// Nothing is looked through for a rank that leaves and sits in none of it.
TEST(SequencerMembershipTest, WhoNobodyWaitsForLeavesWithLittleWork) {
  constexpr int64_t kRuns = 100;
  constexpr int64_t kCalls = 100;  // of a run
  Sequencer sequencer = World(3);
  const GroupId pair = AddGroup(&sequencer, {0, 1});
  for (int64_t run = 0; run < kRuns; ++run) {
    TestRun ahead(1 + run, Epoch(1));
    const int32_t slot = ahead.Slot(pair, 2, {0}, {run * kCalls});
    for (int64_t call = 0; call < kCalls; ++call) ahead.AllReduce(slot, 0);
    EXPECT_THAT(Cast(&sequencer, ahead), IsEmpty());
  }
  const WorkSlice slice;
  Actions actions;
  sequencer.Left(Rank(2), At(0), &actions);
  EXPECT_THAT(actions, IsEmpty());
  EXPECT_LT(SliceWork(), 100);
  sequencer.Left(Rank(1), At(0), &actions);
  EXPECT_EQ(EndedBy(actions).reason, Reason::kPeerLeft);
}

TEST(SequencerOrderTest, ARanksRunsInOneGangDoNotInterleave) {
  // Rank 0 compiled {X, Z} and {Y}; rank 1 compiled {X, Y, Z} in one.
  for (const bool forced : {false, true}) {
    Sequencer sequencer = World(2);
    const GroupId x = AddGroup(&sequencer, {0, 1});
    const GroupId y = AddGroup(&sequencer, {1, 0});
    TestRun first(1, Epoch(1));
    const int32_t slot = first.Slot(x, 2, {0}, {0});
    first.AllReduce(slot, 0);
    first.AllReduce(slot, 0);
    Cast(&sequencer, first);
    Cast(&sequencer, OneAllReduce(2, Epoch(1), y, 2, 1, 0));
    TestRun all(3, Epoch(1));
    const int32_t xs = all.Slot(x, 2, {1}, {0});
    const int32_t ys = all.Slot(y, 2, {0}, {0});
    all.AllReduce(xs, 1);
    all.AllReduce(ys, 0, forced ? std::vector<int32_t>{0} : std::vector<int32_t>{});
    all.AllReduce(xs, 1, forced ? std::vector<int32_t>{1} : std::vector<int32_t>{});
    const Actions actions = Cast(&sequencer, all);
    if (forced) {
      const Error error = EndedBy(actions);
      EXPECT_EQ(error.reason, Reason::kOrderCycle);
      EXPECT_THAT(error.message, HasSubstr("interleaved"));
      continue;
    }
    ASSERT_THAT(actions, SizeIs(1));
    EXPECT_EQ(actions[0].instances[0].key.group, x);
    EXPECT_EQ(actions[0].instances[1].key.group, x);
    EXPECT_EQ(actions[0].instances[2].key.group, y);
  }
}

TEST(SequencerOrderTest, ARanksRunsStayWholeWhereTheDataAllowsIt) {
  // By key the order would be world, A, B; rank 0 runs {world, B} and {A}.
  Sequencer sequencer = World(2);
  const GroupId a = AddGroup(&sequencer, {0, 1});
  const GroupId b = AddGroup(&sequencer, {1, 0});
  TestRun outer(1, Epoch(1));
  outer.AllReduce(outer.Slot(kWorld, 2, {0}, {0}), 0);
  outer.AllReduce(outer.Slot(b, 2, {1}, {0}), 1);
  Cast(&sequencer, outer);
  Cast(&sequencer, OneAllReduce(2, Epoch(1), a, 2, 0, 0));
  TestRun all(3, Epoch(1));
  all.AllReduce(all.Slot(kWorld, 2, {1}, {0}), 1);
  all.AllReduce(all.Slot(a, 2, {1}, {0}), 1);
  all.AllReduce(all.Slot(b, 2, {0}, {0}), 0);
  const Actions actions = Cast(&sequencer, all);
  ASSERT_THAT(actions, SizeIs(1));
  ASSERT_THAT(actions[0].instances, SizeIs(3));
  EXPECT_EQ(actions[0].instances[0].key.group, kWorld);
  EXPECT_EQ(actions[0].instances[1].key.group, b);
  EXPECT_EQ(actions[0].instances[2].key.group, a);
}

TEST(SequencerOrderTest, AKnownOrderHoldsOnlyForVotesThatMeetInTheSameWay) {
  // Equal graphs; the second time rank 1 binds its two group slots the other way round.
  Sequencer sequencer = World(2);
  const GroupId a = AddGroup(&sequencer, {0, 1});
  const GroupId b = AddGroup(&sequencer, {1, 0});
  for (int64_t round = 0; round < 4; ++round) {
    TestRun zero(round * 2, Epoch(1));
    zero.AllReduce(zero.Slot(a, 2, {0}, {round}), 0);
    zero.AllReduce(zero.Slot(b, 2, {1}, {round}), 1);
    Cast(&sequencer, zero);
    const bool swapped = round % 2 == 1;
    TestRun one(round * 2 + 1, Epoch(1));
    one.AllReduce(one.Slot(swapped ? b : a, 2, {swapped ? 0 : 1}, {round}), swapped ? 0 : 1);
    one.AllReduce(one.Slot(swapped ? a : b, 2, {swapped ? 1 : 0}, {round}), swapped ? 1 : 0, {0});
    Vote vote = one.Build();
    auto what = std::make_shared<VoteTemplate>(*vote.what);
    what->fingerprint = Hash128();  // as if the members were no part of it
    vote.what = what;
    Actions actions;
    ASSERT_TRUE(sequencer.Submit(vote, At(0), &actions).ok());
    actions = Follow(&sequencer, actions);
    ASSERT_THAT(actions, SizeIs(1));
    ASSERT_THAT(actions[0].instances, SizeIs(2));
    EXPECT_EQ(actions[0].instances[0].key.group, swapped ? b : a) << round;
  }
}

// A gang of equal graphs, which get two gradients each: rank 0's in the order given, rank 1's in
// the other one. What comes of it.
Actions CrosswiseGradients(Sequencer* sequencer, int64_t run, const InstanceKey& first,
                           const InstanceKey& second) {
  Actions actions;
  for (int32_t rank = 0; rank < 2; ++rank) {
    TestRun vote(run + rank, sequencer->epoch());
    const int32_t slot = vote.Slot(kWorld, 2, {rank}, {0});
    vote.GradientOf(rank == 0 ? first : second, 0, slot, rank);
    vote.GradientOf(rank == 0 ? second : first, 0, slot, rank);
    vote.vote().groups[0].base.clear();
    actions = Submitted(sequencer, std::move(vote));
  }
  return actions;
}

TEST(SequencerOrderTest, AnOrderIsOfTheKeysAndStandsWhileItsRunsGetReadyForIt) {
  Sequencer sequencer = World(2);
  std::vector<InstanceKey> forward;
  for (int64_t call = 0; call < 4; ++call) {
    forward.push_back(Forward(&sequencer, 1 + 2 * call, call));
  }
  // Of equal keys, but for their order, each gang has the order of its own keys.
  const Actions one = CrosswiseGradients(&sequencer, 10, forward[0], forward[1]);
  ASSERT_THAT(one, SizeIs(1));
  EXPECT_EQ(one[0].run, RunHandle(11));
  const Actions other = CrosswiseGradients(&sequencer, 20, forward[3], forward[2]);
  ASSERT_THAT(other, SizeIs(1));
  EXPECT_EQ(other[0].kind, Kind::kReserve);
  EXPECT_EQ(other[0].run, RunHandle(20));
  // However many other orders are found meanwhile.
  for (int64_t i = 0; i < 200; ++i) {
    Actions actions;
    for (int32_t rank = 0; rank < 2; ++rank) {
      TestRun run(100 + 2 * i + rank, Epoch(1));
      const int32_t slot = run.Slot(kWorld, 2, {rank}, {4 + 2 * i});
      run.AllReduce(slot, rank).descriptor.dims = {i};
      run.AllReduce(slot, rank);
      actions = Cast(&sequencer, std::move(run));
    }
    ASSERT_THAT(Launched(actions), SizeIs(2));
  }
  Actions actions;
  sequencer.Reserved(other[0].run, At(0), &actions);
  ASSERT_THAT(Launched(actions), ElementsAre(20, 21));
  EXPECT_EQ(actions[0].instances[0].key.at, forward[2].at);
  actions.clear();
  sequencer.Reserved(one[0].run, At(0), &actions);
  ASSERT_THAT(Launched(actions), ElementsAre(10, 11));
  EXPECT_EQ(actions[0].instances[0].key.at, forward[0].at);
}

TEST(SequencerOrderTest, OfALongCircleTheFirstWaitsAreNamed) {
  Sequencer sequencer = World(2);
  const GroupId a = AddGroup(&sequencer, {0, 1});
  const GroupId b = AddGroup(&sequencer, {1, 0});
  const auto chain = [&](int64_t handle, int32_t rank, int64_t calls) {
    TestRun run(handle, sequencer.epoch());
    const int32_t of_a = run.Slot(a, 2, {rank}, {handle > 2 ? 100 : 0});
    const int32_t of_b = run.Slot(b, 2, {1 - rank}, {handle > 2 ? 100 : 0});
    for (int32_t i = 0; i < 2 * calls; ++i) {
      const bool in_a = (i < calls) == (rank == 0);
      run.AllReduce(in_a ? of_a : of_b, in_a ? rank : 1 - rank,
                    i == 0 ? std::vector<int32_t>() : std::vector<int32_t>{i - 1});
    }
    return run;
  };
  Cast(&sequencer, chain(1, 0, 10));
  const Error ten = EndedBy(Cast(&sequencer, chain(2, 1, 10)));
  EXPECT_EQ(ten.reason, Reason::kOrderCycle);
  EXPECT_THAT(ten.message, HasSubstr("; and 12 more"));
  Cast(&sequencer, chain(3, 0, 500));
  const Error thousand = EndedBy(Cast(&sequencer, chain(4, 1, 500)));
  EXPECT_THAT(thousand.message, HasSubstr("; and 992 more"));
  EXPECT_LT(thousand.message.size(), ten.message.size() + 200);
}

TEST(SequencerOrderTest, DataMayReverseARanksOwnOrder) {
  Sequencer sequencer = World(2);
  const GroupId x = AddGroup(&sequencer, {0, 1});
  const GroupId y = AddGroup(&sequencer, {1, 0});
  Cast(&sequencer, OneAllReduce(1, Epoch(1), x, 2, 0, 0));
  Cast(&sequencer, OneAllReduce(2, Epoch(1), y, 2, 1, 0));
  TestRun both(3, Epoch(1));
  both.AllReduce(both.Slot(y, 2, {0}, {0}), 0);
  both.AllReduce(both.Slot(x, 2, {1}, {0}), 1, {0});
  const Actions actions = Cast(&sequencer, both);
  ASSERT_THAT(actions, SizeIs(1));
  EXPECT_EQ(actions[0].instances[0].key.group, y);
  // Run 2 stands before run 1, as its collective does.
  const auto& runs = actions[0].runs;
  EXPECT_LT(std::find(runs.begin(), runs.end(), RunHandle(2)),
            std::find(runs.begin(), runs.end(), RunHandle(1)));
}

// --- Mismatch -----------------------------------------------------------------------------------

struct MismatchCase {
  const char* what;
  std::function<void(Participation*)> change;
  const char* expected;
  const char* got;
};

TEST(SequencerMismatchTest, EveryPartOfADescriptorIsCompared) {
  const std::vector<MismatchCase> cases = {
      {"op", [](Participation* p) { p->descriptor.kind = CollectiveKind::kReduceScatter; },
       "all_reduce", "reduce_scatter"},
      {"reduction", [](Participation* p) { p->descriptor.reduction = Reduction::kMax; }, "SUM",
       "MAX"},
      {"root", [](Participation* p) { p->descriptor.root = GroupRank(1); }, "-1", "1"},
      {"dtype", [](Participation* p) { p->descriptor.dtype = DType::kF64; }, "f32", "f64"},
      {"shape",
       [](Participation* p) {
         p->descriptor.dims = {4, 1};
       },
       "[4]", "[4,1]"},
      {"counts", [](Participation* p) { p->descriptor.runtime_counts = true; }, "fixed",
       "known at run time"},
      {"counts",
       [](Participation* p) {
         p->descriptor.dims = {Descriptor::kRowsDiffer};
         p->descriptor.sends = {5, 4, 4, 4};
       },
       "receives 4 rows from member 1", "sends 5 rows to member 0"},
  };
  for (const MismatchCase& test : cases) {
    SCOPED_TRACE(test.what);
    Sequencer sequencer = World(4);
    Cast(&sequencer, Simple(sequencer, 10, 0, 0));
    Cast(&sequencer, Simple(sequencer, 13, 3, 0));
    TestRun differing(11, Epoch(1));
    test.change(&differing.AllReduce(differing.Slot(kWorld, 4, {1}, {0}), 1));
    const Actions actions = Cast(&sequencer, differing);
    EXPECT_THAT(Failed(actions), ElementsAre(10, 13, 11));
    const Error error = EndedBy(actions);
    EXPECT_EQ(error.code, absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(error.reason, Reason::kMismatch);
    EXPECT_EQ(error.expected, test.expected);
    EXPECT_EQ(error.got, test.got);
    EXPECT_EQ(error.culprit.rank, 1);
    EXPECT_EQ(error.culprit.pid, 101);
    EXPECT_EQ(error.instance, "group 0 call 0");
    EXPECT_EQ(error.source, "rank1.cc:10");
    ASSERT_THAT(error.ranks, SizeIs(3));
    EXPECT_EQ(error.ranks[0].rank, 1);
    EXPECT_EQ(error.ranks[1].rank, 0);
    EXPECT_EQ(error.ranks[2].rank, 3);
    EXPECT_EQ(error.ranks[2].source, "rank3.cc:10");
    EXPECT_THAT(error.message,
                AllOf(HasSubstr(test.what), HasSubstr(test.expected), HasSubstr(test.got),
                      HasSubstr("rank 1"), HasSubstr("rank 0"), HasSubstr("rank0.cc:10")));
    // A vote that comes late gets the same; the next epoch is open at once.
    TestRun late = OneAllReduce(12, Epoch(1), kWorld, 4, 2, 0);
    const Actions after = Cast(&sequencer, late);
    ASSERT_THAT(after, SizeIs(1));
    EXPECT_EQ(after[0].kind, Kind::kFail);
    EXPECT_EQ(after[0].error->message, error.message);
    EXPECT_EQ(sequencer.epoch(), Epoch(2));
    Forward(&sequencer, 20, 1);
  }
}

TEST(SequencerMismatchTest, OfTwoNobodyIsBlamed) {
  Sequencer sequencer = World(2);
  Cast(&sequencer, Simple(sequencer, 1, 0, 0));
  TestRun differing(2, Epoch(1));
  differing.AllReduce(differing.Slot(kWorld, 2, {1}, {0}), 1).descriptor.dims = {5};
  EXPECT_EQ(EndedBy(Cast(&sequencer, differing)).culprit.rank, -1);
}

// Every member says what it knows of the pieces that it sends and receives: each pair must agree.
TEST(SequencerMismatchTest, RowsAreComparedPieceByPiece) {
  constexpr int64_t kAny = Descriptor::kRowsDiffer;
  struct Rows {
    std::vector<int64_t> sends;
    std::vector<int64_t> receives;
  };
  struct Case {
    CollectiveKind kind;
    int32_t root;
    std::vector<Rows> by_member;
    const char* expected;  // null: they agree
    const char* got;
  };
  const std::vector<Case> cases = {
      {CollectiveKind::kAllGather,
       -1,
       {{{3}, {3, 0, 1}}, {{0}, {3, 0, 1}}, {{1}, {3, 0, 1}}},
       nullptr,
       nullptr},
      {CollectiveKind::kAllGather,
       -1,
       {{{3}, {3, 0, 1}}, {{0}, {3, 0, 1}}, {{2}, {3, 0, 1}}},
       "receives 1 row from member 2",
       "sends 2 rows to member 0"},
      {CollectiveKind::kGather, 1, {{{3}, {}}, {{0}, {3, 0, 1}}, {{1}, {}}}, nullptr, nullptr},
      // Neither of the two that disagree has voted first.
      {CollectiveKind::kGather,
       1,
       {{{3}, {}}, {{0}, {3, 0, 2}}, {{1}, {}}},
       "receives 2 rows from member 2",
       "sends 1 row to member 1"},
      {CollectiveKind::kScatter, 2, {{{}, {4}}, {{}, {0}}, {{4, 0, 2}, {2}}}, nullptr, nullptr},
      {CollectiveKind::kScatter,
       2,
       {{{}, {4}}, {{}, {1}}, {{4, 0, 2}, {2}}},
       "receives 1 row from member 2",
       "sends 0 rows to member 1"},
      // Member 1 knows no difference between the members.
      {CollectiveKind::kAllToAll,
       -1,
       {{{1, 2, 0}, {1, 2, 3}}, {{2}, {2}}, {{3, 2, 1}, {0, 2, 1}}},
       nullptr,
       nullptr},
      {CollectiveKind::kAllToAll,
       -1,
       {{{1, 2, 0}, {1, 2, 3}}, {{2}, {2}}, {{3, 1, 1}, {0, 2, 1}}},
       "receives 2 rows from member 2",
       "sends 1 row to member 1"},
      // The first and the last to vote know no difference: the one between them contradicts the
      // last.
      {CollectiveKind::kAllToAll,
       -1,
       {{{}, {}}, {{2, 2, 5}, {2, 2, 2}}, {{}, {}}},
       "sends 5 rows to member 2",
       "receives 2 rows from member 1"},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    const Case& test = cases[i];
    Sequencer sequencer = World(3);
    Actions actions;
    for (int32_t member = 0; member < 3; ++member) {
      TestRun run(member + 1, Epoch(1));
      Descriptor& what = run.AllReduce(run.Slot(kWorld, 3, {member}, {0}), member).descriptor;
      what.kind = test.kind;
      what.reduction = Reduction::kNone;
      what.root = GroupRank(test.root);
      const bool alike = test.by_member[static_cast<size_t>(member)].sends.empty() &&
                         test.by_member[static_cast<size_t>(member)].receives.empty();
      what.dims = {alike ? 2 : kAny, 2};
      what.sends = test.by_member[static_cast<size_t>(member)].sends;
      what.receives = test.by_member[static_cast<size_t>(member)].receives;
      actions = Cast(&sequencer, run);
    }
    if (test.expected == nullptr) {
      ASSERT_THAT(actions, SizeIs(1));
      EXPECT_EQ(actions[0].kind, Kind::kLaunch);
      continue;
    }
    const Error error = EndedBy(actions);
    EXPECT_EQ(error.reason, Reason::kMismatch);
    EXPECT_EQ(error.expected, test.expected);
    EXPECT_EQ(error.got, test.got);
    EXPECT_THAT(error.message, AllOf(HasSubstr("counts"), HasSubstr("[*,2]")));
  }
}

// The ranks are given a while, so that the error says what all of them ask for and which one
// differs.
TEST(SequencerMismatchTest, WaitsForWhoHasNotVotedAndNamesAllVersions) {
  for (const bool all_come : {false, true}) {
    SCOPED_TRACE(all_come);
    SequencerOptions options;
    options.mismatch_grace = absl::Milliseconds(100);
    Sequencer sequencer(5, options);
    const auto vote = [&](int32_t rank, int64_t rows) {
      TestRun run(rank + 1, Epoch(1));
      Participation& part = run.AllReduce(run.Slot(kWorld, 5, {rank}, {0}), rank);
      part.descriptor.dims = {rows};
      part.source = rows == 4 ? "a.cc:7" : "a.cc:9";
      return run;
    };
    EXPECT_THAT(Cast(&sequencer, vote(3, 5)), IsEmpty());
    EXPECT_THAT(Cast(&sequencer, vote(0, 4)), IsEmpty());
    EXPECT_EQ(sequencer.NextDeadline(), At(0.1));
    EXPECT_THAT(Cast(&sequencer, vote(1, 4)), IsEmpty());
    Actions actions = Cast(&sequencer, vote(2, 4));
    EXPECT_THAT(actions, IsEmpty());
    if (all_come) {
      actions = Cast(&sequencer, vote(4, 4));
    } else {
      sequencer.Advance(At(0.099), &actions);
      EXPECT_THAT(actions, IsEmpty());
      sequencer.Advance(At(0.1), &actions);
    }
    const Error error = EndedBy(actions);
    EXPECT_EQ(error.reason, Reason::kMismatch);
    EXPECT_EQ(error.culprit.rank, 3);
    EXPECT_EQ(error.expected, "[4]");
    EXPECT_EQ(error.got, "[5]");
    EXPECT_THAT(error.message,
                AllOf(HasSubstr("rank 3: all_reduce SUM f32[5] at a.cc:9"),
                      HasSubstr(all_come ? "ranks 0-2,4: all_reduce SUM f32[4] at a.cc:7"
                                         : "ranks 0-2: all_reduce SUM f32[4] at a.cc:7")));
    EXPECT_EQ(sequencer.NextDeadline(), absl::InfiniteFuture());
  }
}

TEST(SequencerMismatchTest, TheGraceIsNeverLongerThanTheTimeout) {
  SequencerOptions options;
  options.agree_timeout = absl::Milliseconds(50);
  Sequencer sequencer(3, options);
  Cast(&sequencer, Simple(sequencer, 1, 0, 0));
  TestRun other(2, Epoch(1));
  other.AllReduce(other.Slot(kWorld, 3, {1}, {0}), 1).descriptor.dims = {5};
  Cast(&sequencer, other, At(0.03));
  EXPECT_EQ(sequencer.NextDeadline(), At(0.05));
  Actions actions;
  sequencer.Advance(At(0.05), &actions);
  EXPECT_EQ(EndedBy(actions).reason, Reason::kMismatch);
}

// Of those that are due the first that was seen, which need not be due first.
TEST(SequencerMismatchTest, WhichOfSeveralIsToldDependsOnWhenItWasSeen) {
  SequencerOptions options;
  options.agree_timeout = absl::Seconds(1);
  struct Case {
    std::vector<int64_t> withdrawn;
    double next;
    double advanced;
    int told;  // which group's
  };
  const std::vector<Case> cases = {{{}, 1.0, 1.0, 0},    {{}, 1.0, 1.05, 1},
                                   {{1}, 1.04, 1.04, 1}, {{3}, 1.0, 1.05, 0},
                                   {{3}, 1.0, 1.2, 0},   {{1, 3}, 1.07, 1.07, 2}};
  for (const Case& c : cases) {
    SCOPED_TRACE(&c - cases.data());
    Sequencer sequencer(3, options);
    const std::array<GroupId, 3> groups = {AddGroup(&sequencer, {0, 1, 2}),
                                           AddGroup(&sequencer, {0, 2, 1}),
                                           AddGroup(&sequencer, {1, 0, 2})};
    const auto vote = [&](int group, int32_t rank, int64_t rows, double now) {
      TestRun run(1 + 2 * group + rank, Epoch(1));
      const auto members = *sequencer.GroupMembers(groups[static_cast<size_t>(group)]);
      const auto member = static_cast<int32_t>(
          std::find(members.begin(), members.end(), Rank(rank)) - members.begin());
      run.AllReduce(run.Slot(groups[static_cast<size_t>(group)], 3, {member}, {0}), member)
          .descriptor.dims = {rows};
      EXPECT_THAT(Cast(&sequencer, run, At(now)), IsEmpty());
    };
    vote(0, 0, 4, 0);
    vote(2, 0, 4, 0.5);
    vote(1, 0, 4, 0.93);
    vote(1, 1, 5, 0.94);  // until 1.04
    vote(0, 1, 5, 0.96);  // until 1, when it would be late
    vote(2, 1, 5, 0.97);  // until 1.07
    Actions actions;
    for (const int64_t run : c.withdrawn) {
      sequencer.Withdraw(RunHandle(run), Error(Reason::kBadType), At(0.98), &actions);
    }
    EXPECT_EQ(sequencer.NextDeadline(), At(c.next));
    actions.clear();
    sequencer.Advance(At(c.advanced), &actions);
    const Error error = EndedBy(actions);
    EXPECT_EQ(error.reason, Reason::kMismatch);
    InstanceKey key = WorldKey(1, 0);
    key.group = groups[static_cast<size_t>(c.told)];
    EXPECT_EQ(error.instance, key.ToString());
  }
}

TEST(SequencerMismatchTest, EqualCallsInDifferentLinesAreSeenWhereThatIsAskedFor) {
  for (const CheckCallSites check :
       {CheckCallSites::kOff, CheckCallSites::kWarn, CheckCallSites::kRefuse}) {
    SequencerOptions options;
    options.check_call_sites = check;
    Sequencer sequencer(2, options);
    // Rank 1 makes two equal calls in the other order.
    const auto vote = [](int64_t run, int32_t rank, int64_t call, const char* line) {
      TestRun result(run, Epoch(1));
      result.AllReduce(result.Slot(kWorld, 2, {rank}, {call}), rank).source = line;
      return result;
    };
    Cast(&sequencer, vote(1, 0, 0, "a.cc:7"));
    Actions actions = Cast(&sequencer, vote(2, 1, 0, "a.cc:8"));
    if (check == CheckCallSites::kRefuse) {
      const Error error = EndedBy(actions);
      EXPECT_EQ(error.reason, Reason::kMismatch);
      EXPECT_THAT(error.message, AllOf(HasSubstr("a.cc:7"), HasSubstr("a.cc:8")));
      continue;
    }
    EXPECT_THAT(Launched(actions), ElementsAre(1, 2));
    Cast(&sequencer, vote(3, 0, 1, "a.cc:8"));
    Actions again = Cast(&sequencer, vote(4, 1, 1, "a.cc:7"));
    EXPECT_THAT(Launched(again), ElementsAre(3, 4));
    if (check == CheckCallSites::kOff) continue;
    ASSERT_THAT(actions, SizeIs(2));  // once for each pair of lines
    EXPECT_THAT(again, SizeIs(1));
    EXPECT_EQ(actions[0].kind, Kind::kWarn);
    EXPECT_THAT(actions[0].error->message, AllOf(HasSubstr("a.cc:7"), HasSubstr("a.cc:8")));
  }
}

TEST(SequencerMismatchTest, AWorldIsToldOfSoManyPairsOfLinesOnceEach) {
  constexpr int64_t kMostWarned = 1024;
  SequencerOptions options;
  options.check_call_sites = CheckCallSites::kWarn;
  Sequencer sequencer(2, options);
  int64_t run = 0;
  const auto vote = [&](int32_t rank, int64_t call, const std::string& line) {
    TestRun result(++run, Epoch(1));
    result.AllReduce(result.Slot(kWorld, 2, {rank}, {call}), rank).source = line;
    return Cast(&sequencer, result);
  };
  for (int64_t pair = 0; pair <= kMostWarned; ++pair) {
    SCOPED_TRACE(pair);
    const std::string lines[] = {absl::StrCat("a.cc:", pair), absl::StrCat("b.cc:", pair)};
    for (const int64_t again : {int64_t{0}, int64_t{1}}) {
      const int64_t call = 2 * pair + again;
      EXPECT_THAT(vote(0, call, lines[again]), IsEmpty());
      const Actions actions = vote(1, call, lines[1 - again]);
      EXPECT_THAT(Launched(actions), ElementsAre(run - 1, run));
      if (again == 1 || pair == kMostWarned) {
        EXPECT_THAT(actions, SizeIs(1));
        continue;
      }
      ASSERT_THAT(actions, SizeIs(2));
      EXPECT_EQ(actions[0].kind, Kind::kWarn);
      EXPECT_THAT(actions[0].error->message, AllOf(HasSubstr(lines[0]), HasSubstr(lines[1])));
    }
  }
}

// All ranks of a world vote, each for as many rows as `rows_of` says, in a line of its own for
// each number; the error that they get.
Error MismatchOf(int32_t size, const std::function<int64_t(int32_t)>& rows_of) {
  Sequencer sequencer(size, SequencerOptions());
  Actions actions;
  for (int32_t rank = 0; rank < size; ++rank) {
    TestRun run(rank + 1, Epoch(1));
    Participation& part = run.AllReduce(run.Slot(kWorld, size, {rank}, {0}), rank);
    part.descriptor.dims = {rows_of(rank)};
    part.source = absl::StrCat("a.cc:", part.descriptor.dims[0]);
    actions = Cast(&sequencer, run);
  }
  Error error = EndedBy(actions);
  EXPECT_EQ(error.reason, Reason::kMismatch);
  EXPECT_THAT(error.ranks, SizeIs(Error::kMaxRanks));
  return error;
}

TEST(SequencerMismatchTest, InALargeWorldTheOddRankIsFoundWhereverItIs) {
  struct Case {
    int32_t size;
    int32_t odd;
    const char* others;
  };
  const std::vector<Case> cases = {
      {65, 64, "ranks 0-63: "},
      {65, 0, "ranks 1-64: "},
      {100, 70, "ranks 0-69,71-99: "},
      {1024, 1023, "ranks 0-1022: "},
  };
  for (const Case& test : cases) {
    SCOPED_TRACE(absl::StrCat(test.odd, " of ", test.size));
    const Error error =
        MismatchOf(test.size, [&](int32_t rank) { return rank == test.odd ? 5 : 4; });
    EXPECT_EQ(error.culprit.rank, test.odd);
    EXPECT_EQ(error.expected, "[4]");
    EXPECT_EQ(error.got, "[5]");
    EXPECT_EQ(error.source, "a.cc:5");
    EXPECT_EQ(error.ranks[0].rank, test.odd);
    EXPECT_EQ(error.ranks[0].source, "a.cc:5");
    EXPECT_THAT(error.message,
                AllOf(HasSubstr(absl::StrCat("rank ", test.odd, ": all_reduce SUM f32[5] at ")),
                      HasSubstr(absl::StrCat(test.others, "all_reduce SUM f32[4] at a.cc:4"))));
  }
}

TEST(SequencerMismatchTest, InALargeWorldTwoOddRanksAreNobodysFault) {
  for (const int64_t of_second : {5, 6}) {
    SCOPED_TRACE(of_second);
    const Error error = MismatchOf(100, [&](int32_t rank) -> int64_t {
      return rank == 70 ? 5 : rank == 71 ? of_second : 4;
    });
    EXPECT_EQ(error.culprit.rank, -1);
    EXPECT_EQ(error.expected, "[4]");
    EXPECT_EQ(error.got, "[5]");
    EXPECT_EQ(error.ranks[0].rank, 70);
  }
}

TEST(SequencerMismatchTest, AtMostEightVersionsAreListed) {
  const Error error = MismatchOf(100, [](int32_t rank) { return rank % 20 + 1; });
  EXPECT_EQ(error.culprit.rank, -1);
  EXPECT_EQ(error.expected, "[1]");
  EXPECT_EQ(error.got, "[2]");
  size_t listed = 0;
  for (size_t at = error.message.find(" at a.cc:"); at != std::string::npos;
       at = error.message.find(" at a.cc:", at + 1)) {
    ++listed;
  }
  EXPECT_EQ(listed, Error::kMaxRanks);
  EXPECT_THAT(error.message,
              AllOf(HasSubstr("ranks 0,20,40,60,80: all_reduce SUM f32[1] at a.cc:1; "),
                    HasSubstr("ranks 7,27,47,67,87: all_reduce SUM f32[8] at a.cc:8; "),
                    HasSubstr("; and 12 more versions; nothing was launched")));
}

// The end of a text is not cut off, however many ranks take turns.
TEST(SequencerMismatchTest, OfAVersionSoManyRangesAreListed) {
  const Error error = MismatchOf(1024, [](int32_t rank) { return rank % 8 + 1; });
  EXPECT_LT(error.message.size(), Error::kMaxBytes / 2);
  EXPECT_THAT(error.message, AllOf(HasSubstr("ranks 0,8,16,"), HasSubstr(",240,248,...: "),
                                   HasSubstr("; nothing was launched")));
}

// The two that disagree are neither the first to vote nor among the first of many.
TEST(SequencerMismatchTest, InALargeWorldRowsAreComparedWhereverTheyDiffer) {
  struct Case {
    int32_t size;
    bool of_many;
  };
  for (const Case& test : {Case{100, false}, {100, true}, {1024, false}, {1024, true}}) {
    const int32_t size = test.size;
    const bool of_many = test.of_many;
    SCOPED_TRACE(absl::StrCat(of_many ? "three" : "two", " of ", size));
    ForgetLargestSlice();
    Sequencer sequencer(size, SequencerOptions());
    Actions actions;
    for (int32_t rank = 0; rank < size; ++rank) {
      TestRun run(rank + 1, Epoch(1));
      Descriptor& what = run.AllReduce(run.Slot(kWorld, size, {rank}, {0}), rank).descriptor;
      what.kind = CollectiveKind::kAllToAll;
      what.reduction = Reduction::kNone;
      what.dims = {2, 2};
      if (rank == 70) {
        what.dims[0] = Descriptor::kRowsDiffer;
        what.sends.assign(static_cast<size_t>(size), 2);
        what.receives.assign(static_cast<size_t>(size), 2);
        what.sends[80] = 5;
        if (of_many) what.sends[90] = 5;
      }
      const WorkSlice slice;
      actions = Cast(&sequencer, run);
    }
    EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
    const Error error = EndedBy(actions);
    EXPECT_EQ(error.reason, Reason::kMismatch);
    // One rank against one is nobody's fault, against two it is its own.
    EXPECT_EQ(error.culprit.rank, of_many ? 70 : -1);
    const std::string sends = "sends 5 rows to member 80";
    const std::string receives = "receives 2 rows from member 70";
    EXPECT_EQ(error.expected, of_many ? receives : sends);
    EXPECT_EQ(error.got, of_many ? sends : receives);
  }
}

// Which two of them an error shows, by member, and who is to blame: by all pairs.
struct Blame {
  int32_t expected = -1;
  int32_t got = -1;
  int32_t culprit = -1;
};
Blame BlameOf(const std::map<int32_t, Descriptor>& asked) {
  const auto differ = [&](int32_t a, int32_t b) {
    return FirstDifference(GroupRank(a), asked.at(a), GroupRank(b), asked.at(b)).has_value();
  };
  Blame blame;
  std::map<int32_t, int> with;  // how many others
  int pairs = 0;
  for (const auto& high : asked) {
    for (const auto& low : asked) {
      if (low.first >= high.first || !differ(low.first, high.first)) continue;
      if (pairs++ == 0) blame = {low.first, high.first};
      ++with[low.first];
      ++with[high.first];
    }
  }
  for (const auto& member : with) {
    if (member.second >= 2 && member.second == pairs) blame.culprit = member.first;
  }
  for (const auto& member : asked) {
    if (blame.culprit < 0 || member.first == blame.culprit) continue;
    if (!differ(member.first, blame.culprit)) continue;
    blame.expected = member.first;
    blame.got = blame.culprit;
    break;
  }
  return blame;
}

// Votes for one gradient, from which some members are absent.
struct RowsCall {
  int32_t size = 0;
  std::vector<int32_t> order;  // of the votes, by member
  std::map<int32_t, Descriptor> asked;

  static absl::Time TimeOf(size_t vote) { return At(1) + absl::Milliseconds(vote); }
  // What is decided in the end, and when something is due behind each vote. `hurry`: most votes
  // come in a slice that has no time for more, and some of what is left is gone on with in between.
  Actions Play(std::vector<absl::Time>* due, std::mt19937_64* hurry) const {
    SequencerOptions options;
    options.mismatch_grace = absl::Milliseconds(100);
    Sequencer sequencer(size, options);
    std::vector<int32_t> without_tape;
    for (int32_t member = 0; member < size; ++member) {
      if (asked.count(member) == 0) without_tape.push_back(member);
    }
    const InstanceKey forward = Forward(&sequencer, 1, 0, without_tape);
    Actions actions;
    sequencer.Finished(Ticket(1), absl::OkStatus(), At(0), &actions);
    Slices slices;
    for (size_t v = 0; v < order.size(); ++v) {
      const int32_t member = order[v];
      TestRun run(1000 + member, sequencer.epoch());
      run.GradientOf(forward, 0, run.Slot(kWorld, size, {member}, {0}), member).descriptor =
          asked.at(member);
      const Vote& vote = run.Build();
      const auto add = [&](Actions decided) {
        for (SequencerAction& action : decided) actions.push_back(std::move(action));
      };
      add(slices.InOne([&](Actions* decided) {
        if (hurry != nullptr && (*hurry)() % 4 > 0) CountWork(kMaxSliceWork);
        EXPECT_TRUE(sequencer.Submit(vote, TimeOf(v), decided).ok());
      }));
      if (hurry != nullptr && (*hurry)() % 2 == 0) {
        add(slices.InOne([&](Actions* decided) {
          CountWork(kTurnWork - 1);
          sequencer.Advance(TimeOf(v), decided);
        }));
      }
      if (due != nullptr) due->push_back(sequencer.NextDeadline());
      if (v + 1 == order.size()) add(slices.GoOn(&sequencer, TimeOf(v)));
    }
    return actions;
  }
};

TEST(SequencerMismatchTest, RowsAreComparedAsIfEachPairWere) {
  int told = 0;
  int launched = 0;
  for (uint64_t seed = 1; seed <= 1000; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    RowsCall call;
    call.size = seed % 10 == 0 ? 100 : static_cast<int32_t>(2 + seed % 8);
    RandomRows rows(seed, call.size, /*mistakes_of=*/2 * call.size);
    call.order.resize(static_cast<size_t>(call.size));
    std::iota(call.order.begin(), call.order.end(), 0);
    std::shuffle(call.order.begin(), call.order.end(), random);
    call.order.resize(call.order.size() - random() % 3 % call.order.size());
    bool rows_differ = false;
    absl::optional<size_t> found;  // the first vote that contradicts one before it
    for (size_t v = 0; v < call.order.size(); ++v) {
      const int32_t member = call.order[v];
      const Descriptor what = rows.Of(member);
      rows_differ |= what.RowsDiffer();
      for (const auto& other : call.asked) {
        if (found.has_value()) break;
        if (FirstDifference(GroupRank(other.first), other.second, GroupRank(member), what)) {
          found = v;
        }
      }
      call.asked.emplace(member, what);
    }
    std::vector<absl::Time> due;
    const Actions actions = call.Play(&due, nullptr);
    for (size_t v = 0; v + 1 < due.size(); ++v) {
      const bool is_found = found.has_value() && *found <= v;
      EXPECT_EQ(due[v], is_found ? RowsCall::TimeOf(*found) + absl::Milliseconds(100)
                                 : RowsCall::TimeOf(0) + absl::Seconds(60));
    }
    const Actions in_slices = call.Play(nullptr, &random);
    ASSERT_THAT(actions, SizeIs(1));
    ASSERT_THAT(in_slices, SizeIs(1));
    EXPECT_EQ(in_slices[0].kind, actions[0].kind);
    EXPECT_EQ(actions[0].kind, found.has_value() ? Kind::kEpochEnded : Kind::kLaunch);
    if (!found.has_value()) {
      ++launched;
      continue;
    }
    ++told;
    const Error error = EndedBy(actions);
    EXPECT_EQ(EncodeError(*in_slices[0].error), EncodeError(error));
    // Of so many that all are compared with all.
    if (call.size > 64 || !rows_differ) continue;
    const Blame blame = BlameOf(call.asked);
    const Difference difference =
        *FirstDifference(GroupRank(blame.expected), call.asked.at(blame.expected),
                         GroupRank(blame.got), call.asked.at(blame.got));
    EXPECT_EQ(error.expected, difference.expected);
    EXPECT_EQ(error.got, difference.got);
    EXPECT_EQ(error.culprit.rank, blame.culprit);
    EXPECT_EQ(error.ranks[0].rank, blame.got);
  }
  std::cout << told << " told, " << launched << " launched" << std::endl;
  EXPECT_GT(told, 200);
  EXPECT_GT(launched, 200);
}

// Where not all are compared with all for the error, it depends on which vote was seen to
// contradict another first: here are several of these, none among the first members.
TEST(SequencerMismatchTest, InALargeWorldWhatIsToldDoesNotDependOnSlices) {
  constexpr int32_t kCompared = 64;
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    RowsCall call;
    call.size = kCompared + 16;
    for (int32_t member = 0; member < call.size; ++member) {
      call.order.push_back(member);
      Descriptor& what = call.asked[member];
      what.kind = CollectiveKind::kAllToAll;
      what.dtype = DType::kF32;
      what.dims = {Descriptor::kRowsDiffer, 3};
      what.sends.assign(static_cast<size_t>(call.size), 2);
      what.receives = what.sends;
    }
    std::shuffle(call.order.begin(), call.order.end(), random);
    for (int mistakes = 0; mistakes < 6; ++mistakes) {
      const auto from = kCompared + static_cast<int32_t>(random() % 16);
      const auto to = kCompared + random() % 15;
      ++call.asked[from].sends[to < static_cast<uint64_t>(from) ? to : to + 1];
    }
    const Error error = EndedBy(call.Play(nullptr, nullptr));
    EXPECT_EQ(EncodeError(EndedBy(call.Play(nullptr, &random))), EncodeError(error));
  }
}

// A vote of many calls, each of many members, brings as many rows as all that came before it have
// said to it.
TEST(SequencerMismatchTest, ManyCallsWhoseRowsDifferAreComparedInSlices) {
  constexpr int32_t kSize = 64;
  constexpr int64_t kCalls = 256;
  Sequencer sequencer = World(kSize);
  Slices slices;
  Actions actions;
  int64_t work = 0;  // of the last vote
  for (int32_t rank = 0; rank < kSize; ++rank) {
    TestRun run(rank + 1, Epoch(1));
    const int32_t slot = run.Slot(kWorld, kSize, {rank}, {0});
    for (int64_t call = 0; call < kCalls; ++call) {
      Descriptor& what = run.AllReduce(slot, rank).descriptor;
      what.kind = CollectiveKind::kAllToAll;
      what.reduction = Reduction::kNone;
      what.dims = {Descriptor::kRowsDiffer, 3};
      for (int64_t peer = 0; peer < kSize; ++peer) {
        what.sends.push_back(rank * peer + call);
        what.receives.push_back(peer * rank + call);
      }
    }
    const Vote& vote = run.Build();
    const bool is_last = rank + 1 == kSize;
    actions = slices.InOne([&](Actions* decided) {
      ASSERT_TRUE(sequencer.Submit(vote, At(0), decided).ok());
      if (is_last) work += SliceWork();
    });
    EXPECT_THAT(actions, IsEmpty());
    while (sequencer.NextDeadline() <= At(0)) {
      actions = slices.InOne([&](Actions* decided) {
        sequencer.Advance(At(0), decided);
        if (is_last) work += SliceWork();
      });
    }
  }
  EXPECT_THAT(Launched(actions), SizeIs(kSize));
  EXPECT_LE(slices.largest, kMaxSliceWork);
  std::cout << work << " pieces for the last vote" << std::endl;
  EXPECT_GE(work, kCalls * kSize / 4);
  EXPECT_LE(work, 4 * kCalls * kSize);
}

// What no slice has had the time to compare is pending like all else.
TEST(SequencerMismatchTest, WhatIsNotComparedYetMayFail) {
  enum class Then { kDiffers, kIsLate, kDiffersLate, kIsWithdrawn, kIsAborted };
  for (const Then then :
       {Then::kDiffers, Then::kIsLate, Then::kDiffersLate, Then::kIsWithdrawn, Then::kIsAborted}) {
    SCOPED_TRACE(static_cast<int>(then));
    Sequencer sequencer = World(3);
    Slices slices;
    int64_t handle = 0;
    const auto without_time = [&](const std::function<void(Actions*)>& event) {
      EXPECT_THAT(slices.InOne([&](Actions* decided) {
        CountWork(kMaxSliceWork);
        event(decided);
      }),
                  IsEmpty());
      EXPECT_LE(sequencer.NextDeadline(), At(60));
    };
    const auto vote = [&](int32_t rank, int64_t call, const std::vector<int64_t>& rows) {
      TestRun run(++handle, sequencer.epoch());
      Descriptor& what = run.AllReduce(run.Slot(kWorld, 3, {rank}, {call}), rank).descriptor;
      what.kind = CollectiveKind::kAllToAll;
      what.reduction = Reduction::kNone;
      what.dims[0] = Descriptor::kRowsDiffer;
      what.sends = what.receives = rows;
      const Vote& next = run.Build();
      without_time(
          [&](Actions* decided) { ASSERT_TRUE(sequencer.Submit(next, At(0), decided).ok()); });
    };
    const bool is_late = then == Then::kIsLate || then == Then::kDiffersLate;
    vote(0, 0, {0, 0, 0});
    vote(1, 0, {then == Then::kDiffersLate ? 1 : 0, 1, 1});
    if (!is_late) vote(2, 0, {0, 2, 2});
    Actions actions;
    if (then == Then::kIsWithdrawn) {
      sequencer.Withdraw(RunHandle(2), Error(Reason::kBadType), At(0), &actions);
    } else if (then == Then::kIsAborted) {
      sequencer.Abort(Error(Reason::kAborted), At(0), &actions);
    } else {
      const absl::Time now = is_late ? At(60) : At(0);
      if (is_late) without_time([&](Actions* decided) { sequencer.Advance(now, decided); });
      const Error error = EndedBy(slices.GoOn(&sequencer, now));
      EXPECT_EQ(error.reason, then == Then::kIsLate ? Reason::kAgreeTimeout : Reason::kMismatch);
      EXPECT_EQ(error.culprit.rank, then == Then::kIsLate ? 2 : -1);
      continue;
    }
    EXPECT_THAT(Failed(actions), ElementsAre(1, 2, 3));
    EXPECT_THAT(slices.GoOn(&sequencer), IsEmpty());
    EXPECT_EQ(sequencer.NextDeadline(), absl::InfiniteFuture());
    for (const int32_t rank : {0, 1, 2}) vote(rank, 1, {7, 7, 7});
    EXPECT_THAT(Launched(slices.GoOn(&sequencer)), ElementsAre(4, 5, 6));
  }
}

TEST(SequencerMismatchTest, AtMostEightRanksAreListed) {
  Sequencer sequencer = World(12);
  for (int32_t member = 0; member < 11; ++member) {
    Cast(&sequencer, Simple(sequencer, member, member, 0));
  }
  TestRun differing(11, Epoch(1));
  differing.AllReduce(differing.Slot(kWorld, 12, {11}, {0}), 11).descriptor.dims = {5};
  const Error error = EndedBy(Cast(&sequencer, differing));
  EXPECT_THAT(error.ranks, SizeIs(Error::kMaxRanks));
  EXPECT_EQ(error.ranks[0].rank, 11);
}

TEST(SequencerMismatchTest, EqualGraphsThatMeetAtDifferentPlacesAreCompared) {
  // Both ranks run the same graph {f32[4], f32[5]}; rank 1 is one collective behind.
  Sequencer sequencer = World(2);
  const auto graph = [&](int64_t run, int32_t member, int64_t base) {
    TestRun result(run, Epoch(1));
    const int32_t slot = result.Slot(kWorld, 2, {member}, {base});
    result.AllReduce(slot, member);
    result.AllReduce(slot, member).descriptor.dims = {5};
    return result;
  };
  Cast(&sequencer, graph(1, 0, 0));
  Cast(&sequencer, Simple(sequencer, 2, 1, 0));
  EXPECT_EQ(EndedBy(Cast(&sequencer, graph(3, 1, 1))).reason, Reason::kMismatch);
}

TEST(SequencerMismatchTest, AGroupSlotOfAnotherSizeIsAMismatch) {
  Sequencer sequencer = World(3);
  Cast(&sequencer, Simple(sequencer, 1, 0, 0));
  const Actions actions = Cast(&sequencer, OneAllReduce(2, Epoch(1), kWorld, 2, 1, 0));
  EXPECT_THAT(Failed(actions), ElementsAre(1, 2));
  const Error error = EndedBy(actions);
  EXPECT_EQ(error.reason, Reason::kMismatch);
  EXPECT_EQ(error.culprit.rank, 1);
  EXPECT_EQ(error.expected, "3 members");
  EXPECT_EQ(error.got, "2 members");
}

// --- Send and recv ------------------------------------------------------------------------------

TestRun Send(int64_t run, Epoch epoch, int32_t from, int32_t to, int64_t tag = 0) {
  TestRun result(run, epoch);
  result.SendTo(result.Slot(kWorld, 3, {from}, {0}), from, to, tag);
  return result;
}
TestRun Recv(int64_t run, Epoch epoch, int32_t at, int32_t from, int64_t tag = 0) {
  TestRun result(run, epoch);
  result.RecvFrom(result.Slot(kWorld, 3, {at}, {0}), at, from, tag);
  return result;
}

TEST(SequencerPairTest, ASendMeetsTheRecvOfItsPairAndTag) {
  Sequencer sequencer = World(3);
  EXPECT_THAT(Cast(&sequencer, Send(1, Epoch(1), 2, 0, 7)), IsEmpty());
  EXPECT_THAT(Cast(&sequencer, Recv(2, Epoch(1), 0, 2, 8)), IsEmpty());  // another tag
  EXPECT_THAT(Cast(&sequencer, Send(3, Epoch(1), 0, 2, 7)), IsEmpty());  // another direction
  const Actions actions = Cast(&sequencer, Recv(4, Epoch(1), 0, 2, 7));
  ASSERT_THAT(Launched(actions), ElementsAre(1, 4));
  const std::vector<LaunchedInstance::Part>& parts = actions[0].instances[0].parts;
  EXPECT_EQ(parts[0].member, GroupRank(0));
  EXPECT_EQ(parts[1].member, GroupRank(2));
  EXPECT_EQ(parts[1].run, RunHandle(1));
}

TEST(SequencerPairTest, ARankMaySendToItself) {
  Sequencer sequencer = World(3);
  TestRun run(1, Epoch(1));
  const int32_t slot = run.Slot(kWorld, 3, {1}, {0});
  run.SendTo(slot, 1, 1);
  run.RecvFrom(slot, 1, 1);
  const Actions actions = Cast(&sequencer, run);
  ASSERT_THAT(Launched(actions), ElementsAre(1));
  EXPECT_EQ(actions[0].instances[0].parts[0].participation, 0);
  EXPECT_EQ(actions[0].instances[0].parts[1].participation, 1);
}

TEST(SequencerPairTest, AnotherShapeIsAMismatch) {
  Sequencer sequencer = World(3);
  Cast(&sequencer, Send(1, Epoch(1), 0, 1));
  TestRun recv(2, Epoch(1));
  recv.RecvFrom(recv.Slot(kWorld, 3, {1}, {0}), 1, 0).descriptor.dims = {3};
  const Error error = EndedBy(Cast(&sequencer, recv));
  EXPECT_EQ(error.reason, Reason::kMismatch);
  EXPECT_THAT(error.message, HasSubstr("receiving"));
}

TEST(SequencerPairTest, TheGradientFlowsBack) {
  Sequencer sequencer = World(3);
  TestRun send(1, Epoch(1));
  send.SendTo(send.Slot(kWorld, 3, {2}, {0}), 2, 0).wants_grad = true;
  Cast(&sequencer, send);
  TestRun recv(2, Epoch(1));
  recv.RecvFrom(recv.Slot(kWorld, 3, {0}, {0}), 0, 2).wants_grad = true;
  const Actions forward = Cast(&sequencer, recv);
  ASSERT_THAT(Launched(forward), ElementsAre(1, 2));
  const InstanceKey key = forward[0].instances[0].key;

  const auto gradient = [&](int64_t run, int32_t member, bool is_recv, int32_t peer,
                            int64_t tag = 0) {
    TestRun result(run, Epoch(1));
    Participation& part = result.GradientOf(key, 0, result.Slot(kWorld, 3, {member}, {0}), member);
    part.descriptor.kind = CollectiveKind::kSend;
    part.descriptor.reduction = Reduction::kNone;
    part.is_recv = is_recv;
    part.peer = GroupRank(peer);
    part.tag = tag;
    return result;
  };
  const auto refused = [&](const TestRun& run) {
    const absl::Status status = Refused(&sequencer, run);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refused(gradient(3, 2, false, 0)), HasSubstr("member 2 cannot be the sending end"));
  EXPECT_THAT(refused(gradient(3, 2, true, 1)), HasSubstr("member 1 with tag 0 is not the other"));
  EXPECT_THAT(refused(gradient(3, 2, true, 2)), HasSubstr("member 2 with tag 0 is not the other"));
  EXPECT_THAT(refused(gradient(3, 2, true, 0, 7)), HasSubstr("member 0 with tag 7 is not the"));
  EXPECT_THAT(Cast(&sequencer, gradient(4, 2, true, 0)), IsEmpty());
  EXPECT_THAT(Launched(Cast(&sequencer, gradient(5, 0, false, 2))), ElementsAre(4, 5));
}

// --- Late, cancelled, refused -------------------------------------------------------------------

TEST(SequencerFailureTest, AgreeTimeoutNamesWhoIsMissing) {
  Sequencer sequencer = World(4);
  Cast(&sequencer, Simple(sequencer, 10, 2, 0), At(5));
  Cast(&sequencer, Simple(sequencer, 11, 0, 0), At(40));
  EXPECT_EQ(sequencer.NextDeadline(), At(65));
  int64_t room = 100;
  const std::vector<PendingInstance> pending = sequencer.Pending(At(45), &room);
  ASSERT_THAT(pending, SizeIs(1));
  EXPECT_EQ(room, 100 - 2 * 8 - 4);  // of two runs the first lists it
  room = 0;
  EXPECT_THAT(sequencer.Pending(At(45), &room), IsEmpty());
  room = 100;
  EXPECT_THAT(pending[0].voted, ElementsAre(Rank(0), Rank(2)));
  EXPECT_THAT(pending[0].missing, ElementsAre(Rank(1), Rank(3)));
  EXPECT_EQ(pending[0].waiting, absl::Seconds(40));
  EXPECT_EQ(pending[0].what, "all_reduce SUM f32[4]");
  EXPECT_EQ(pending[0].source, "rank2.cc:10");

  Actions actions;
  sequencer.Advance(At(64), &actions);
  EXPECT_THAT(actions, IsEmpty());
  sequencer.Advance(At(65), &actions);
  EXPECT_THAT(Failed(actions), ElementsAre(10, 11));
  const Error error = EndedBy(actions);
  EXPECT_EQ(error.code, absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(error.reason, Reason::kAgreeTimeout);
  EXPECT_EQ(error.culprit.rank, 1);
  EXPECT_EQ(error.culprit.pid, 101);
  EXPECT_THAT(error.message, AllOf(HasSubstr("rank 1 (pid 101), rank 3 (pid 103)"), HasSubstr("1m"),
                                   HasSubstr("rank2.cc:10")));
  EXPECT_EQ(sequencer.NextDeadline(), absl::InfiniteFuture());
  EXPECT_THAT(sequencer.Pending(At(65), &room), IsEmpty());
}

TEST(SequencerFailureTest, TheDeadlineIsThatOfTheOldestInstanceThatLacksVotes) {
  Sequencer sequencer = World(2);
  Cast(&sequencer, Simple(sequencer, 1, 0, 0), At(0));
  Cast(&sequencer, Simple(sequencer, 2, 0, 1), At(10));
  Cast(&sequencer, Simple(sequencer, 3, 1, 0), At(20));
  EXPECT_EQ(sequencer.NextDeadline(), At(70));
}

TEST(SequencerFailureTest, WhatBelongsToALateGangIsDueAtItsOwnTime) {
  // A has all its votes, but rank 1's run has B too, which rank 2 has not asked for yet; C consumes
  // A's result.
  Sequencer sequencer = World(3);
  const GroupId a = AddGroup(&sequencer, {0, 1});
  const GroupId b = AddGroup(&sequencer, {1, 2});
  Cast(&sequencer, OneAllReduce(1, Epoch(1), a, 2, 0, 0), At(0));
  TestRun both(2, Epoch(1));
  both.AllReduce(both.Slot(a, 2, {1}, {0}), 1);
  both.AllReduce(both.Slot(b, 2, {0}, {0}), 0);
  Cast(&sequencer, both, At(50));
  TestRun consumer(3, Epoch(1));
  consumer.producers() = {RunHandle(1)};
  Cast(&sequencer, consumer, At(55));
  EXPECT_EQ(sequencer.NextDeadline(), At(60));
  Actions actions;
  sequencer.Advance(At(60), &actions);
  EXPECT_THAT(Failed(actions), ElementsAre(1, 2, 3));
  const Error error = EndedBy(actions);
  EXPECT_EQ(error.reason, Reason::kAgreeTimeout);
  EXPECT_EQ(error.culprit.rank, 2);
  EXPECT_EQ(error.instance, "group 2 call 0");
  EXPECT_THAT(error.message, AllOf(HasSubstr("missing after 10s: rank 2 (pid 102)"),
                                   HasSubstr("group 1 call 0"), HasSubstr("for 1m")));
}

TEST(SequencerFailureTest, WhatWaitsForALateGangIsDueAtItsOwnTime) {
  Sequencer sequencer = World(2);
  const GroupId pair = AddGroup(&sequencer, {0, 1});
  Cast(&sequencer, OneAllReduce(1, Epoch(1), pair, 2, 1, 0), At(0));
  Cast(&sequencer, Simple(sequencer, 2, 0, 0), At(30));
  TestRun consumer = OneAllReduce(3, Epoch(1), pair, 2, 0, 0);
  consumer.producers() = {RunHandle(2)};
  Cast(&sequencer, consumer, At(30));
  EXPECT_EQ(sequencer.NextDeadline(), At(60));
  Actions actions;
  sequencer.Advance(At(60), &actions);
  EXPECT_EQ(EndedBy(actions).culprit.rank, 1);
  EXPECT_EQ(EndedBy(actions).instance, "group 0 call 0");
}

// Rank 1 has made a call that rank 0 makes last (Close); before it come runs that each wait for all
// before them, and the first for a call of rank 0 alone, if it `lacks`, or for another world.
struct LateChain {
  static constexpr int64_t kRuns = 600;  // 180,000 dependences
  explicit LateChain(bool lacks) : sequencer(World(2)), pair(AddGroup(&sequencer, {0, 1})) {
    EXPECT_THAT(Cast(&sequencer, OneAllReduce(1, Epoch(1), pair, 2, 1, 0), At(0)), IsEmpty());
    TestRun first = Simple(sequencer, 2, 0, 0);
    TestRun blocked(2, Epoch(1));
    blocked.BlockExternally();
    EXPECT_THAT(Cast(&sequencer, lacks ? first : blocked, At(30)), IsEmpty());
    for (int64_t i = 0; i < kRuns; ++i) {
      TestRun local(1000 + i, Epoch(1));
      if (i == 0) local.producers() = {RunHandle(2)};
      for (int64_t before = 0; before < i; ++before) {
        local.producers().push_back(RunHandle(1000 + before));
      }
      EXPECT_THAT(Cast(&sequencer, local, At(30)), IsEmpty());
    }
  }
  void Close(const std::vector<RunHandle>& others = {}) {
    TestRun last = OneAllReduce(3, Epoch(1), pair, 2, 0, 0);
    last.producers() = {RunHandle(999 + kRuns)};
    last.producers().insert(last.producers().end(), others.begin(), others.end());
    EXPECT_THAT(Cast(&sequencer, last, At(30)), IsEmpty());
    EXPECT_EQ(sequencer.NextDeadline(), At(60));
  }

  Sequencer sequencer;
  GroupId pair;
  Slices slices;
};

TEST(SequencerFailureTest, WhatIsLateIsSearchedForWhatItLacksInSlices) {
  LateChain chain(/*lacks=*/true);
  chain.Close();
  const Actions actions = chain.slices.GoOn(&chain.sequencer, At(60));
  EXPECT_LE(chain.slices.largest, kMaxSliceWork);
  EXPECT_GT(chain.slices.count, 30);
  ASSERT_THAT(actions, SizeIs(1));
  const Error error = EndedBy(actions);
  EXPECT_EQ(error.reason, Reason::kAgreeTimeout);
  EXPECT_EQ(error.culprit.rank, 1);
  EXPECT_EQ(error.instance, "group 0 call 0");
  EXPECT_THAT(error.message, AllOf(HasSubstr("missing after 30s: rank 1 (pid 101)"),
                                   HasSubstr("group 1 call 0"), HasSubstr("for 1m")));
}

TEST(SequencerFailureTest, WhatIsLateForAnotherWorldIsSearchedOnceAndInSlices) {
  LateChain chain(/*lacks=*/false);
  chain.Close();
  // Others that are late at the same time wait for the same.
  for (int64_t i = 0; i < 500; ++i) {
    for (int32_t rank = 0; rank < 2; ++rank) {
      TestRun run = Simple(chain.sequencer, 5000 + 2 * i + rank, rank, i);
      run.producers() = {RunHandle(999 + LateChain::kRuns)};
      EXPECT_THAT(Cast(&chain.sequencer, run, At(30)), IsEmpty());
    }
  }
  EXPECT_THAT(chain.slices.GoOn(&chain.sequencer, At(100), 1), IsEmpty());
  EXPECT_EQ(chain.sequencer.NextDeadline(), At(100)) << "behind what others have left over";
  EXPECT_THAT(chain.slices.GoOn(&chain.sequencer, At(100)), IsEmpty());
  EXPECT_LE(chain.slices.largest, kMaxSliceWork);
  EXPECT_GT(chain.slices.count, 30);
  EXPECT_LT(chain.slices.count, 300);
  EXPECT_EQ(chain.sequencer.NextDeadline(), At(30 + 60 + 300));
  Actions actions;
  chain.sequencer.Unblock(RunHandle(2), At(100), &actions);
  EXPECT_THAT(Launched(actions), SizeIs(LateChain::kRuns + 3 + 1000));
}

// Between the slices of a search for what is late anything may happen.
TEST(SequencerFailureTest, WhatHappensWhileWhatIsLateIsSearchedForCounts) {
  enum class Meanwhile { kLaunch, kFailure, kEnd, kAnother };
  for (const Meanwhile meanwhile :
       {Meanwhile::kLaunch, Meanwhile::kFailure, Meanwhile::kEnd, Meanwhile::kAnother}) {
    SCOPED_TRACE(static_cast<int>(meanwhile));
    LateChain chain(/*lacks=*/meanwhile != Meanwhile::kAnother);
    chain.Close();
    Sequencer& sequencer = chain.sequencer;
    if (meanwhile == Meanwhile::kAnother) {
      // It waits for nothing of that, and its own gang lacks a vote of rank 0, since later.
      TestRun both(4, Epoch(1));
      const int32_t slot = both.Slot(chain.pair, 2, {1}, {1});
      both.AllReduce(slot, 1);
      both.AllReduce(slot, 1);
      EXPECT_THAT(Cast(&sequencer, both, At(31)), IsEmpty());
      EXPECT_THAT(Cast(&sequencer, OneAllReduce(5, Epoch(1), chain.pair, 2, 0, 1), At(31)),
                  IsEmpty());
    }
    const absl::Time late = meanwhile == Meanwhile::kAnother ? At(95) : At(60);
    EXPECT_THAT(chain.slices.GoOn(&sequencer, late, 10), IsEmpty());
    ASSERT_LE(sequencer.NextDeadline(), late);
    Actions actions = chain.slices.InOne([&](Actions* event) {
      switch (meanwhile) {
        case Meanwhile::kLaunch:
          ASSERT_TRUE(sequencer.Submit(Simple(sequencer, 6, 1, 0).Build(), late, event).ok());
          break;
        case Meanwhile::kFailure:
          sequencer.Withdraw(RunHandle(2), Error(Reason::kBadType), late, event);
          break;
        case Meanwhile::kEnd:
          sequencer.Cancel(RunHandle(2), Rank(0), late, event);
          break;
        case Meanwhile::kAnother:
          sequencer.Unblock(RunHandle(2), late, event);
          break;
      }
    });
    for (SequencerAction& action : chain.slices.GoOn(&sequencer, late)) {
      actions.push_back(std::move(action));
    }
    switch (meanwhile) {
      case Meanwhile::kLaunch:
        EXPECT_THAT(Launched(actions), SizeIs(LateChain::kRuns + 4));
        EXPECT_THAT(Failed(actions), IsEmpty());
        break;
      case Meanwhile::kFailure:
        EXPECT_THAT(Failed(actions), SizeIs(LateChain::kRuns + 3));
        break;
      case Meanwhile::kEnd:
        ASSERT_THAT(actions, SizeIs(1));
        EXPECT_EQ(EndedBy(actions).reason, Reason::kCancelled);
        break;
      case Meanwhile::kAnother: {
        EXPECT_THAT(Launched(actions), SizeIs(LateChain::kRuns + 3));
        ASSERT_EQ(actions.back().kind, Kind::kEpochEnded);
        const Error& error = *actions.back().error;
        EXPECT_EQ(error.reason, Reason::kAgreeTimeout);
        EXPECT_EQ(error.instance, "group 1 call 2");
        EXPECT_EQ(error.culprit.rank, 0);
        EXPECT_THAT(error.message,
                    AllOf(HasSubstr("group 1 call 1"), Not(HasSubstr("group 1 call 0"))));
        break;
      }
    }
    EXPECT_GT(sequencer.NextDeadline(), late);
  }
}

// The slices of that search may end with it: what is late afterwards is searched again.
TEST(SequencerFailureTest, WhatIsLateLaterIsSearchedAgain) {
  Sequencer sequencer = World(3);
  const GroupId both = AddGroup(&sequencer, {0, 1});
  const GroupId alone = AddGroup(&sequencer, {0});
  const GroupId others = AddGroup(&sequencer, {1, 2});
  // Its gang has another order than its program.
  TestRun blocked(1, Epoch(1));
  blocked.AllReduce(blocked.Slot(alone, 1, {0}, {0}), 0);
  blocked.AllReduce(blocked.Slot(both, 2, {0}, {0}), 0);
  blocked.BlockExternally();
  EXPECT_THAT(Cast(&sequencer, blocked, At(0)), IsEmpty());
  TestRun middle(2, Epoch(1));
  middle.AllReduce(middle.Slot(both, 2, {1}, {0}), 1);
  middle.AllReduce(middle.Slot(others, 2, {0}, {0}), 0);
  EXPECT_THAT(Cast(&sequencer, middle, At(30)), IsEmpty());
  EXPECT_THAT(Cast(&sequencer, OneAllReduce(3, Epoch(1), others, 2, 1, 0), At(31)), IsEmpty());
  Slices slices;
  while (sequencer.NextDeadline() <= At(60)) {
    EXPECT_THAT(slices.InOne([&](Actions* actions) {
      CountWork(kMaxSliceWork);  // it has time for nothing more
      sequencer.Advance(At(60), actions);
    }),
                IsEmpty());
  }
  EXPECT_EQ(sequencer.NextDeadline(), At(90));
  Actions actions;
  sequencer.Unblock(RunHandle(1), At(70), &actions);
  ASSERT_THAT(actions, SizeIs(1));
  EXPECT_EQ(actions[0].kind, Kind::kReserve);
  actions.clear();
  sequencer.Advance(At(90), &actions);
  EXPECT_THAT(actions, IsEmpty()) << "it has as long from then on";
  EXPECT_EQ(sequencer.NextDeadline(), At(130));
  sequencer.Advance(At(130), &actions);
  const Error error = EndedBy(actions);
  EXPECT_EQ(error.reason, Reason::kAgreeTimeout);
  EXPECT_THAT(error.message, HasSubstr("has not got ready for its gang's order"));
}

// What the search has gone through becomes one gang with what it has not come to yet, and lacks
// what that lacks.
TEST(SequencerFailureTest, ACircleThatIsFoundWhileWhatIsLateIsSearchedForCounts) {
  LateChain chain(/*lacks=*/false);
  Sequencer& sequencer = chain.sequencer;
  const GroupId large = AddGroup(&sequencer, {0, 1});
  const GroupId lacking = AddGroup(&sequencer, {0, 1});
  // Rank 0 makes calls 0 and 1 in one run, and between them comes a gang of eight calls that reads
  // the one and is read for the other; so does, for the second, what lacks a vote.
  EXPECT_THAT(Cast(&sequencer, Simple(sequencer, 10, 1, 0), At(30)), IsEmpty());
  for (int32_t rank = 0; rank < 2; ++rank) {
    TestRun run(12 + rank, Epoch(1));
    const int32_t slot = run.Slot(large, 2, {rank}, {0});
    for (int call = 0; call < 8; ++call) run.AllReduce(slot, rank);
    run.producers() = {RunHandle(10)};
    EXPECT_THAT(Cast(&sequencer, run, At(30)), IsEmpty());
  }
  EXPECT_THAT(Cast(&sequencer, OneAllReduce(20, Epoch(1), lacking, 2, 1, 0), At(30)), IsEmpty());
  TestRun second = Simple(sequencer, 11, 1, 1);
  second.producers() = {RunHandle(20), RunHandle(13)};
  EXPECT_THAT(Cast(&sequencer, second, At(30)), IsEmpty());
  chain.Close({RunHandle(13)});
  EXPECT_THAT(chain.slices.GoOn(&sequencer, At(60), 10), IsEmpty());

  TestRun both(30, Epoch(1));
  const int32_t slot = both.Slot(kWorld, 2, {0}, {0});
  both.AllReduce(slot, 0);
  both.AllReduce(slot, 0);
  EXPECT_THAT(chain.slices.InOne([&](Actions* actions) {
    ASSERT_TRUE(sequencer.Submit(both.Build(), At(60), actions).ok());
  }),
              IsEmpty());
  const Actions actions = chain.slices.GoOn(&sequencer, At(60));
  ASSERT_THAT(actions, SizeIs(1));
  const Error error = EndedBy(actions);
  EXPECT_EQ(error.reason, Reason::kAgreeTimeout);
  EXPECT_EQ(error.culprit.rank, 0);
  EXPECT_EQ(error.instance, absl::StrCat("group ", lacking.value(), " call 0"));
  EXPECT_THAT(error.message, HasSubstr("group 1 call 0"));
  EXPECT_GT(chain.slices.count, 30);
}

TEST(SequencerFailureTest, CancelBeforeTheLaunchEndsTheEpochAndAfterItDoesNothing) {
  Sequencer sequencer = World(2);
  Cast(&sequencer, Simple(sequencer, 1, 0, 0));
  Sequencer other = sequencer;
  Actions actions;
  sequencer.Cancel(RunHandle(1), Rank(0), At(1), &actions);
  EXPECT_THAT(Failed(actions), ElementsAre(1));
  EXPECT_EQ(EndedBy(actions).code, absl::StatusCode::kCancelled);
  EXPECT_EQ(EndedBy(actions).reason, Reason::kCancelled);
  EXPECT_EQ(EndedBy(actions).culprit.rank, 0);

  Cast(&other, Simple(other, 2, 1, 0));
  actions.clear();
  other.Cancel(RunHandle(1), Rank(0), At(1), &actions);
  EXPECT_THAT(actions, IsEmpty());
  EXPECT_EQ(other.epoch(), Epoch(1));
}

TEST(SequencerFailureTest, ARefusedPartIsToldToTheOthers) {
  Sequencer sequencer = World(2);
  Cast(&sequencer, Simple(sequencer, 1, 0, 0));
  Error why(Reason::kOutOfMemory);
  why.message = "needs 9 bytes, 8 are free";
  Actions actions;
  sequencer.Refuse({RefusedAt(1, 0, 1)}, Epoch(1), why, At(0), &actions);
  const Error error = EndedBy(actions);
  EXPECT_EQ(error.code, absl::StatusCode::kAborted);
  EXPECT_EQ(error.reason, Reason::kPeerRefused);
  EXPECT_EQ(error.culprit.rank, 1);
  EXPECT_THAT(error.message, HasSubstr("needs 9 bytes"));
  actions.clear();
  sequencer.Refuse({RefusedAt(1, 0, 1)}, Epoch(1), why, At(0), &actions);  // that epoch has ended
  EXPECT_THAT(actions, IsEmpty());
}

TEST(SequencerFailureTest, CallsThatAreRefusedAreCounted) {
  constexpr int32_t kCalls = 1024;  // Refuse::kMaxCalls
  for (const bool pairs : {false, true}) {
    SCOPED_TRACE(pairs);
    Sequencer sequencer = World(2);
    RefusedMember member = RefusedAt(1, 0, 1);
    member.calls.assign(kCalls, member.calls[0]);
    for (int32_t i = 0; i < kCalls && pairs; ++i) {
      RefusedCalls& calls = member.calls[static_cast<size_t>(i)];
      calls.source = GroupRank(1);
      calls.destination = GroupRank(0);
      calls.tag = i;
    }
    Actions actions;
    const WorkSlice slice;
    sequencer.Refuse({member}, Epoch(1), Error(Reason::kOutOfMemory, "no"), At(0), &actions);
    EXPECT_GE(SliceWork(), kCalls);
    EXPECT_LE(SliceWork(), kMaxSliceWork);
  }
}

TEST(SequencerFailureTest, ACauseIsOneErrorForAllThatFailWithIt) {
  Sequencer sequencer = World(2);
  for (int64_t i = 0; i < 5; ++i) Cast(&sequencer, Simple(sequencer, 1 + i, 0, i));
  Error why(Reason::kAborted, "by hand");
  Actions actions;
  sequencer.Abort(why, At(0), &actions);
  ASSERT_THAT(actions, SizeIs(1));
  EXPECT_THAT(Failed(actions), ElementsAre(1, 2, 3, 4, 5));
  const Actions late = Cast(&sequencer, OneAllReduce(10, Epoch(1), kWorld, 2, 1, 0));
  actions.insert(actions.end(), late.begin(), late.end());
  for (const SequencerAction& action : actions) EXPECT_EQ(action.error, actions[0].error);

  TestRun whole(20, sequencer.epoch());
  const int32_t slot = whole.Slot(kWorld, 2, {0}, {6});
  whole.AllReduce(slot, 0);
  Cast(&sequencer, whole);
  TestRun uses = Simple(sequencer, 21, 0, 7);
  uses.producers() = {RunHandle(20)};
  Cast(&sequencer, uses);
  actions.clear();
  sequencer.Withdraw(RunHandle(20), why, At(0), &actions);
  ASSERT_THAT(Failed(actions), ElementsAre(20, 21));
  EXPECT_EQ(actions[0].error, actions[1].error);
}

TEST(SequencerFailureTest, AbortEndsTheEpochWithItsCause) {
  Sequencer sequencer = World(2);
  Cast(&sequencer, Simple(sequencer, 1, 0, 0));
  Error cause(Reason::kDraining);
  cause.message = "draining";
  Actions actions;
  sequencer.Abort(cause, At(0), &actions);
  EXPECT_THAT(Failed(actions), ElementsAre(1));
  EXPECT_EQ(EndedBy(actions).reason, Reason::kDraining);
  EXPECT_EQ(sequencer.Cause(Epoch(1))->message, "draining");
}

TEST(SequencerFailureTest, CausesThatAreForgottenAreAnsweredWithEpochEnded) {
  SequencerOptions options;
  options.kept_causes = 2;
  Sequencer sequencer(2, options);
  for (int epoch = 1; epoch <= 3; ++epoch) {
    Cast(&sequencer, OneAllReduce(epoch, Epoch(epoch), kWorld, 2, 0, epoch - 1));
    Actions actions;
    sequencer.Cancel(RunHandle(epoch), Rank(0), At(0), &actions);
  }
  EXPECT_FALSE(sequencer.Cause(Epoch(1)).has_value());
  const auto late = [&](int64_t epoch) {
    return Cast(&sequencer, OneAllReduce(10 + epoch, Epoch(epoch), kWorld, 2, 1, epoch - 1));
  };
  EXPECT_EQ(late(1)[0].error->reason, Reason::kEpochEnded);
  EXPECT_EQ(late(2)[0].error->reason, Reason::kCancelled);
  EXPECT_EQ(late(3)[0].error->reason, Reason::kCancelled);
}

// --- Execution ----------------------------------------------------------------------------------

TEST(SequencerExecutionTest, TheLastPublishedCollectiveOfTheWorldIsKnown) {
  Sequencer sequencer = World(2);
  for (int64_t i = 0; i < 2; ++i) {
    Cast(&sequencer, Simple(sequencer, i * 2, 0, i));
    Cast(&sequencer, Simple(sequencer, i * 2 + 1, 1, i));
  }
  EXPECT_FALSE(sequencer.LastPublished(Rank(0)).has_value());
  Actions actions;
  sequencer.Finished(Ticket(2), absl::OkStatus(), At(1), &actions);
  sequencer.Finished(Ticket(1), absl::OkStatus(), At(1), &actions);
  EXPECT_THAT(actions, IsEmpty());
  EXPECT_EQ(*sequencer.LastPublished(Rank(1)), WorldKey(1, 1));
}

TEST(SequencerFailureTest, WhatFailsAloneLooksOnlyAtWhatWaitsForIt) {
  Sequencer sequencer = World(2);
  // Many runs wait for results of the first one.
  constexpr int64_t kRuns = 500;
  Cast(&sequencer, Simple(sequencer, 1, 0, 0));
  for (int64_t run = 0; run < kRuns; ++run) {
    TestRun local(100 + run, Epoch(1));
    local.producers() = {RunHandle(1)};
    EXPECT_THAT(Cast(&sequencer, local), IsEmpty());
  }
  Cast(&sequencer, Simple(sequencer, 2, 0, 1));
  TestRun uses(3, Epoch(1));
  uses.producers() = {RunHandle(1), RunHandle(2)};
  Cast(&sequencer, uses);
  const auto withdrawn = [&](int64_t run) {
    Actions actions;
    sequencer.Withdraw(RunHandle(run), Error(Reason::kBadType), At(0), &actions);
    return Failed(actions);
  };
  {
    const WorkSlice slice;
    EXPECT_THAT(withdrawn(2), ElementsAre(2, 3));
    EXPECT_LT(SliceWork(), 100);
  }
  EXPECT_THAT(withdrawn(100), ElementsAre(100));
  // Its number goes to another run, which does not wait for the first one.
  Cast(&sequencer, Simple(sequencer, 4, 0, 2));
  EXPECT_THAT(withdrawn(1), SizeIs(kRuns));
  EXPECT_TRUE(sequencer.IsPending(RunHandle(4)));
}

// What waits for a run that fails does so while its ranks' errors wait for the last of them, too.
TEST(SequencerFailureTest, WhatDiffersFailsAloneWithWhatItReads) {
  constexpr int64_t kCalls = 100;
  Sequencer sequencer(3, SequencerOptions());
  const GroupId pair = AddGroup(&sequencer, {1, 2});
  Cast(&sequencer, OneAllReduce(1, Epoch(1), pair, 2, 0, 0));
  for (const int32_t rank : {0, 1}) {
    TestRun run(2 + rank, Epoch(1));
    const int32_t slot = run.Slot(kWorld, 3, {rank}, {0});
    for (int64_t call = 0; call < kCalls; ++call) {
      Participation& part = run.AllReduce(slot, rank);
      if (rank == 1) part.descriptor.reduction = Reduction::kMax;
    }
    if (rank == 1) run.producers() = {RunHandle(1)};
    EXPECT_THAT(Cast(&sequencer, run), IsEmpty());
  }
  EXPECT_LT(sequencer.NextDeadline(), At(1));
  Actions actions;
  sequencer.Withdraw(RunHandle(1), Error(Reason::kBadType), At(0), &actions);
  EXPECT_THAT(Failed(actions), SizeIs(3));
  EXPECT_EQ(sequencer.NextDeadline(), absl::InfiniteFuture());
}

// Many runs read results of many others, and some of them of one that fails. Looked for is each
// that is read, looked at each that reads.
TEST(SequencerFailureTest, WhatFailsAloneLeavesItsProducersInLinearTime) {
  const auto work = [](int64_t producers, int64_t consumers, int64_t failing) {
    Sequencer sequencer = World(2);
    Cast(&sequencer, Simple(sequencer, 1, 0, 0));
    std::vector<RunHandle> handles;
    for (int64_t call = 1; call <= producers; ++call) {
      handles.push_back(RunHandle(1 + call));
      Cast(&sequencer, Simple(sequencer, 1 + call, 0, call));
    }
    for (int64_t run = 0; run < consumers; ++run) {
      TestRun consumer(1000 + run, Epoch(1));
      consumer.producers() = handles;
      if (run < failing) consumer.producers().push_back(RunHandle(1));
      EXPECT_THAT(Cast(&sequencer, consumer), IsEmpty());
    }
    const WorkSlice slice;
    Actions actions;
    sequencer.Withdraw(RunHandle(1), Error(Reason::kBadType), At(0), &actions);
    EXPECT_THAT(Failed(actions), SizeIs(1 + failing));
    return SliceWork();
  };
  EXPECT_GE(work(341, 682, 682), 341 * 682 / 4);
  EXPECT_LE(work(511, 512, 1), kMaxSliceWork);
}

TEST(SequencerExecutionTest, ExecTimeoutFailsTheGangAndWhatIsPending) {
  Sequencer sequencer = World(2);
  Cast(&sequencer, Simple(sequencer, 1, 0, 0), At(0));
  Cast(&sequencer, Simple(sequencer, 2, 1, 0), At(10));
  Cast(&sequencer, Simple(sequencer, 3, 0, 1), At(290));
  EXPECT_EQ(sequencer.NextDeadline(), At(310));
  Actions actions;
  sequencer.Advance(At(310), &actions);
  EXPECT_THAT(Failed(actions), ElementsAre(1, 2, 3));
  const Error error = EndedBy(actions);
  EXPECT_EQ(error.code, absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(error.reason, Reason::kExecTimeout);
  EXPECT_EQ(error.op, "all_reduce SUM f32[4]");
  EXPECT_EQ(error.source, "rank0.cc:10");
  EXPECT_THAT(error.message, HasSubstr("all_reduce SUM f32[4] (rank0.cc:10, ticket 1)"));
  actions.clear();
  sequencer.Finished(Ticket(1), absl::OkStatus(), At(311), &actions);
  EXPECT_THAT(actions, IsEmpty());
  EXPECT_FALSE(sequencer.LastPublished(Rank(0)).has_value());
  EXPECT_EQ(sequencer.NextDeadline(), absl::InfiniteFuture());
}

TEST(SequencerExecutionTest, AFailedGangEndsItsEpochButNoLaterOne) {
  Sequencer sequencer = World(2);
  for (int64_t i = 0; i < 2; ++i) {
    Cast(&sequencer, Simple(sequencer, i * 2, 0, i));
    Cast(&sequencer, Simple(sequencer, i * 2 + 1, 1, i));
  }
  Cast(&sequencer, Simple(sequencer, 4, 0, 2));
  Actions actions;
  sequencer.Finished(Ticket(1), absl::InternalError("device lost"), At(1), &actions);
  EXPECT_THAT(Failed(actions), ElementsAre(0, 1, 4));
  EXPECT_EQ(EndedBy(actions).reason, Reason::kExecFailed);
  EXPECT_EQ(EndedBy(actions).code, absl::StatusCode::kInternal);

  Cast(&sequencer, Simple(sequencer, 5, 0, 3));
  actions.clear();
  sequencer.Finished(Ticket(2), absl::InternalError("device lost"), At(2), &actions);
  EXPECT_THAT(Failed(actions), ElementsAre(2, 3));
  EXPECT_EQ(sequencer.epoch(), Epoch(2));
}

TEST(SequencerExecutionTest, EndingAnEpochLeavesLaunchedGangsAlone) {
  Sequencer sequencer = World(2);
  Cast(&sequencer, Simple(sequencer, 1, 0, 0));
  Cast(&sequencer, Simple(sequencer, 2, 1, 0));
  Cast(&sequencer, Simple(sequencer, 3, 0, 1));
  Actions actions;
  sequencer.Dead(Rank(1), "its process ended", At(0), &actions);
  EXPECT_THAT(Failed(actions), ElementsAre(3));
  actions.clear();
  sequencer.Finished(Ticket(1), absl::OkStatus(), At(1), &actions);
  EXPECT_EQ(*sequencer.LastPublished(Rank(0)), WorldKey(1, 0));
}

// --- Members that go ----------------------------------------------------------------------------

TEST(SequencerMemberTest, DeathIsToldToWhoWaitsAndToWhoAsksLater) {
  Sequencer sequencer = World(3);
  const GroupId pair = AddGroup(&sequencer, {0, 1});
  Cast(&sequencer, Simple(sequencer, 1, 0, 0));
  Actions actions;
  sequencer.Dead(Rank(2), "its process ended", At(0), &actions);
  Error error = EndedBy(actions);
  EXPECT_EQ(error.code, absl::StatusCode::kAborted);
  EXPECT_EQ(error.reason, Reason::kPeerDied);
  EXPECT_EQ(error.culprit.rank, 2);
  EXPECT_EQ(error.culprit.pid, 102);
  EXPECT_EQ(error.op, "all_reduce");
  EXPECT_THAT(error.message, AllOf(HasSubstr("rank 2 (pid 102) is dead: its process ended"),
                                   HasSubstr("rank0.cc:10")));
  actions.clear();
  sequencer.Dead(Rank(2), "its process ended", At(0), &actions);
  EXPECT_THAT(actions, IsEmpty());

  error = EndedBy(Cast(&sequencer, Simple(sequencer, 2, 0, 1)));
  EXPECT_EQ(error.code, absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(error.reason, Reason::kNeedsReform);
  EXPECT_EQ(error.culprit.rank, 2);
  EXPECT_THAT(error.message, HasSubstr("its process ended; reform"));
  // Groups without the dead go on.
  Cast(&sequencer, OneAllReduce(3, sequencer.epoch(), pair, 2, 0, 0));
  EXPECT_THAT(Launched(Cast(&sequencer, OneAllReduce(4, sequencer.epoch(), pair, 2, 1, 0))),
              ElementsAre(3, 4));
}

// Whichever group asks first, and whenever it was made.
TEST(SequencerMemberTest, EachGroupNamesItsMemberThatDiedFirst) {
  Sequencer sequencer = World(5);
  const GroupId both = AddGroup(&sequencer, {0, 1, 2});
  const GroupId later = AddGroup(&sequencer, {3, 1, 0});
  const GroupId none = AddGroup(&sequencer, {3, 4});
  Actions actions;
  sequencer.Dead(Rank(2), "second in the list", At(0), &actions);
  sequencer.Dead(Rank(1), "first in the list", At(0), &actions);
  const GroupId after = AddGroup(&sequencer, {0, 1, 2});
  const GroupId alive = AddGroup(&sequencer, {4, 0});
  int64_t run = 0;
  // By whom, who is named; -1: nobody.
  const auto named = [&](GroupId group, int32_t member) {
    const auto size = static_cast<int32_t>(sequencer.GroupMembers(group)->size());
    ++run;
    const Actions decided =
        Cast(&sequencer, OneAllReduce(run, sequencer.epoch(), group, size, member, run));
    if (decided.empty()) return -1;
    const Error error = EndedBy(decided);
    EXPECT_EQ(error.reason, Reason::kNeedsReform);
    return error.culprit.rank;
  };
  for (int again = 0; again < 2; ++again) {
    EXPECT_EQ(named(none, 0), -1);
    EXPECT_EQ(named(later, 0), 1);
    EXPECT_EQ(named(both, 0), 2);
    EXPECT_EQ(named(after, 0), 1);
    EXPECT_EQ(named(alive, 0), -1);
    EXPECT_EQ(named(kWorld, 0), 2);
  }
  sequencer.Dead(Rank(4), "the third", At(0), &actions);
  EXPECT_EQ(named(none, 0), 4);
  EXPECT_EQ(named(alive, 1), 4);
  EXPECT_EQ(named(both, 0), 2);
}

TEST(SequencerMemberTest, LeavingHurtsOnlyWhoNeedsTheLeaver) {
  Sequencer sequencer = World(3);
  const GroupId pair = AddGroup(&sequencer, {0, 1});
  Cast(&sequencer, OneAllReduce(1, Epoch(1), pair, 2, 0, 0));
  Actions actions;
  sequencer.Left(Rank(2), At(0), &actions);
  EXPECT_THAT(actions, IsEmpty());
  EXPECT_THAT(Launched(Cast(&sequencer, OneAllReduce(2, Epoch(1), pair, 2, 1, 0))),
              ElementsAre(1, 2));
  const Error error = EndedBy(Cast(&sequencer, Simple(sequencer, 3, 0, 0)));
  EXPECT_EQ(error.reason, Reason::kNeedsReform);
  EXPECT_EQ(error.culprit.rank, 2);
}

TEST(SequencerMemberTest, LeavingWhileSomebodyWaitsEndsTheEpoch) {
  for (const int32_t leaver : {0, 1}) {  // the one that has voted, the one that is waited for
    Sequencer sequencer = World(2);
    Cast(&sequencer, Simple(sequencer, 1, 0, 0));
    Actions actions;
    sequencer.Left(Rank(leaver), At(0), &actions);
    EXPECT_THAT(Failed(actions), ElementsAre(1));
    EXPECT_EQ(EndedBy(actions).reason, Reason::kPeerLeft);
    EXPECT_EQ(EndedBy(actions).culprit.rank, leaver);
  }
}

TEST(SequencerMemberTest, ShrinkRenumbersTheSurvivors) {
  Sequencer sequencer = World(4);
  const GroupId pair = AddGroup(&sequencer, {0, 3});
  Forward(&sequencer, 1, 0);
  Actions actions;
  sequencer.Finished(Ticket(1), absl::OkStatus(), At(0), &actions);
  sequencer.Dead(Rank(1), "its process ended", At(0), &actions);
  actions.clear();
  EXPECT_THAT(sequencer.Shrink(At(0), &actions), ElementsAre(0, -1, 1, 2));
  EXPECT_EQ(sequencer.size(), 3);
  EXPECT_EQ(*sequencer.LastPublished(Rank(2)), WorldKey(1, 0));
  EXPECT_FALSE(sequencer.GroupMembers(pair).ok());
  EXPECT_EQ(Refused(&sequencer, OneAllReduce(20, sequencer.epoch(), pair, 2, 0, 0)).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_NE(AddGroup(&sequencer, {0, 1}), pair);
  Forward(&sequencer, 30, 0);
}

// A refusal may come late, from before it: its steps and calls are of members that begin anew.
TEST(SequencerMemberTest, WhatWasRefusedBeforeAShrinkCountsNoMore) {
  Sequencer sequencer = World(3);
  Actions actions;
  sequencer.Dead(Rank(1), "its process ended", At(0), &actions);
  actions.clear();
  EXPECT_THAT(sequencer.Shrink(At(0), &actions), ElementsAre(0, -1, 1));
  actions.clear();
  RefusedMember late = RefusedAt(0, 0, 1);
  late.step = 57;
  sequencer.Refuse({late}, Epoch(1), Error(), At(0), &actions);
  EXPECT_TRUE(actions.empty());
  Forward(&sequencer, 30, 0);
}

TEST(SequencerMemberTest, TheKthRequestForAListGivesTheSameGroup) {
  Sequencer sequencer = World(3);
  const std::vector<Rank> list = {Rank(2), Rank(0)};
  const GroupId first = *sequencer.AddGroup(Rank(2), list);
  const GroupId second = *sequencer.AddGroup(Rank(2), list);
  EXPECT_NE(first, second);
  EXPECT_EQ(*sequencer.AddGroup(Rank(0), list), first);
  EXPECT_EQ(*sequencer.AddGroup(Rank(0), list), second);
  EXPECT_EQ(*sequencer.GroupMembers(first), list);
  EXPECT_NE(*sequencer.AddGroup(Rank(0), {Rank(0), Rank(2)}), first);  // another order
  for (const std::vector<Rank>& bad : std::vector<std::vector<Rank>>{
           {}, {Rank(0), Rank(3)}, {Rank(0), Rank(-1)}, {Rank(0), Rank(0)}, {Rank(1), Rank(2)}}) {
    EXPECT_EQ(sequencer.AddGroup(Rank(0), bad).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(SequencerMemberTest, AWorldHasSoManyGroups) {
  SequencerOptions options;
  options.max_groups = 3;
  Sequencer sequencer(3, options);
  const std::vector<Rank> list = {Rank(2), Rank(0)};
  const GroupId first = *sequencer.AddGroup(Rank(2), list);
  const GroupId second = *sequencer.AddGroup(Rank(2), list);
  const size_t rows = sequencer.StateSize();
  for (const std::vector<Rank>& more :
       std::vector<std::vector<Rank>>{list, {Rank(2)}, {Rank(2), Rank(1)}, {Rank(2)}}) {
    const absl::Status full = sequencer.AddGroup(Rank(2), more).status();
    EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
    EXPECT_EQ(ErrorOf(full).reason, Reason::kQuota) << full;
  }
  EXPECT_EQ(sequencer.StateSize(), rows);
  // What is refused does not count, and those that there are can still be had by all.
  EXPECT_EQ(*sequencer.AddGroup(Rank(0), list), first);
  EXPECT_EQ(*sequencer.AddGroup(Rank(0), list), second);
  EXPECT_FALSE(sequencer.AddGroup(Rank(0), list).ok());
}

// --- Gradients ----------------------------------------------------------------------------------

TEST(SequencerGradientTest, EveryHolderIsWaitedFor) {
  Sequencer sequencer = World(2);
  const InstanceKey forward = Forward(&sequencer, 1, 0);
  EXPECT_THAT(Cast(&sequencer, Gradient(sequencer, 10, 0, forward, 0)), IsEmpty());
  const Actions actions = Cast(&sequencer, Gradient(sequencer, 11, 1, forward, 0));
  ASSERT_THAT(Launched(actions), ElementsAre(10, 11));
  EXPECT_EQ(actions[0].instances[0].key, forward.Gradient({0, 0}));
  EXPECT_THAT(actions[0].instances[0].absent, IsEmpty());
}

TEST(SequencerGradientTest, ALiveEntryIsLate) {
  Sequencer sequencer = World(2);
  const InstanceKey forward = Forward(&sequencer, 1, 0);
  Cast(&sequencer, Gradient(sequencer, 10, 0, forward, 0), At(0));
  Actions actions;
  sequencer.Advance(At(60), &actions);
  EXPECT_EQ(EndedBy(actions).reason, Reason::kAgreeTimeout);
  EXPECT_EQ(EndedBy(actions).culprit.rank, 1);
  EXPECT_THAT(EndedBy(actions).message, HasSubstr("gradient 0"));
}

TEST(SequencerGradientTest, AbandonedEntriesGiveZeros) {
  Sequencer sequencer = World(3);
  const InstanceKey forward = Forward(&sequencer, 1, 0, {2});  // rank 2 wants none
  Actions actions;
  sequencer.DropTape(Rank(1), forward, false, Epoch(1), At(0), &actions);
  EXPECT_THAT(actions, IsEmpty());
  actions = Cast(&sequencer, Gradient(sequencer, 10, 0, forward, 0));
  ASSERT_THAT(Launched(actions), ElementsAre(10));
  EXPECT_THAT(actions[0].instances[0].absent, ElementsAre(GroupRank(1), GroupRank(2)));
  EXPECT_THAT(actions[0].instances[0].parts, SizeIs(1));
}

TEST(SequencerGradientTest, DroppingCompletesWhatIsPending) {
  for (const bool consumed : {false, true}) {
    Sequencer sequencer = World(2);
    const InstanceKey forward = Forward(&sequencer, 1, 0);
    Cast(&sequencer, Gradient(sequencer, 10, 0, forward, 0));
    Actions actions;
    sequencer.DropTape(Rank(1), forward, consumed, Epoch(1), At(0), &actions);
    ASSERT_THAT(Launched(actions), ElementsAre(10));
    EXPECT_THAT(actions[0].instances[0].absent, ElementsAre(GroupRank(1)));
  }
}

// A rank that is absent from a gradient is absent from the gradients of that, whenever it dropped
// its entry: before they were asked for, between, or after.
TEST(SequencerGradientTest, WhoIsAbsentFromAGradientIsAbsentFromItsGradients) {
  constexpr int kOrders = 4;
  for (int drop_at = 0; drop_at <= kOrders; ++drop_at) {
    SCOPED_TRACE(drop_at);
    Sequencer sequencer = World(3);
    const InstanceKey forward = Forward(&sequencer, 1, 0);
    const InstanceKey first = forward.Gradient({0, 0});
    const InstanceKey second = first.Gradient({0, 0});
    std::vector<RunHandle> launched;
    const auto count = [&](const Actions& actions) {
      for (const SequencerAction& action : actions) {
        ASSERT_EQ(action.kind, Kind::kLaunch);
        for (const LaunchedInstance& instance : action.instances) {
          EXPECT_THAT(instance.absent, ElementsAre(GroupRank(0))) << instance.key.ToString();
        }
        launched.insert(launched.end(), action.runs.begin(), action.runs.end());
      }
    };
    // Members 1 and 2 ask for the gradient, with entries of their own, and for that one's gradient.
    for (int step = 0; step <= kOrders; ++step) {
      if (step == drop_at) {
        Actions actions;
        sequencer.DropTape(Rank(0), forward, false, Epoch(1), At(0), &actions);
        count(actions);
      }
      if (step == kOrders) break;
      const int32_t member = 1 + step % 2;
      TestRun run(10 + step, Epoch(1));
      run.GradientOf(step < 2 ? forward : first, 0, run.Slot(kWorld, 3, {member}, {0}), member)
          .wants_grad = true;
      count(Cast(&sequencer, run));
    }
    EXPECT_THAT(launched, testing::UnorderedElementsAre(RunHandle(10), RunHandle(11), RunHandle(12),
                                                        RunHandle(13)));
    // And a third order, of which nothing was said before.
    for (int32_t member = 1; member < 3; ++member) {
      TestRun run(20 + member, Epoch(1));
      run.GradientOf(second, 0, run.Slot(kWorld, 3, {member}, {0}), member);
      count(Cast(&sequencer, run));
    }
    EXPECT_THAT(launched, SizeIs(6));
  }
}

TEST(SequencerGradientTest, DroppingBeforeTheForwardIsLaunchedCounts) {
  Sequencer sequencer = World(2);
  Cast(&sequencer, WithTape(sequencer, 1, 0, 0));
  Actions actions;
  sequencer.DropTape(Rank(0), WorldKey(1, 0), false, Epoch(1), At(0), &actions);
  EXPECT_THAT(actions, IsEmpty());
  EXPECT_THAT(Launched(Cast(&sequencer, WithTape(sequencer, 2, 1, 0))), ElementsAre(1, 2));
  actions = Cast(&sequencer, Gradient(sequencer, 3, 1, WorldKey(1, 0), 0));
  ASSERT_THAT(Launched(actions), ElementsAre(3));
  EXPECT_THAT(actions[0].instances[0].absent, ElementsAre(GroupRank(0)));
}

TEST(SequencerGradientTest, AVoteStandsThoughItsEntryIsDroppedAfterwards) {
  Sequencer sequencer = World(3);
  const InstanceKey forward = Forward(&sequencer, 1, 0);
  Cast(&sequencer, Gradient(sequencer, 10, 0, forward, 0));
  Actions actions;
  sequencer.DropTape(Rank(0), forward, true, Epoch(1), At(0), &actions);
  Cast(&sequencer, Gradient(sequencer, 11, 1, forward, 0));
  actions = Cast(&sequencer, Gradient(sequencer, 12, 2, forward, 0));
  EXPECT_THAT(Launched(actions), ElementsAre(10, 11, 12));
  EXPECT_THAT(actions[0].instances[0].absent, IsEmpty());
}

TEST(SequencerGradientTest, ConsumedGivesZerosToFurtherRequestsOfTheEpoch) {
  Sequencer sequencer = World(2);
  const InstanceKey forward = Forward(&sequencer, 1, 0);
  Cast(&sequencer, Gradient(sequencer, 10, 0, forward, 0));
  Cast(&sequencer, Gradient(sequencer, 11, 1, forward, 0));
  Actions actions;
  sequencer.DropTape(Rank(0), forward, true, Epoch(1), At(0), &actions);
  actions = Cast(&sequencer, Gradient(sequencer, 12, 1, forward, 1));
  ASSERT_THAT(Launched(actions), ElementsAre(12));
  EXPECT_THAT(actions[0].instances[0].absent, ElementsAre(GroupRank(0)));
  EXPECT_EQ(ErrorOf(Refused(&sequencer, Gradient(sequencer, 13, 0, forward, 1))).reason,
            Reason::kTapeConsumed);
}

// Nobody says so: it follows from the run.
TEST(SequencerGradientTest, ARunThatTakesItsOwnGradientUsesTheEntryUp) {
  Sequencer sequencer = World(2);
  const InstanceKey forward = WorldKey(1, 0);
  Cast(&sequencer, WithTape(sequencer, 1, 1, 0));
  // Rank 1 asks twice, and waits for rank 0, which asks once.
  TestRun whole(2, sequencer.epoch());
  const int32_t slot = whole.Slot(kWorld, 2, {0}, {0});
  whole.AllReduce(slot, 0).wants_grad = true;
  whole.GradientHere(0, 0, slot, 0);
  Cast(&sequencer, Gradient(sequencer, 11, 1, forward, 0));
  Cast(&sequencer, Gradient(sequencer, 12, 1, forward, 1));
  const Actions actions = Cast(&sequencer, whole);
  EXPECT_THAT(Launched(actions), ElementsAre(1, 2, 11, 12));
  EXPECT_EQ(ErrorOf(Refused(&sequencer, Gradient(sequencer, 13, 0, forward, 1))).reason,
            Reason::kTapeConsumed);
  // A drop of what is gone does nothing; with the last entry the tape goes.
  Actions none;
  sequencer.DropTape(Rank(0), forward, true, Epoch(1), At(0), &none);
  EXPECT_EQ(sequencer.HeldRows(), 1u);
  sequencer.DropTape(Rank(1), forward, true, Epoch(1), At(0), &none);
  EXPECT_EQ(sequencer.HeldRows(), 0u);
  EXPECT_THAT(none, IsEmpty());
}

// Of one instance, or of gradients of its gradients.
TEST(SequencerGradientTest, ManyGetZerosInSlices) {
  constexpr int32_t kRuns = 20;
  constexpr int32_t kGradients = 1000;  // of a run
  for (const bool second : {false, true}) {
    SCOPED_TRACE(second);
    Sequencer sequencer = World(2);
    const InstanceKey forward = Forward(&sequencer, 1, 0);
    std::vector<int64_t> all;
    for (int32_t i = 0; i < kRuns; ++i) {
      TestRun gradients(10 + i, Epoch(1));
      const int32_t slot = gradients.Slot(kWorld, 2, {0}, {0});
      gradients.GradientOf(forward, second ? i : i * kGradients, slot, 0).wants_grad = true;
      for (int32_t request = 0; request < kGradients; ++request) {
        if (second) gradients.GradientHere(0, request, slot, 0);
        if (!second && request > 0) {
          gradients.GradientOf(forward, i * kGradients + request, slot, 0);
        }
      }
      EXPECT_THAT(Cast(&sequencer, gradients), IsEmpty());
      all.push_back(10 + i);
    }
    Slices slices;
    std::vector<int64_t> launched = Launched(slices.InOne([&](Actions* actions) {
      sequencer.DropTape(Rank(1), forward, false, Epoch(1), At(0), actions);
    }));
    EXPECT_LT(launched.size(), all.size());
    // Late by now: that would name rank 1, which has nothing to vote for.
    const Actions rest = slices.GoOn(&sequencer, At(100));
    EXPECT_EQ(sequencer.epoch(), Epoch(1));
    for (const int64_t run : Launched(rest)) launched.push_back(run);
    EXPECT_THAT(launched, ::testing::UnorderedElementsAreArray(all));
    EXPECT_LE(slices.largest, kMaxSliceWork);
    for (const SequencerAction& action : rest) {
      for (const LaunchedInstance& instance : action.instances) {
        EXPECT_THAT(instance.absent, ElementsAre(GroupRank(1)));
      }
    }
  }
}

// Gradients of so many instances wait for it.
TEST(SequencerGradientTest, WhoLeavesGivesZerosInSlices) {
  constexpr int64_t kRuns = 20;
  constexpr int64_t kCalls = 1000;  // of a run
  Sequencer sequencer = World(2);
  for (int64_t run = 0; run < kRuns; ++run) {
    for (int32_t rank = 0; rank < 2; ++rank) {
      TestRun forward(1 + 2 * run + rank, Epoch(1));
      const int32_t slot = forward.Slot(kWorld, 2, {rank}, {run * kCalls});
      for (int64_t call = 0; call < kCalls; ++call) forward.AllReduce(slot, rank).wants_grad = true;
      Cast(&sequencer, forward);
    }
  }
  std::vector<int64_t> all;
  for (int64_t run = 0; run < kRuns; ++run) {
    TestRun gradients(100 + run, Epoch(1));
    const int32_t slot = gradients.Slot(kWorld, 2, {0}, {kRuns * kCalls});
    for (int64_t call = 0; call < kCalls; ++call) {
      gradients.GradientOf(WorldKey(1, run * kCalls + call), 0, slot, 0);
    }
    EXPECT_THAT(Cast(&sequencer, gradients), IsEmpty());
    all.push_back(100 + run);
  }
  Slices slices;
  std::vector<int64_t> launched =
      Launched(slices.InOne([&](Actions* actions) { sequencer.Left(Rank(1), At(0), actions); }));
  EXPECT_LT(launched.size(), all.size());
  // What comes meanwhile knows that it has left.
  TestRun more(200, Epoch(1));
  more.GradientOf(WorldKey(1, 0), 1, more.Slot(kWorld, 2, {0}, {kRuns * kCalls}), 0);
  for (const int64_t run : Launched(Cast(&sequencer, more))) launched.push_back(run);
  all.push_back(200);
  for (const int64_t run : Launched(slices.GoOn(&sequencer, At(100)))) launched.push_back(run);
  EXPECT_THAT(launched, ::testing::UnorderedElementsAreArray(all));
  EXPECT_LE(slices.largest, kMaxSliceWork);
  EXPECT_EQ(sequencer.epoch(), Epoch(1));
}

// And the gradient's own, of which it takes another.
TEST(SequencerGradientTest, ARunThatTakesAllOrdersItselfLeavesNoTape) {
  Sequencer sequencer = World(1);
  TestRun run(1, sequencer.epoch());
  const int32_t slot = run.Slot(kWorld, 1, {0}, {0});
  run.AllReduce(slot, 0).wants_grad = true;
  run.GradientHere(0, 0, slot, 0).wants_grad = true;
  run.GradientHere(1, 0, slot, 0);
  EXPECT_THAT(Launched(Cast(&sequencer, run)), ElementsAre(1));
  EXPECT_EQ(sequencer.HeldRows(), 0u);
}

TEST(SequencerGradientTest, ConsumedInAFailedEpochCannotBeHadAgain) {
  for (const bool drop_late : {false, true}) {  // the drop reaches the daemon before or after
    SCOPED_TRACE(drop_late);
    Sequencer sequencer = World(2);
    const InstanceKey forward = Forward(&sequencer, 1, 0);
    Cast(&sequencer, Gradient(sequencer, 10, 0, forward, 0));
    Actions actions;
    if (!drop_late) sequencer.DropTape(Rank(0), forward, true, Epoch(1), At(0), &actions);
    sequencer.Cancel(RunHandle(10), Rank(0), At(0), &actions);
    actions.clear();
    if (drop_late) {
      EXPECT_THAT(Cast(&sequencer, Gradient(sequencer, 11, 1, forward, 1)), IsEmpty());
      sequencer.DropTape(Rank(0), forward, true, Epoch(1), At(0), &actions);
    } else {
      actions = Cast(&sequencer, Gradient(sequencer, 11, 1, forward, 1));
    }
    EXPECT_THAT(Failed(actions), ElementsAre(11));
    const Error error = EndedBy(actions);
    EXPECT_EQ(error.code, absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(error.reason, Reason::kTapeConsumed);
    EXPECT_EQ(error.culprit.rank, 0);
  }
}

// Rank 0 has used its entry up for a gradient in step 0, and the others ask in step 1: its request
// is passed and fails alone, so nobody can have its share.
TEST(SequencerGradientTest, ConsumedForWhatHasFailedAloneCannotBeHadAgain) {
  for (const int32_t size : {2, 3}) {
    for (const bool first : {true, false}) {  // whether rank 0 is
      SCOPED_TRACE(absl::StrCat(size, first ? " first" : ""));
      Sequencer sequencer = World(size);
      const InstanceKey forward = Forward(&sequencer, 1, 0);
      const TestRun own = Gradient(sequencer, 10, 0, forward, 0);
      Actions actions;
      std::vector<int64_t> failed;
      const auto note = [&] {
        EXPECT_THAT(Launched(actions), IsEmpty());
        for (const int64_t run : Failed(actions)) failed.push_back(run);
      };
      if (first) {
        actions = Cast(&sequencer, own);
        note();
        sequencer.DropTape(Rank(0), forward, true, Epoch(1), At(0), &actions);
        note();
      }
      for (int32_t rank = 1; rank < size; ++rank) {
        actions = Cast(&sequencer, Gradient(sequencer, 10 + rank, rank, forward, 0, /*step=*/1));
        note();
      }
      if (!first) {
        actions = Cast(&sequencer, own);
        note();
        EXPECT_THAT(failed, ElementsAre(10));
        actions.clear();
        sequencer.DropTape(Rank(0), forward, true, Epoch(1), At(0), &actions);
        note();
      }
      std::sort(failed.begin(), failed.end());
      EXPECT_THAT(failed,
                  size == 2 ? std::vector<int64_t>({10, 11}) : std::vector<int64_t>({10, 11, 12}));
      // Rank 0's may have failed in the same event.
      actions.erase(std::remove_if(actions.begin(), actions.end(),
                                   [](const SequencerAction& action) {
                                     return action.error != nullptr && action.error->alone;
                                   }),
                    actions.end());
      const Error error = EndedBy(actions);
      EXPECT_EQ(error.reason, Reason::kTapeConsumed);
      EXPECT_EQ(error.culprit.rank, 0);
      EXPECT_THAT(error.message, HasSubstr("for a gradient that has failed"));
    }
  }
}

// As where its client has entered the next epoch before it says so.
TEST(SequencerGradientTest, WhatWasAskedForInAFailedEpochIsOfThat) {
  Sequencer sequencer = World(2);
  const InstanceKey forward = Forward(&sequencer, 1, 0);
  Cast(&sequencer, Gradient(sequencer, 10, 0, forward, 0));
  Actions actions;
  sequencer.Cancel(RunHandle(10), Rank(0), At(0), &actions);
  ASSERT_EQ(sequencer.epoch(), Epoch(2));
  actions.clear();
  sequencer.DropTape(Rank(0), forward, true, Epoch(2), At(0), &actions);
  actions = Cast(&sequencer, Gradient(sequencer, 11, 1, forward, 1));
  EXPECT_THAT(Failed(actions), ElementsAre(11));
  EXPECT_EQ(EndedBy(actions).reason, Reason::kTapeConsumed);
}

// The next all_reduce of a world of two. Rank 1's part, at rank1.cc:10, comes from where it says.
InstanceKey ForwardFrom(Sequencer* sequencer, bool collective, bool leaf, bool tape = true) {
  Cast(sequencer, WithTape(*sequencer, 1, 0, 0));
  TestRun run(2, sequencer->epoch());
  Participation& part = run.AllReduce(run.Slot(kWorld, 2, {1}, {0}), 1);
  part.wants_grad = tape;
  part.leads_to_collective = collective;
  part.leads_to_leaf = leaf;
  EXPECT_THAT(Launched(Cast(sequencer, run)), ElementsAre(1, 2));
  return WorldKey(sequencer->epoch().value(), 0);
}

// Rank 1 has given up what led to another collective: whatever rank 0 gets would be too small.
TEST(SequencerGradientTest, WhatLedToACollectiveCannotBeHadWithoutTheRankThatGaveItUp) {
  const auto expect_lost = [](const Actions& actions, const char* what) {
    EXPECT_THAT(Failed(actions), ElementsAre(10));
    const Error error = EndedBy(actions);
    EXPECT_EQ(error.code, absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(error.reason, Reason::kGradientLost);
    EXPECT_EQ(error.culprit.rank, 1);
    EXPECT_EQ(error.culprit.pid, 101);
    EXPECT_THAT(error.message,
                AllOf(HasSubstr("rank 1"), HasSubstr("rank1.cc:10"), HasSubstr(what)));
  };
  for (const bool leaf : {false, true}) {  // makes no difference
    {
      Sequencer sequencer = World(2);
      const InstanceKey forward = ForwardFrom(&sequencer, true, leaf);
      Actions actions;
      sequencer.DropTape(Rank(1), forward, false, Epoch(1), At(0), &actions);
      EXPECT_THAT(actions, IsEmpty());
      expect_lost(Cast(&sequencer, Gradient(sequencer, 10, 0, forward, 0)), "dropped");
      // The next epoch is open, and as usable.
      EXPECT_EQ(sequencer.epoch(), Epoch(2));
    }
    {
      Sequencer sequencer = World(2);
      const InstanceKey forward = ForwardFrom(&sequencer, true, leaf);
      EXPECT_THAT(Cast(&sequencer, Gradient(sequencer, 10, 0, forward, 0)), IsEmpty());
      Actions actions;
      sequencer.DropTape(Rank(1), forward, false, Epoch(1), At(0), &actions);
      expect_lost(actions, "dropped");
    }
    {
      Sequencer sequencer = World(2);
      const InstanceKey forward = ForwardFrom(&sequencer, true, leaf, /*tape=*/false);
      expect_lost(Cast(&sequencer, Gradient(sequencer, 10, 0, forward, 0)), "not recorded");
    }
    {
      Sequencer sequencer = World(2);
      const InstanceKey forward = ForwardFrom(&sequencer, true, leaf);
      Cast(&sequencer, Gradient(sequencer, 20, 0, forward, 0));
      EXPECT_THAT(Launched(Cast(&sequencer, Gradient(sequencer, 21, 1, forward, 0))),
                  ElementsAre(20, 21));
      Actions actions;
      sequencer.DropTape(Rank(1), forward, true, Epoch(1), At(0), &actions);
      EXPECT_THAT(actions, IsEmpty());
      expect_lost(Cast(&sequencer, Gradient(sequencer, 10, 0, forward, 1)), "used up");
    }
    {
      Sequencer sequencer = World(2);
      const InstanceKey forward = ForwardFrom(&sequencer, true, leaf);
      Cast(&sequencer, Gradient(sequencer, 10, 0, forward, 0));
      Actions actions;
      sequencer.Left(Rank(1), At(0), &actions);
      expect_lost(actions, "dropped");
    }
  }
}

// Its own vote of the same run may still ask.
TEST(SequencerGradientTest, WhoAsksInTheRunThatKeepsNoTapeHasGivenUpTheRestAlone) {
  Sequencer sequencer = World(2);
  Cast(&sequencer, WithTape(sequencer, 1, 0, 0));
  Cast(&sequencer, Gradient(sequencer, 2, 0, WorldKey(1, 0), 0));
  TestRun whole(3, Epoch(1));
  const int32_t slot = whole.Slot(kWorld, 2, {1}, {0});
  Participation& forward = whole.AllReduce(slot, 1);
  forward.leads_to_collective = true;
  whole.GradientHere(0, 0, slot, 1);
  EXPECT_THAT(Launched(Cast(&sequencer, whole)), ElementsAre(1, 3, 2));
  EXPECT_EQ(EndedBy(Cast(&sequencer, Gradient(sequencer, 4, 0, WorldKey(1, 0), 1))).reason,
            Reason::kGradientLost);
}

// Only the rank's own number is smaller: it is told, and the others go on.
TEST(SequencerGradientTest, WhatLedToALeafIsShown) {
  for (const bool late : {false, true}) {
    Sequencer sequencer = World(2);
    const InstanceKey forward = ForwardFrom(&sequencer, false, true);
    Actions actions;
    if (late) Cast(&sequencer, Gradient(sequencer, 10, 0, forward, 0));
    sequencer.DropTape(Rank(1), forward, false, Epoch(1), At(0), &actions);
    if (!late) actions = Cast(&sequencer, Gradient(sequencer, 10, 0, forward, 0));
    ASSERT_THAT(Launched(actions), ElementsAre(10));
    const LaunchedInstance& instance = actions[0].instances[0];
    EXPECT_THAT(instance.absent, ElementsAre(GroupRank(1)));
    ASSERT_THAT(instance.given_up, SizeIs(1));
    EXPECT_EQ(instance.given_up[0].rank, Rank(1));
    EXPECT_EQ(instance.given_up[0].what->source, "rank1.cc:10");
    EXPECT_EQ(instance.given_up[0].what->what, "all_reduce SUM f32[4]");
  }
}

TEST(SequencerGradientTest, AConstantIsMissedByNobody) {
  Sequencer sequencer = World(2);
  const InstanceKey forward = ForwardFrom(&sequencer, false, false);
  Actions actions;
  sequencer.DropTape(Rank(1), forward, false, Epoch(1), At(0), &actions);
  // Nor is what it would have been part of: the gradient's own gradient.
  TestRun recorded(11, Epoch(1));
  recorded.GradientOf(forward, 0, recorded.Slot(kWorld, 2, {0}, {0}), 0).wants_grad = true;
  actions = Cast(&sequencer, recorded);
  ASSERT_THAT(Launched(actions), ElementsAre(11));
  EXPECT_THAT(actions[0].instances[0].given_up, IsEmpty());
  actions = Cast(&sequencer, Gradient(sequencer, 12, 0, forward.Gradient({0, 0}), 0));
  ASSERT_THAT(Launched(actions), ElementsAre(12));
  EXPECT_THAT(actions[0].instances[0].given_up, IsEmpty());
}

// Rank 1 took the gradient without keeping an entry for the next order.
TEST(SequencerGradientTest, AGradientTakenWithoutCreateGraphIsGivenUp) {
  Sequencer sequencer = World(2);
  const InstanceKey forward = ForwardFrom(&sequencer, false, true);
  TestRun recorded(10, Epoch(1));
  recorded.GradientOf(forward, 0, recorded.Slot(kWorld, 2, {0}, {0}), 0).wants_grad = true;
  Cast(&sequencer, recorded);
  TestRun other(11, Epoch(1));
  Participation& part = other.GradientOf(forward, 0, other.Slot(kWorld, 2, {1}, {0}), 1);
  part.leads_to_collective = part.leads_to_leaf = true;
  EXPECT_THAT(Launched(Cast(&sequencer, other)), ElementsAre(10, 11));
  const Error error =
      EndedBy(Cast(&sequencer, Gradient(sequencer, 12, 0, forward.Gradient({0, 0}), 0)));
  EXPECT_EQ(error.reason, Reason::kGradientLost);
  EXPECT_EQ(error.culprit.rank, 1);
  EXPECT_THAT(error.message, HasSubstr("create_graph"));
}

TEST(SequencerGradientTest, WhoStillHoldsItsTapeMayAskAgainInTheNextEpoch) {
  Sequencer sequencer = World(2);
  const InstanceKey forward = Forward(&sequencer, 1, 0);
  Cast(&sequencer, Gradient(sequencer, 10, 0, forward, 0));
  Actions actions;
  sequencer.Cancel(RunHandle(10), Rank(0), At(0), &actions);
  Cast(&sequencer, Gradient(sequencer, 11, 0, forward, 1));
  // Rank 1 has not heard: its first request is one that rank 0 has passed.
  const Actions passed = Cast(&sequencer, Gradient(sequencer, 12, 1, forward, 0));
  EXPECT_THAT(Failed(passed), ElementsAre(12));
  EXPECT_EQ(passed[0].open_epoch, Epoch());
  EXPECT_THAT(Launched(Cast(&sequencer, Gradient(sequencer, 13, 1, forward, 1))),
              ElementsAre(11, 13));
}

TEST(SequencerGradientTest, AnInstanceThatWasNeverLaunchedHasNoGradient) {
  Sequencer sequencer = World(2);
  Cast(&sequencer, WithTape(sequencer, 1, 0, 0));
  Actions actions;
  sequencer.Cancel(RunHandle(1), Rank(0), At(0), &actions);
  EXPECT_EQ(Refused(&sequencer, Gradient(sequencer, 2, 0, WorldKey(1, 0), 0)).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(SequencerGradientTest, AGradientIsNeverLaunchedBeforeItsForward) {
  Sequencer sequencer = World(2);
  TestRun blocked = WithTape(sequencer, 1, 0, 0);
  blocked.BlockExternally();
  Cast(&sequencer, blocked);
  Cast(&sequencer, WithTape(sequencer, 2, 1, 0));
  Cast(&sequencer, Gradient(sequencer, 3, 0, WorldKey(1, 0), 0));
  EXPECT_THAT(Cast(&sequencer, Gradient(sequencer, 4, 1, WorldKey(1, 0), 0)), IsEmpty());
  Actions actions;
  sequencer.Unblock(RunHandle(1), At(0), &actions);
  EXPECT_THAT(Launched(actions), ElementsAre(1, 2, 3, 4));
}

TEST(SequencerGradientTest, ForwardThatNeedsItsOwnGradientIsACircle) {
  // Rank 0 feeds the gradient of X into X: X waits for its producer, that for X.
  Sequencer sequencer = World(2);
  Cast(&sequencer, WithTape(sequencer, 1, 0, 0));
  Cast(&sequencer, Gradient(sequencer, 2, 0, WorldKey(1, 0), 0));
  // Rank 1's forward run consumes a result of rank 0's gradient run (one session holds both).
  TestRun forward = WithTape(sequencer, 3, 1, 0);
  forward.producers() = {RunHandle(2)};
  EXPECT_THAT(Cast(&sequencer, forward), IsEmpty());
  EXPECT_EQ(EndedBy(Cast(&sequencer, Gradient(sequencer, 4, 1, WorldKey(1, 0), 0))).reason,
            Reason::kOrderCycle);
}

TEST(SequencerGradientTest, ForwardAndGradientInOneRun) {
  // Rank 0 compiled forward and backward together; rank 1 has the forward alone.
  Sequencer sequencer = World(2);
  TestRun whole(1, Epoch(1));
  const int32_t slot = whole.Slot(kWorld, 2, {0}, {0});
  whole.AllReduce(slot, 0);
  whole.GradientHere(0, 0, slot, 0);
  EXPECT_THAT(Cast(&sequencer, whole), IsEmpty());
  const Actions actions = Cast(&sequencer, Simple(sequencer, 2, 1, 0));
  ASSERT_THAT(actions, SizeIs(1));
  ASSERT_THAT(actions[0].instances, SizeIs(2));
  EXPECT_EQ(actions[0].instances[0].key, WorldKey(1, 0));
  EXPECT_EQ(actions[0].instances[1].key, WorldKey(1, 0).Gradient({0, 0}));
  EXPECT_THAT(actions[0].instances[1].absent, ElementsAre(GroupRank(1)));
}

TEST(SequencerGradientTest, CompiledOnBothSidesMeets) {
  Sequencer sequencer = World(2);
  for (int32_t member = 0; member < 2; ++member) {
    TestRun whole(member, Epoch(1));
    const int32_t slot = whole.Slot(kWorld, 2, {member}, {0});
    whole.AllReduce(slot, member);
    whole.GradientHere(0, 0, slot, member);
    whole.GradientHere(1, 0, slot, member);  // and the gradient of the gradient
    const Actions actions = Cast(&sequencer, whole);
    if (member == 0) {
      EXPECT_THAT(actions, IsEmpty());
      continue;
    }
    ASSERT_THAT(Launched(actions), ElementsAre(0, 1));
    for (const LaunchedInstance& instance : actions[0].instances) {
      EXPECT_THAT(instance.absent, IsEmpty());
      EXPECT_THAT(instance.parts, SizeIs(2));
    }
  }
}

TEST(SequencerGradientTest, ALateForwardVoteWithoutTapeCompletesAGradient) {
  // Rank 0 is a whole step ahead; rank 1 then shows that it wants no gradient.
  Sequencer sequencer = World(2);
  Cast(&sequencer, WithTape(sequencer, 1, 0, 0));
  EXPECT_THAT(Cast(&sequencer, Gradient(sequencer, 2, 0, WorldKey(1, 0), 0)), IsEmpty());
  const Actions actions = Cast(&sequencer, Simple(sequencer, 3, 1, 0));
  EXPECT_THAT(Launched(actions), ElementsAre(1, 3, 2));
  EXPECT_THAT(actions[1].instances[0].absent, ElementsAre(GroupRank(1)));
}

TEST(SequencerGradientTest, LeavingAbandonsAndDyingDoesNot) {
  Sequencer sequencer = World(2);
  const InstanceKey forward = Forward(&sequencer, 1, 0);
  Cast(&sequencer, Gradient(sequencer, 10, 0, forward, 0));
  Sequencer other = sequencer;
  Actions actions;
  sequencer.Left(Rank(1), At(0), &actions);
  ASSERT_THAT(Launched(actions), ElementsAre(10));
  EXPECT_THAT(actions[0].instances[0].absent, ElementsAre(GroupRank(1)));
  actions.clear();
  other.Dead(Rank(1), "its process ended", At(0), &actions);
  EXPECT_THAT(Failed(actions), ElementsAre(10));
}

// --- Positions ----------------------------------------------------------------------------------

// Runs that fail here have failed alone: no epoch has ended, and what uses their results is told.
std::vector<int64_t> FailedAlone(const Actions& actions) {
  for (const SequencerAction& action : actions) {
    if (action.kind != Kind::kFail) continue;
    EXPECT_EQ(action.open_epoch, Epoch());
    EXPECT_TRUE(action.error->alone);
    EXPECT_EQ(action.error->reason, Reason::kMismatch);
    EXPECT_FALSE(action.dropped.empty());
  }
  return Failed(actions);
}

TestRun InStep(const Sequencer& sequencer, int64_t run, int32_t member, int64_t step,
               int64_t call) {
  return OneAllReduce(run, sequencer.epoch(), kWorld, sequencer.size(), member, call, step);
}

TEST(SequencerPositionTest, CallsOfDifferentPositionsNeverMeet) {
  Sequencer sequencer = World(3);
  EXPECT_THAT(Cast(&sequencer, Simple(sequencer, 1, 0, 1)), IsEmpty());  // ahead by one: it waits
  EXPECT_THAT(Cast(&sequencer, Simple(sequencer, 2, 1, 1)), IsEmpty());
  // Rank 2 is behind: its call fails at once, and it comes into line.
  const Actions behind = Cast(&sequencer, Simple(sequencer, 3, 2, 0));
  EXPECT_THAT(FailedAlone(behind), ElementsAre(3));
  EXPECT_THAT(behind[0].error->message, AllOf(HasSubstr("call 0"), HasSubstr("rank2.cc:10"),
                                              HasSubstr("is at call 2"), HasSubstr("rank0.cc:10")));
  EXPECT_THAT(Launched(Cast(&sequencer, Simple(sequencer, 4, 2, 1))), ElementsAre(1, 2, 4));
  EXPECT_EQ(sequencer.epoch(), Epoch(1));
}

TEST(SequencerPositionTest, WhoIsPassedFailsAtOnceWithWhatWaitsForIt) {
  Sequencer sequencer = World(2);
  const GroupId pair = AddGroup(&sequencer, {0, 1});
  Cast(&sequencer, WithTape(sequencer, 1, 0, 0));
  Cast(&sequencer, Gradient(sequencer, 2, 0, WorldKey(1, 0), 0));
  TestRun uses(3, Epoch(1));
  uses.AllReduce(uses.Slot(pair, 2, {0}, {0}), 0);
  uses.producers() = {RunHandle(1)};
  Cast(&sequencer, uses);
  Cast(&sequencer, OneAllReduce(4, Epoch(1), pair, 2, 0, 1));  // has nothing to do with it
  // Rank 1 leaves call 0 out.
  const Actions passed = Cast(&sequencer, Simple(sequencer, 5, 1, 1));
  EXPECT_THAT(FailedAlone(passed), ElementsAre(1, 2, 3));
  EXPECT_EQ(passed[0].dropped, std::vector<InstanceKey>{WorldKey(1, 0)});
  EXPECT_TRUE(sequencer.IsPending(RunHandle(4)));
  EXPECT_TRUE(sequencer.IsPending(RunHandle(5)));
  EXPECT_THAT(Launched(Cast(&sequencer, Simple(sequencer, 6, 0, 1))), ElementsAre(5, 6));
  // The pair's call 0 was rank 0's alone: rank 1's fails, the next one meets.
  EXPECT_THAT(FailedAlone(Cast(&sequencer, OneAllReduce(7, Epoch(1), pair, 2, 1, 0))),
              ElementsAre(7));
  EXPECT_THAT(Launched(Cast(&sequencer, OneAllReduce(8, Epoch(1), pair, 2, 1, 1))),
              ElementsAre(4, 8));
  EXPECT_EQ(sequencer.epoch(), Epoch(1));
}

TEST(SequencerPositionTest, WhatWaitsForSeveralThatArePassedFailsOnce) {
  Sequencer sequencer = World(2);
  const size_t rows = sequencer.StateSize();
  Cast(&sequencer, Simple(sequencer, 1, 0, 0));
  Cast(&sequencer, Simple(sequencer, 2, 0, 1));
  TestRun both = Simple(sequencer, 3, 0, 2);
  both.producers() = {RunHandle(1), RunHandle(2)};
  Cast(&sequencer, both);
  TestRun after = Simple(sequencer, 4, 0, 3);
  after.producers() = {RunHandle(3)};
  Cast(&sequencer, after);
  EXPECT_THAT(FailedAlone(Cast(&sequencer, Simple(sequencer, 5, 1, 4))), ElementsAre(1, 3, 4, 2));
  EXPECT_THAT(Launched(Cast(&sequencer, Simple(sequencer, 6, 0, 4))), ElementsAre(5, 6));
  Actions actions;
  sequencer.Finished(Ticket(1), absl::OkStatus(), At(0), &actions);
  EXPECT_EQ(sequencer.StateSize(), rows);
}

TEST(SequencerPositionTest, WhoBeginsALaterStepHasPassedAllOfTheOneBefore) {
  Sequencer sequencer = World(2);
  const GroupId pair = AddGroup(&sequencer, {0, 1});
  Cast(&sequencer, InStep(sequencer, 1, 0, 1, 0));
  Cast(&sequencer, OneAllReduce(2, Epoch(1), pair, 2, 0, 0, 1));
  Cast(&sequencer, InStep(sequencer, 3, 0, 2, 0));
  // Rank 1 leaves step 1 after its first call; it never called the pair there.
  EXPECT_THAT(Launched(Cast(&sequencer, InStep(sequencer, 4, 1, 1, 0))), ElementsAre(1, 4));
  const Actions next = Cast(&sequencer, InStep(sequencer, 5, 1, 2, 0));
  EXPECT_THAT(FailedAlone(next), ElementsAre(2));
  EXPECT_THAT(Launched(next), ElementsAre(3, 5));
  // A step does not go back.
  EXPECT_EQ(Refused(&sequencer, InStep(sequencer, 6, 1, 1, 1)).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(SequencerPositionTest, AVoteForAnEpochThatHasEndedCounts) {
  Sequencer sequencer = World(2);
  Actions actions;
  sequencer.Abort(Error(), At(0), &actions);
  // Rank 0 has heard and goes on with its call 1; rank 1 has not and makes its call 0.
  Cast(&sequencer, Simple(sequencer, 1, 0, 0));
  actions = Cast(&sequencer, OneAllReduce(2, Epoch(1), kWorld, 2, 1, 0));
  EXPECT_THAT(Failed(actions), ElementsAre(1, 2));
  EXPECT_EQ(actions[0].open_epoch, Epoch());   // passed by it
  EXPECT_EQ(actions[1].open_epoch, Epoch(2));  // late
  Cast(&sequencer, Simple(sequencer, 3, 0, 1));
  EXPECT_THAT(Launched(Cast(&sequencer, Simple(sequencer, 4, 1, 1))), ElementsAre(3, 4));
}

TEST(SequencerPositionTest, OneMistakeOfAllRanksCostsOneEpoch) {
  Sequencer sequencer = World(3);
  Error why;
  why.code = absl::StatusCode::kInvalidArgument;
  why.message = "one value short";
  Actions actions;
  sequencer.Refuse({RefusedAt(0, 0, 1)}, Epoch(1), why, At(0), &actions);
  EXPECT_THAT(EndedBy(actions).message, HasSubstr("rank 0"));
  actions.clear();
  sequencer.Refuse({RefusedAt(1, 0, 1)}, Epoch(1), why, At(0), &actions);  // has not heard
  sequencer.Refuse({RefusedAt(2, 0, 1)}, Epoch(2), why, At(0), &actions);  // has heard
  EXPECT_THAT(actions, IsEmpty());
  EXPECT_EQ(sequencer.epoch(), Epoch(2));
  for (int32_t rank = 0; rank < 3; ++rank) {
    actions = Cast(&sequencer, Simple(sequencer, 1 + rank, rank, 1));
  }
  EXPECT_THAT(Launched(actions), ElementsAre(1, 2, 3));
}

TEST(SequencerPositionTest, ARefusalBehindOthersFailsAloneWhoStillWaits) {
  Sequencer sequencer = World(3);
  Cast(&sequencer, Simple(sequencer, 1, 0, 0));  // waits
  Cast(&sequencer, Simple(sequencer, 2, 1, 1));  // has left call 0 out: run 1 fails
  Actions actions;
  sequencer.Refuse({RefusedAt(2, 0, 1)}, Epoch(1), Error(), At(0), &actions);
  EXPECT_THAT(actions, IsEmpty());
  EXPECT_EQ(sequencer.epoch(), Epoch(1));
  EXPECT_TRUE(sequencer.IsPending(RunHandle(2)));
}

TEST(SequencerPositionTest, WhoIsOutOfLineTakesPartInNothingUntilItsNextStep) {
  Sequencer sequencer = World(2);
  const GroupId pair = AddGroup(&sequencer, {0, 1});
  RefusedMember lost;
  lost.rank = Rank(1);
  lost.rest_of_step = true;
  Error why;
  why.message = "batch.cc:7: a shape";
  Actions actions;
  sequencer.Refuse({lost}, Epoch(1), why, At(0), &actions);
  EXPECT_EQ(sequencer.epoch(), Epoch(2));
  const Actions waits = Cast(&sequencer, OneAllReduce(1, Epoch(2), pair, 2, 0, 0));
  EXPECT_THAT(FailedAlone(waits), ElementsAre(1));
  EXPECT_THAT(waits[0].error->message, HasSubstr("batch.cc:7"));
  Cast(&sequencer, OneAllReduce(2, Epoch(2), pair, 2, 0, 0, 1));
  EXPECT_THAT(Launched(Cast(&sequencer, OneAllReduce(3, Epoch(2), pair, 2, 1, 0, 1))),
              ElementsAre(2, 3));
}

TEST(SequencerPositionTest, APartThatSomebodyDoesNotHaveFailsTheCallForAll) {
  for (const bool longer_first : {false, true}) {
    SCOPED_TRACE(longer_first);
    Sequencer sequencer = World(2);
    const auto list = [](int64_t run, int32_t member, int32_t parts) {
      TestRun result(run, Epoch(1));
      const int32_t slot = result.Slot(kWorld, 2, {member}, {0});
      for (int32_t part = 0; part < parts; ++part) result.AllReduce(slot, member).part = part;
      return result;
    };
    EXPECT_THAT(Cast(&sequencer, list(1, 0, longer_first ? 4 : 3)), IsEmpty());
    EXPECT_THAT(FailedAlone(Cast(&sequencer, list(2, 1, longer_first ? 3 : 4))), ElementsAre(1, 2));
    // One call, whatever was in its list.
    Cast(&sequencer, Simple(sequencer, 3, 0, 1));
    EXPECT_THAT(Launched(Cast(&sequencer, Simple(sequencer, 4, 1, 1))), ElementsAre(3, 4));
  }
}

TEST(SequencerPositionTest, ACallMayGoOnInLaterRuns) {
  Sequencer sequencer = World(2);
  const auto chunk = [](int64_t run, int32_t member, int32_t part, bool last) {
    TestRun result = OneAllReduce(run, Epoch(1), kWorld, 2, member, 0);
    result.vote().groups[0].base[0].part = part;
    result.vote().call_goes_on = !last;
    return result;
  };
  Cast(&sequencer, chunk(1, 0, 0, false));
  Cast(&sequencer, chunk(2, 0, 1, false));
  EXPECT_THAT(Launched(Cast(&sequencer, chunk(3, 1, 0, false))), ElementsAre(1, 3));
  // Rank 1 stops there: its next call passes the parts that it has left out.
  const Actions next = Cast(&sequencer, Simple(sequencer, 4, 1, 1));
  EXPECT_THAT(FailedAlone(next), ElementsAre(2));
  EXPECT_THAT(Launched(Cast(&sequencer, Simple(sequencer, 5, 0, 1))), ElementsAre(4, 5));
}

// Two losses: where rank 1 could not take the first gradient, its second one must not meet it.
// What rank 1 does costs the same however much of rank 0 waits for it.
TEST(SequencerPositionTest, AMoveLooksOnlyAtWhatItMayHavePassed) {
  constexpr int64_t kRuns = 8;
  constexpr int64_t kCalls = 512;  // of a run
  Sequencer sequencer = World(3, /*rows_per_event=*/256, /*newest_pending=*/4);
  const GroupId other = AddGroup(&sequencer, {0, 1});
  for (int64_t run = 0; run < kRuns; ++run) {
    TestRun ahead(1 + run, Epoch(1));
    const int32_t slot = ahead.Slot(kWorld, 3, {0}, {run * kCalls});
    for (int64_t call = 0; call < kCalls; ++call) ahead.AllReduce(slot, 0).wants_grad = true;
    EXPECT_THAT(Cast(&sequencer, ahead), IsEmpty());
  }
  TestRun gradients(20, Epoch(1));
  const int32_t slot = gradients.Slot(kWorld, 3, {0}, {kRuns * kCalls});
  for (int64_t call = 0; call < kCalls; ++call) {
    gradients.GradientOf(WorldKey(1, call), 0, slot, 0);
  }
  // One call is in two parts.
  gradients.AllReduce(slot, 0);
  gradients.AllReduce(slot, 0).part = 1;
  EXPECT_THAT(Cast(&sequencer, gradients), IsEmpty());
  const auto work_of = [](const std::function<Actions()>& event) {
    const WorkSlice slice;
    EXPECT_THAT(event(), IsEmpty());
    return SliceWork();
  };
  int64_t at = 0;
  for (const int64_t calls_left_out : {0, 1, 2}) {
    at += calls_left_out;
    EXPECT_LT(
        work_of([&] { return Cast(&sequencer, OneAllReduce(30 + at, Epoch(1), other, 2, 1, at)); }),
        16);
    ++at;
  }
  EXPECT_LT(work_of([&] { return Cast(&sequencer, Send(40, Epoch(1), 1, 0)); }), 16);
  Error why(Reason::kBadType, "no");
  why.alone = true;
  Actions actions;
  RefusedMember member = RefusedAt(1, at, at + 5);
  member.calls[0].group = other;
  member.drops_tapes = true;
  EXPECT_LT(work_of([&] {
              sequencer.Refuse({member}, Epoch(1), why, At(0), &actions);
              return actions;
            }),
            16);
  // A call of the world is left out: of all that waits, that one fails, with its run.
  const Actions passed = Cast(&sequencer, Simple(sequencer, 50, 1, 1));
  EXPECT_THAT(FailedAlone(passed), ElementsAre(1, 20, 50));
  member.calls.assign(200, RefusedAt(1, 2, kCalls + 88).calls[0]);
  const WorkSlice slice;
  sequencer.Refuse({member}, Epoch(1), why, At(0), &actions);
  EXPECT_THAT(FailedAlone(actions), ElementsAre(2));
  EXPECT_LT(SliceWork(), 4000);  // 200 times 88 calls would be 4400 more
}

// Whose groups take turns: in each the rank that goes on has another seat, or none.
TEST(SequencerPositionTest, ToLookForARankInEachGroupIsCounted) {
  constexpr int64_t kCalls = 500;  // of each group
  Sequencer sequencer = World(3);
  const GroupId groups[] = {AddGroup(&sequencer, {0, 2}), AddGroup(&sequencer, {2, 1, 0})};
  const GroupId own = AddGroup(&sequencer, {1});
  TestRun ahead(1, Epoch(1));
  const int32_t slots[] = {ahead.Slot(groups[0], 2, {0}, {0}), ahead.Slot(groups[1], 3, {2}, {0})};
  for (int64_t call = 0; call < kCalls; ++call) {
    ahead.AllReduce(slots[0], 0);
    ahead.AllReduce(slots[1], 2);
  }
  EXPECT_THAT(Cast(&sequencer, ahead), IsEmpty());
  TestRun behind = OneAllReduce(2, Epoch(1), own, 1, 0, /*base=*/1);
  const Vote& vote = behind.Build();
  const WorkSlice slice;
  Actions actions;
  ASSERT_TRUE(sequencer.Submit(vote, At(0), &actions).ok());
  EXPECT_THAT(Launched(actions), ElementsAre(2));
  EXPECT_GE(SliceWork(), 2 * kCalls);
  EXPECT_LE(SliceWork(), 3 * kCalls);
}

// A vote asks for gradients of as many instances as a graph may have collectives, or for as many of
// one: each is a request by itself.
TEST(SequencerPositionTest, EachRequestOfAVoteIsLookedAtOnce) {
  constexpr int64_t kCalls = 2048;
  Sequencer sequencer = World(1);
  TestRun forward(1, Epoch(1));
  const int32_t slot = forward.Slot(kWorld, 1, {0}, {0});
  for (int64_t call = 0; call < kCalls; ++call) forward.AllReduce(slot, 0).wants_grad = true;
  EXPECT_THAT(Launched(Cast(&sequencer, forward)), ElementsAre(1));
  for (const bool of_one : {false, true}) {
    SCOPED_TRACE(of_one);
    TestRun gradients(2, Epoch(1));
    gradients.Slot(kWorld, 1, {0}, {kCalls});
    for (int64_t call = 0; call < kCalls; ++call) {
      gradients.GradientOf(WorldKey(1, of_one ? 0 : call), of_one ? static_cast<int32_t>(call) : 0,
                           slot, 0);
    }
    const WorkSlice slice;
    ASSERT_TRUE(sequencer.Resolve(gradients.Build()).ok());
    EXPECT_LE(SliceWork(), 2 * kCalls);
  }
}

// The tables of what is pending grow as it comes. Their parts are full at about the same time: none
// of the votes makes way for all.
TEST(SequencerPositionTest, AVoteAmongVeryManyMovesAboutAsMuchAsItBrings) {
  constexpr int64_t kCalls = 1000;  // of a run
  const auto pending = static_cast<int64_t>(SequencerOptions().max_pending);
  Sequencer sequencer = World(2);
  int64_t largest = 0;
  for (int64_t call = 0; call + kCalls <= pending; call += kCalls) {
    TestRun ahead(1 + call, Epoch(1));
    const int32_t slot = ahead.Slot(kWorld, 2, {0}, {call});
    for (int64_t i = 0; i < kCalls; ++i) ahead.AllReduce(slot, 0);
    const Vote vote = ahead.Build();
    const WorkSlice slice;
    Actions actions;
    ASSERT_TRUE(sequencer.Submit(vote, At(0), &actions).ok());
    largest = std::max(largest, SliceWork());
  }
  // To index one is three; half a row is moved for each, or a whole part for one.
  EXPECT_LE(largest, 5 * kCalls);
}

// All that may wait for a rank fails when that leaves it behind: in slices, one after the other.
TEST(SequencerPositionTest, VeryMuchThatIsPassedFailsInSlices) {
  constexpr int64_t kCalls = 16;  // of a run
  const auto pending = static_cast<int64_t>(SequencerOptions().max_pending) - kCalls;
  Sequencer sequencer = World(2);
  for (int64_t call = 0; call < pending; call += kCalls) {
    TestRun ahead(1 + call, Epoch(1));
    const int32_t slot = ahead.Slot(kWorld, 2, {0}, {call});
    for (int64_t i = 0; i < kCalls; ++i) ahead.AllReduce(slot, 0);
    ASSERT_THAT(Cast(&sequencer, ahead), IsEmpty());
  }
  Slices slices;
  const Actions first = slices.InOne([&](Actions* actions) {
    TestRun behind = OneAllReduce(2 * pending, Epoch(1), kWorld, 2, 1, pending);
    ASSERT_TRUE(sequencer.Submit(behind.Build(), At(0), actions).ok());
  });
  const Actions rest = slices.GoOn(&sequencer);
  EXPECT_LE(slices.largest, kMaxSliceWork);
  EXPECT_GT(slices.count, 10);
  EXPECT_EQ(FailedAlone(first).size() + FailedAlone(rest).size(),
            static_cast<size_t>(pending / kCalls));
  EXPECT_EQ(sequencer.epoch(), Epoch(1));
  // What nobody has passed still waits.
  EXPECT_TRUE(sequencer.IsPending(RunHandle(2 * pending)));
  EXPECT_THAT(Launched(Cast(&sequencer, Simple(sequencer, 3 * pending, 0, pending))),
              ElementsAre(2 * pending, 3 * pending));
}

// In between a third rank's vote meets what is about to fail, and a refusal is known to be late.
TEST(SequencerPositionTest, WhatIsAboutToFailHasBeenPassed) {
  constexpr int64_t kPending = 1000;
  Sequencer sequencer = World(3);
  for (int64_t call = 0; call < kPending; ++call) {
    ASSERT_THAT(Cast(&sequencer, OneAllReduce(1 + call, Epoch(1), kWorld, 3, 0, call)), IsEmpty());
  }
  const int64_t last = kPending - 1;
  {
    const WorkSlice slice;
    Actions actions;
    TestRun behind = OneAllReduce(2000, Epoch(1), kWorld, 3, 1, kPending);
    ASSERT_TRUE(sequencer.Submit(behind.Build(), At(0), &actions).ok());
    EXPECT_LT(FailedAlone(actions).size(), static_cast<size_t>(kPending / 2));
    ASSERT_TRUE(sequencer.IsPending(RunHandle(1 + last)));
    actions.clear();
    sequencer.Refuse({RefusedAt(2, last, last + 1)}, Epoch(1), Error(), At(0), &actions);
    EXPECT_EQ(sequencer.epoch(), Epoch(1));
  }
  Actions actions;
  sequencer.Advance(At(0), &actions);
  EXPECT_FALSE(sequencer.IsPending(RunHandle(1 + last)));
  EXPECT_GT(sequencer.NextDeadline(), At(0));
}

// All that waits for a rank and that it passes by going on: its calls, ends of pairs, and requests.
TEST(SequencerPositionTest, WhoGoesOnPassesWhatItLeavesBehindInEveryWay) {
  enum class By { kLaterStep, kRestOfStep, kLateVote };
  for (int i = 0; i < 9; ++i) {
    SCOPED_TRACE(i);
    const By by = std::array{By::kLaterStep, By::kRestOfStep, By::kLateVote}[i % 3];
    // Looked at one by one, by their sort keys, or some each.
    const size_t newest_pending = i / 3 == 0 ? 1024 : i / 3 == 1 ? 0 : 3;
    Sequencer sequencer = World(3, /*rows_per_event=*/256, newest_pending);
    const GroupId other = AddGroup(&sequencer, {1, 0});
    const InstanceKey forward = Forward(&sequencer, 1, 0);
    Actions actions;
    sequencer.Abort(Error(), At(0), &actions);
    Cast(&sequencer, Simple(sequencer, 10, 0, 1));
    Cast(&sequencer, OneAllReduce(11, sequencer.epoch(), other, 2, 1, 0));
    Cast(&sequencer, Gradient(sequencer, 12, 0, forward, 0));
    Cast(&sequencer, Send(13, sequencer.epoch(), 0, 1));
    Cast(&sequencer, Recv(14, sequencer.epoch(), 0, 1));
    Cast(&sequencer, InStep(sequencer, 15, 0, 1, 0));
    Error why(Reason::kBadType, "no");
    why.alone = true;
    actions.clear();
    switch (by) {
      case By::kLaterStep:
        actions = Cast(&sequencer, InStep(sequencer, 20, 1, 1, 1));
        // Rank 0 is at call 0 of that step, which rank 1 has left out, too.
        EXPECT_THAT(FailedAlone(actions), UnorderedElementsAre(10, 11, 12, 13, 14, 15));
        EXPECT_TRUE(sequencer.IsPending(RunHandle(20)));
        break;
      case By::kRestOfStep: {
        RefusedMember member;
        member.rank = Rank(1);
        member.rest_of_step = true;
        sequencer.Refuse({member}, sequencer.epoch(), why, At(0), &actions);
        EXPECT_THAT(FailedAlone(actions), UnorderedElementsAre(10, 11, 12, 13, 14));
        EXPECT_TRUE(sequencer.IsPending(RunHandle(15)));
        break;
      }
      case By::kLateVote: {
        TestRun late(20, Epoch(1), /*step=*/1);
        late.AllReduce(late.Slot(kWorld, 3, {1}, {0}), 1);
        actions = Cast(&sequencer, late);
        // Its own call counts, and is not voted for.
        EXPECT_THAT(Failed(actions), UnorderedElementsAre(10, 11, 12, 13, 14, 15, 20));
        break;
      }
    }
  }
}

TEST(SequencerPositionTest, RequestsOfGradientsAreNamesToo) {
  Sequencer sequencer = World(2);
  const InstanceKey forward = Forward(&sequencer, 1, 0);
  Cast(&sequencer, Gradient(sequencer, 10, 0, forward, 0));
  const Actions passed = Cast(&sequencer, Gradient(sequencer, 11, 1, forward, 1));
  EXPECT_THAT(FailedAlone(passed), ElementsAre(10));
  EXPECT_THAT(Launched(Cast(&sequencer, Gradient(sequencer, 12, 0, forward, 1))),
              ElementsAre(11, 12));
}

// A run whose input has failed alone: its requests count as its calls do, and what waits for them
// is told at once.
TEST(SequencerPositionTest, RequestsOfARunThatIsRefusedAloneCount) {
  Sequencer sequencer = World(2);
  const InstanceKey forward = Forward(&sequencer, 1, 0);
  Cast(&sequencer, Gradient(sequencer, 10, 0, forward, 0));  // waits
  TestRun refused = Gradient(sequencer, 11, 1, forward, 0);
  const std::vector<RefusedMember> members = sequencer.CallsOf(refused.Build());
  ASSERT_EQ(members.size(), 1u);
  EXPECT_THAT(members[0].gradients, ElementsAre(forward.Gradient({0, 0})));
  Error why;
  why.alone = true;
  Actions actions;
  sequencer.Refuse(members, Epoch(1), why, At(0), &actions);
  EXPECT_THAT(FailedAlone(actions), ElementsAre(10));
  EXPECT_EQ(sequencer.epoch(), Epoch(1));
  Cast(&sequencer, Gradient(sequencer, 12, 0, forward, 1));
  EXPECT_THAT(Launched(Cast(&sequencer, Gradient(sequencer, 13, 1, forward, 1))),
              ElementsAre(12, 13));
}

// A rank that runs ahead does not know yet that the collective has failed.
TEST(SequencerPositionTest, AGradientOfWhatHasFailedAloneFailsAlone) {
  Sequencer sequencer = World(2);
  Cast(&sequencer, WithTape(sequencer, 1, 0, 0));  // waits
  Cast(&sequencer, Simple(sequencer, 2, 1, 1));    // has left call 0 out: run 1 fails
  TestRun ahead = Gradient(sequencer, 3, 0, WorldKey(1, 0), 0);
  const absl::Status status = Refused(&sequencer, ahead);
  EXPECT_EQ(ErrorOf(status).reason, Reason::kMismatch);
  EXPECT_TRUE(ErrorOf(status).alone);
  Actions actions;
  sequencer.Refuse(sequencer.CallsOf(ahead.Build()), Epoch(1), ErrorOf(status), At(0), &actions);
  EXPECT_THAT(actions, IsEmpty());
  EXPECT_EQ(sequencer.epoch(), Epoch(1));
}

TEST(SequencerPositionTest, AGradientThatAllRanksCannotTakeCostsOneEpoch) {
  Sequencer sequencer = World(2);
  const InstanceKey forward = Forward(&sequencer, 1, 0);
  for (int32_t rank = 0; rank < 2; ++rank) {
    TestRun refused = Gradient(sequencer, 10 + rank, rank, forward, 0);
    const std::vector<RefusedMember> members = sequencer.CallsOf(refused.Build());
    Actions actions;
    sequencer.Refuse(members, sequencer.epoch(), Error(), At(0), &actions);
    EXPECT_EQ(sequencer.epoch(), Epoch(2));
  }
}

// A vote that ends its epoch counts too, with all that it asks for.
TEST(SequencerPositionTest, RequestsOfAVoteThatEndsItsEpochCount) {
  Sequencer sequencer = World(3);
  const GroupId pair = AddGroup(&sequencer, {0, 1});
  InstanceKey forward = WorldKey(1, 0);
  forward.group = pair;
  for (int32_t rank = 0; rank < 2; ++rank) {
    TestRun run(1 + rank, Epoch(1));
    run.AllReduce(run.Slot(pair, 2, {rank}, {0}), rank).wants_grad = true;
    Cast(&sequencer, run);
  }
  Actions actions;
  sequencer.Left(Rank(2), At(0), &actions);
  TestRun both(10, Epoch(1));
  both.GradientOf(forward, 0, both.Slot(pair, 2, {0}, {1}), 0);
  both.AllReduce(both.Slot(kWorld, 3, {0}, {0}), 0);
  EXPECT_EQ(EndedBy(Cast(&sequencer, both)).reason, Reason::kNeedsReform);
  TestRun late(11, Epoch(2));
  late.GradientOf(forward, 0, late.Slot(pair, 2, {1}, {1}), 1);
  EXPECT_THAT(FailedAlone(Cast(&sequencer, late)), ElementsAre(11));
}

TEST(SequencerPositionTest, WhatARankRecordedBeforeARefusedGradientHasNoneAnyMore) {
  Sequencer sequencer = World(2);
  const InstanceKey before = Forward(&sequencer, 1, 0);
  RefusedMember rank;
  rank.rank = Rank(1);
  rank.drops_tapes = true;
  Actions actions;
  sequencer.Refuse({rank}, Epoch(1), Error(), At(0), &actions);
  EXPECT_EQ(sequencer.epoch(), Epoch(2));
  const Actions asked = Cast(&sequencer, Gradient(sequencer, 10, 0, before, 0));
  EXPECT_THAT(FailedAlone(asked), ElementsAre(10));
  EXPECT_EQ(sequencer.epoch(), Epoch(2));
  const InstanceKey after = Forward(&sequencer, 20, 1);
  Cast(&sequencer, Gradient(sequencer, 30, 0, after, 0));
  EXPECT_THAT(Launched(Cast(&sequencer, Gradient(sequencer, 31, 1, after, 0))),
              ElementsAre(30, 31));
}

TEST(SequencerPositionTest, GroupsAreThoseOfTheStepsRequests) {
  Sequencer sequencer = World(2);
  const std::vector<Rank> list = {Rank(0), Rank(1)};
  const GroupId first = *sequencer.AddGroup(Rank(0), list, InstanceKey::Request{1, 0});
  // Rank 1 has left that request out.
  const GroupId next = *sequencer.AddGroup(Rank(1), list, InstanceKey::Request{2, 0});
  EXPECT_NE(first, next);
  EXPECT_EQ(*sequencer.AddGroup(Rank(0), list, InstanceKey::Request{2, 0}), next);
  EXPECT_EQ(*sequencer.AddGroup(Rank(1), list, InstanceKey::Request{1, 0}), first);
}

TEST(SequencerPositionTest, WithoutPositionsTheSequencerCounts) {
  Sequencer sequencer = World(2);
  const auto uncounted = [&](int64_t run, int32_t member) {
    TestRun result = OneAllReduce(run, sequencer.epoch(), kWorld, 2, member, 0);
    result.vote().groups[0].base.clear();
    return result;
  };
  Cast(&sequencer, uncounted(1, 0));
  EXPECT_THAT(Launched(Cast(&sequencer, uncounted(2, 1))), ElementsAre(1, 2));
  Cast(&sequencer, uncounted(3, 0));
  EXPECT_THAT(Launched(Cast(&sequencer, Simple(sequencer, 4, 1, 1))), ElementsAre(3, 4));
  EXPECT_EQ(sequencer.NextCall(kWorld, Rank(0)), (CallPosition{0, 2, 0}));
}

// --- Orders other than a rank's own -------------------------------------------------------------

// Rank 0 asks for the pair first, rank 1 for the world; the gang takes the world first.
struct ReorderedGang {
  // The second vote, with which it closes, comes at `closed`.
  explicit ReorderedGang(absl::Time closed = At(0))
      : sequencer(World(2)), pair(AddGroup(&sequencer, {1, 0})) {
    TestRun first(1, Epoch(1));
    const int32_t first_pair = first.Slot(pair, 2, {1}, {0});
    first.AllReduce(first_pair, 1);
    first.AllReduce(first.Slot(kWorld, 2, {0}, {0}), 0);
    first.Donate();
    Cast(&sequencer, first);
    TestRun second(2, Epoch(1));
    second.AllReduce(second.Slot(kWorld, 2, {1}, {0}), 1);
    second.AllReduce(second.Slot(pair, 2, {0}, {0}), 0);
    asked = Submitted(&sequencer, second, closed);
  }
  Sequencer sequencer;
  GroupId pair;
  Actions asked;
};

TEST(SequencerOrderTest, AsksForWhatAnotherOrderTakesBeforeTheLaunch) {
  ReorderedGang gang;
  ASSERT_EQ(gang.asked.size(), 1u);
  EXPECT_EQ(gang.asked[0].kind, Kind::kReserve);
  EXPECT_EQ(gang.asked[0].run, RunHandle(1));
  EXPECT_THAT(gang.asked[0].order, ElementsAre(1, 0));
  EXPECT_THAT(gang.asked[0].donating, IsEmpty());
  EXPECT_TRUE(gang.sequencer.IsPending(RunHandle(1)));
  Actions actions;
  gang.sequencer.Reserved(RunHandle(2), At(0), &actions);  // it was not asked
  EXPECT_THAT(actions, IsEmpty());
  gang.sequencer.Reserved(RunHandle(1), At(0), &actions);
  ASSERT_THAT(Launched(actions), ElementsAre(1, 2));
  EXPECT_EQ(actions[0].instances[0].key.group, kWorld);
  EXPECT_THAT(actions[0].donating, ElementsAre(RunHandle(1)));
}

// What the runs read has the world's second collective before its first.
TEST(SequencerOrderTest, TheLastPublishedCollectiveIsTheLastOfTheCallsNotOfTheOrder) {
  Sequencer sequencer = World(2);
  const GroupId pair = AddGroup(&sequencer, {1, 0});
  TestRun first(1, Epoch(1));
  const int32_t in_world = first.Slot(kWorld, 2, {0}, {0});
  first.AllReduce(in_world, 0);
  first.AllReduce(in_world, 0);
  first.AllReduce(first.Slot(pair, 2, {1}, {0}), 1, /*after=*/{1});
  Cast(&sequencer, first);
  TestRun second(2, Epoch(1));
  second.AllReduce(second.Slot(pair, 2, {0}, {0}), 0);
  const int32_t of_second = second.Slot(kWorld, 2, {1}, {0});
  second.AllReduce(of_second, 1, /*after=*/{0});
  second.AllReduce(of_second, 1);
  Actions actions = Submitted(&sequencer, second);
  for (const int64_t run : {1, 2}) sequencer.Reserved(RunHandle(run), At(0), &actions);
  ASSERT_THAT(Launched(actions), ElementsAre(1, 2));
  ASSERT_EQ(actions.back().instances.front().key, WorldKey(1, 1));
  sequencer.Finished(Ticket(1), absl::OkStatus(), At(1), &actions);
  EXPECT_EQ(*sequencer.LastPublished(Rank(0)), WorldKey(1, 1));
}

TEST(SequencerOrderTest, TheOrderOfAGangIsFoundOnceHoweverManyHaveToGetReadyForIt) {
  constexpr int64_t kRuns = 600;  // an order that is too long to be kept
  Sequencer sequencer = World(2);
  const GroupId pair = AddGroup(&sequencer, {1, 0});
  for (int64_t i = 0; i < kRuns; ++i) {
    TestRun run(1 + i, Epoch(1));
    const int32_t in_pair = run.Slot(pair, 2, {1}, {i});
    run.AllReduce(in_pair, 1);
    run.AllReduce(run.Slot(kWorld, 2, {0}, {i}), 0);
    EXPECT_THAT(Cast(&sequencer, run), IsEmpty());
  }
  TestRun all(2000, Epoch(1));
  const int32_t in_world = all.Slot(kWorld, 2, {1}, {0});
  const int32_t in_pair = all.Slot(pair, 2, {0}, {0});
  for (int64_t i = 0; i < kRuns; ++i) {
    all.AllReduce(in_world, 1);
    all.AllReduce(in_pair, 0);
  }
  const Actions asked = Submitted(&sequencer, all);
  ASSERT_GE(asked.size(), static_cast<size_t>(kRuns - 1));
  Actions actions;
  int64_t work = 0;
  for (const SequencerAction& action : asked) {
    ASSERT_EQ(action.kind, Kind::kReserve);
    EXPECT_THAT(actions, IsEmpty());
    const WorkSlice slice;
    sequencer.Reserved(action.run, At(0), &actions);
    work += SliceWork();
  }
  ASSERT_THAT(actions, SizeIs(1));
  EXPECT_THAT(actions[0].runs, SizeIs(kRuns + 1));
  EXPECT_LT(work, 20 * kRuns);
}

TEST(SequencerOrderTest, WhoCannotFollowEndsTheEpochAndNothingIsLaunchedOrDonated) {
  ReorderedGang gang;
  Error why;
  why.message = "no memory";
  Actions actions;
  gang.sequencer.Refuse({RefusedAt(0, 0, 0)}, Epoch(1), why, At(0), &actions);
  EXPECT_THAT(Failed(actions), ElementsAre(1, 2));
  EXPECT_EQ(EndedBy(actions).reason, Reason::kPeerRefused);
  for (const SequencerAction& action : actions) EXPECT_THAT(action.donating, IsEmpty());
  actions.clear();
  gang.sequencer.Reserved(RunHandle(1), At(0), &actions);
  EXPECT_THAT(actions, IsEmpty());
}

TEST(SequencerOrderTest, WhoNeverAnswersIsNamedAtTheTimeout) {
  ReorderedGang gang;
  Actions actions;
  gang.sequencer.Advance(gang.sequencer.NextDeadline(), &actions);
  const Error error = EndedBy(actions);
  EXPECT_EQ(error.reason, Reason::kAgreeTimeout);
  EXPECT_EQ(error.culprit.rank, 0);
  EXPECT_THAT(error.message, HasSubstr("has not got ready for its gang's order"));
}

// Not for the time in which it was not asked: what the gang's first vote waited for came in time.
TEST(SequencerOrderTest, WhoIsAskedLateHasAsLongToAnswer) {
  const absl::Duration agree_timeout = SequencerOptions().agree_timeout;
  for (const bool answers : {false, true}) {
    SCOPED_TRACE(answers);
    const absl::Time closed = At(0) + agree_timeout - absl::Seconds(1);
    ReorderedGang gang(closed);
    Actions actions;
    gang.sequencer.Advance(At(0) + agree_timeout, &actions);
    EXPECT_THAT(actions, IsEmpty());
    EXPECT_EQ(gang.sequencer.NextDeadline(), closed + agree_timeout);
    if (answers) {
      gang.sequencer.Reserved(RunHandle(1), At(0) + agree_timeout, &actions);
      EXPECT_THAT(Launched(actions), ElementsAre(1, 2));
      continue;
    }
    gang.sequencer.Advance(closed + agree_timeout - absl::Nanoseconds(1), &actions);
    EXPECT_THAT(actions, IsEmpty());
    gang.sequencer.Advance(closed + agree_timeout, &actions);
    const Error error = EndedBy(actions);
    EXPECT_EQ(error.reason, Reason::kAgreeTimeout);
    EXPECT_EQ(error.culprit.rank, 0);
    EXPECT_THAT(error.message, HasSubstr("has not got ready for its gang's order within 1m"));
  }
}

// --- Votes that contradict their own past -------------------------------------------------------

TEST(SequencerContradictionTest, AreRefusedAndLeaveNothingBehind) {
  Sequencer sequencer = World(2);
  const GroupId pair = AddGroup(&sequencer, {0, 1});
  const InstanceKey forward = Forward(&sequencer, 1, 0);
  Cast(&sequencer, Simple(sequencer, 5, 0, 1));
  const auto code = [&](TestRun run) { return Refused(&sequencer, std::move(run)).code(); };
  const absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

  EXPECT_EQ(code(Simple(sequencer, 6, 0, 1)), kInvalid);  // asked before
  EXPECT_EQ(code(Simple(sequencer, 6, 0, -1)), kInvalid);
  EXPECT_EQ(code(Simple(sequencer, 5, 1, 1)), kInvalid);                  // the run has voted
  EXPECT_EQ(code(OneAllReduce(6, Epoch(2), kWorld, 2, 0, 2)), kInvalid);  // not open yet
  EXPECT_EQ(code(OneAllReduce(6, Epoch(1), GroupId(7), 2, 0, 0)), kInvalid);
  EXPECT_EQ(code(OneAllReduce(6, Epoch(1), GroupId(-1), 2, 0, 0)), kInvalid);
  EXPECT_EQ(code(OneAllReduce(6, Epoch(1), kWorld, 2, 2, 0)), kInvalid);    // no such member
  EXPECT_EQ(code(Gradient(sequencer, 6, 0, WorldKey(1, 1), 0)), kInvalid);  // holds no tape for it
  EXPECT_EQ(code(Gradient(sequencer, 6, 0, WorldKey(9, 9), 0)), kInvalid);

  for (const bool goes_on : {false, true}) {
    TestRun part = Simple(sequencer, 6, 0, 2);
    part.vote().groups[0].base[0].part = std::numeric_limits<int32_t>::max();
    part.vote().call_goes_on = goes_on;
    EXPECT_EQ(code(std::move(part)), kInvalid);
  }

  TestRun not_held(6, Epoch(1));
  not_held.AllReduce(not_held.Slot(kWorld, 2, {0}, {2}), 1);
  EXPECT_EQ(code(not_held), kInvalid);
  TestRun bases(6, Epoch(1));
  bases.AllReduce(bases.Slot(kWorld, 2, {0}, {2, 2}), 0);
  EXPECT_EQ(code(bases), kInvalid);
  TestRun slot(6, Epoch(1));
  slot.AllReduce(1 + slot.Slot(kWorld, 2, {0}, {2}), 0);
  EXPECT_EQ(code(slot), kInvalid);
  TestRun forward_bound(6, Epoch(1));
  forward_bound.GradientOf(forward.Gradient({0, 0}).Parent(), 0,
                           forward_bound.Slot(pair, 2, {0}, {0}), 0);
  EXPECT_EQ(code(forward_bound), kInvalid);  // bound where another group is used
  TestRun peer(6, Epoch(1));
  peer.SendTo(peer.Slot(kWorld, 2, {0}, {2}), 0, 2);
  EXPECT_EQ(code(peer), kInvalid);
  TestRun two(6, Epoch(1));  // the first participation is good, the second is not
  const int32_t good = two.Slot(kWorld, 2, {0}, {2});
  two.SendTo(good, 0, 1, 77);
  two.GradientOf(forward, 0, good, 0);
  two.GradientOf(forward, 0, good, 0);
  EXPECT_EQ(code(two), kInvalid);
  TestRun later(6, Epoch(1));
  const int32_t here = later.Slot(kWorld, 2, {0}, {2});
  later.GradientHere(1, 0, here, 0);
  later.AllReduce(here, 0);
  EXPECT_EQ(code(later), kInvalid);
  TestRun number(6, Epoch(1));
  const int32_t there = number.Slot(kWorld, 2, {0}, {2});
  number.AllReduce(there, 0);
  number.GradientHere(0, 1, there, 0);
  EXPECT_EQ(code(number), kInvalid);

  Actions actions;
  sequencer.DropTape(Rank(0), forward, false, Epoch(1), At(0), &actions);
  EXPECT_EQ(code(Gradient(sequencer, 6, 0, forward, 0)), kInvalid);  // it has abandoned it
  // And what is right still goes.
  EXPECT_THAT(Launched(Cast(&sequencer, Simple(sequencer, 7, 1, 1))), ElementsAre(5, 7));
}

TEST(SequencerContradictionTest, ResolveSaysWhatSubmitWouldVoteFor) {
  Sequencer sequencer = World(2);
  const InstanceKey forward = Forward(&sequencer, 1, 0);
  TestRun run(3, Epoch(1));
  const int32_t slot = run.Slot(kWorld, 2, {0}, {1});
  run.AllReduce(slot, 0);
  run.GradientOf(forward, 0, slot, 0);
  run.SendTo(slot, 0, 1, 4);
  run.SendTo(slot, 0, 1, 4);
  run.GradientHere(0, 0, slot, 0);
  const std::string before = sequencer.CanonicalState();
  const auto keys = sequencer.Resolve(run.Build());
  ASSERT_TRUE(keys.ok()) << keys.status();
  EXPECT_EQ(sequencer.CanonicalState(), before);
  ASSERT_THAT(*keys, SizeIs(5));
  EXPECT_EQ((*keys)[0], WorldKey(1, 1));
  EXPECT_EQ((*keys)[1], forward.Gradient({0, 0}));
  EXPECT_EQ((*keys)[3].at.call, 1);
  EXPECT_EQ((*keys)[3].tag, 4);
  EXPECT_EQ((*keys)[4], WorldKey(1, 1).Gradient({0, 0}));
}

TEST(SequencerContradictionTest, WhatResolveHasFoundHoldsUntilTheNextEvent) {
  Sequencer sequencer = World(2);
  // Another vote is resolved in between: what was found is the other's.
  ASSERT_TRUE(sequencer.Resolve(Simple(sequencer, 1, 0, 0).Build()).ok());
  ASSERT_TRUE(sequencer.Resolve(Simple(sequencer, 2, 1, 0).Build()).ok());
  EXPECT_THAT(Launched(Cast(&sequencer, Simple(sequencer, 1, 0, 0))), IsEmpty());
  const Actions actions = Cast(&sequencer, Simple(sequencer, 2, 1, 0));
  EXPECT_THAT(Launched(actions), ElementsAre(1, 2));
  EXPECT_EQ(actions[0].instances[0].parts[0].run, RunHandle(1));
  EXPECT_EQ(actions[0].instances[0].parts[1].run, RunHandle(2));
  // One that would be refused leaves nothing of the one before it.
  ASSERT_TRUE(sequencer.Resolve(Simple(sequencer, 3, 0, 1).Build()).ok());
  EXPECT_FALSE(sequencer.Resolve(Simple(sequencer, 3, 0, 0).Build()).ok());
  EXPECT_FALSE(Refused(&sequencer, Simple(sequencer, 3, 0, 0)).ok());
  // An event in between has counted on, or has ended the epoch.
  ASSERT_TRUE(sequencer.Resolve(Simple(sequencer, 3, 0, 1).Build()).ok());
  Cast(&sequencer, Simple(sequencer, 4, 0, 1));
  EXPECT_FALSE(Refused(&sequencer, Simple(sequencer, 3, 0, 1)).ok());
  TestRun late = Simple(sequencer, 5, 1, 1);
  ASSERT_TRUE(sequencer.Resolve(late.Build()).ok());
  Actions ended;
  sequencer.Abort(Error(), At(0), &ended);
  EXPECT_THAT(Failed(Cast(&sequencer, std::move(late))), ElementsAre(5));
}

// --- Memory -------------------------------------------------------------------------------------

TEST(SequencerMemoryTest, SoManyCollectivesMayWaitForOtherRanks) {
  SequencerOptions options;
  options.max_pending = 4;
  Sequencer sequencer(2, options);
  const auto two = [&](int64_t handle, int32_t rank, int64_t call) {
    TestRun run(handle, sequencer.epoch());
    const int32_t slot = run.Slot(kWorld, 2, {rank}, {call});
    run.AllReduce(slot, rank);
    run.AllReduce(slot, rank);
    return run;
  };
  Cast(&sequencer, two(1, 0, 0));
  Cast(&sequencer, Simple(sequencer, 2, 0, 2));
  const absl::Status full = Refused(&sequencer, two(3, 0, 3));
  EXPECT_EQ(ErrorOf(full).reason, Reason::kQuota) << full;
  Cast(&sequencer, Simple(sequencer, 4, 0, 3));
  EXPECT_EQ(ErrorOf(sequencer.Resolve(Simple(sequencer, 5, 0, 4).Build()).status()).reason,
            Reason::kQuota);
  // A rank that is behind catches up, and makes room.
  EXPECT_EQ(ErrorOf(Refused(&sequencer, Simple(sequencer, 10, 1, 4))).reason, Reason::kQuota);
  EXPECT_THAT(Launched(Cast(&sequencer, two(11, 1, 0))), ElementsAre(1, 11));
  Cast(&sequencer, two(12, 0, 4));
  EXPECT_THAT(Launched(Cast(&sequencer, two(13, 1, 2))), SizeIs(3));
  EXPECT_THAT(Launched(Cast(&sequencer, two(14, 1, 4))), ElementsAre(12, 14));
}

// They are what an event frees beside its own: it counts them, and frees few bytes.
TEST(SequencerMemoryTest, ManyPairsOfAStepThatIsOverGoInSlices) {
  constexpr int64_t kRuns = 40;
  constexpr int64_t kTags = 1000;
  for (const bool reforms : {false, true}) {
    SCOPED_TRACE(reforms);
    Sequencer sequencer = World(1);
    Actions actions;
    for (int64_t i = 0; i < kRuns; ++i) {
      TestRun run(i, Epoch(1));
      const int32_t slot = run.Slot(kWorld, 1, {0}, {0});
      for (int64_t tag = i * kTags; tag < (i + 1) * kTags; ++tag) {
        run.SendTo(slot, 0, 0, tag);
        run.RecvFrom(slot, 0, 0, tag);
      }
      ASSERT_THAT(Launched(Cast(&sequencer, std::move(run))), SizeIs(1));
      sequencer.Finished(Ticket(i + 1), absl::OkStatus(), At(0), &actions);
    }
    const size_t rows = sequencer.HeldRows();
    ASSERT_EQ(rows, 2 * kRuns * kTags);
    const int64_t bytes = sequencer.HeldBytes();
    Slices slices;
    const HeapUse heap;
    int64_t most_freed = 0;
    const auto event = [&](const std::function<void(Actions*)>& what) {
      const int64_t before = heap.bytes();
      slices.InOne(what);
      most_freed = std::max(most_freed, before - heap.bytes());
    };
    event([&](Actions* out) {
      if (reforms) {
        sequencer.Shrink(At(0), out);
        return;
      }
      TestRun next = OneAllReduce(kRuns, Epoch(1), kWorld, 1, 0, 0, /*step=*/1);
      EXPECT_TRUE(sequencer.Submit(next.Build(), At(0), out).ok());
    });
    EXPECT_GT(sequencer.HeldRows(), rows / 2);
    EXPECT_GT(sequencer.HeldBytes(), bytes / 2) << "what is there is charged";
    while (sequencer.NextDeadline() <= At(0)) {
      event([&](Actions* out) { sequencer.Advance(At(0), out); });
    }
    EXPECT_EQ(sequencer.HeldRows(), 0);
    EXPECT_LE(slices.largest, kMaxSliceWork / 4);
    EXPECT_GT(slices.count, 10);
    EXPECT_LE(most_freed, int64_t{2} << 20);
  }
}

TEST(SequencerMemoryTest, SoManyCollectivesMayStillBeDifferentiated) {
  SequencerOptions options;
  options.max_tapes = 2;
  Sequencer sequencer(2, options);
  const InstanceKey first = Forward(&sequencer, 1, 0);
  Cast(&sequencer, WithTape(sequencer, 3, 0, 1));
  const absl::Status full = Refused(&sequencer, WithTape(sequencer, 4, 0, 2));
  EXPECT_EQ(ErrorOf(full).reason, Reason::kQuota) << full;
  Cast(&sequencer, Simple(sequencer, 5, 0, 2));
  // Others may hold entries of what has one, and what is given up makes room.
  EXPECT_THAT(Launched(Cast(&sequencer, WithTape(sequencer, 6, 1, 1))), ElementsAre(3, 6));
  EXPECT_THAT(Launched(Cast(&sequencer, Simple(sequencer, 7, 1, 2))), ElementsAre(5, 7));
  Actions actions;
  for (int32_t rank = 0; rank < 2; ++rank) {
    sequencer.DropTape(Rank(rank), first, false, Epoch(1), At(0), &actions);
  }
  Cast(&sequencer, WithTape(sequencer, 8, 0, 3));
  EXPECT_THAT(Launched(Cast(&sequencer, WithTape(sequencer, 9, 1, 3))), ElementsAre(8, 9));
}

// What cannot be asked for is let go of later, and nobody sees it meanwhile.
TEST(SequencerMemoryTest, AnEventLetsGoOfSoManyTapesOfAnEpochThatEnded) {
  Sequencer sequencer = World(2, /*rows_per_event=*/2);
  const size_t before = sequencer.HeldRows();
  for (int64_t call = 0; call < 5; ++call) {
    Cast(&sequencer, WithTape(sequencer, 1 + call, 0, call));
  }
  EXPECT_EQ(sequencer.HeldRows(), before + 5);
  Actions actions;
  sequencer.Abort(Error(), At(0), &actions);
  EXPECT_EQ(sequencer.HeldRows(), before + 3);
  const absl::Status none = Refused(&sequencer, Gradient(sequencer, 10, 0, WorldKey(1, 0), 0));
  EXPECT_EQ(ErrorOf(none).reason, Reason::kMismatch) << none;
  EXPECT_TRUE(ErrorOf(none).alone);
  sequencer.Advance(At(1), &actions);
  EXPECT_EQ(sequencer.HeldRows(), before + 1);
  sequencer.Advance(At(1), &actions);
  EXPECT_EQ(sequencer.HeldRows(), before);
}

TEST(SequencerMemoryTest, EpochsThatEndLeaveNothingBehind) {
  Sequencer sequencer = World(1);
  int64_t bytes = 0;
  for (int64_t epoch = 1; epoch <= 20; ++epoch) {
    const InstanceKey forward = Forward(&sequencer, 1000 * epoch, epoch - 1);
    for (int32_t request = 0; request < 100; ++request) {
      TestRun gradient = Gradient(sequencer, 1000 * epoch + 1 + request, 0, forward, request);
      gradient.BlockExternally();
      Cast(&sequencer, gradient);
    }
    Actions actions;
    sequencer.DropTape(Rank(0), forward, true, sequencer.epoch(), At(0), &actions);
    sequencer.Abort(Error(Reason::kAborted), At(0), &actions);
    sequencer.Advance(At(0), &actions);
    EXPECT_EQ(sequencer.HeldRows(), 0u);
    if (epoch == 2) bytes = sequencer.HeldBytes();
  }
  EXPECT_EQ(sequencer.HeldBytes(), bytes);
}

TEST(SequencerMemoryTest, ATapeThatOnlyAPendingGradientKeptGoesWithItsEpoch) {
  Sequencer sequencer = World(1);
  const InstanceKey forward = Forward(&sequencer, 1, 0);
  TestRun gradient = Gradient(sequencer, 2, 0, forward, 0);
  gradient.BlockExternally();
  Cast(&sequencer, gradient);
  Actions actions;
  sequencer.DropTape(Rank(0), forward, true, Epoch(1), At(0), &actions);
  EXPECT_EQ(sequencer.HeldRows(), 1u);
  sequencer.Abort(Error(), At(0), &actions);
  EXPECT_EQ(sequencer.HeldRows(), 0u);
}

// Whether what its epoch's end left behind has been let go of or not, a tape that has been launched
// is asked again, and goes when it is dropped.
TEST(SequencerMemoryTest, AGradientThatEndedWithItsEpochIsAskedAnew) {
  for (const size_t rows_per_event : {0, 1, 256}) {
    SCOPED_TRACE(rows_per_event);
    Sequencer sequencer = World(2, rows_per_event);
    const size_t before = sequencer.HeldRows();
    Actions actions;
    const InstanceKey forward = Forward(&sequencer, 1, 0);
    Cast(&sequencer, WithTape(sequencer, 10, 0, 1));
    Cast(&sequencer, Gradient(sequencer, 11, 0, forward, 0));
    sequencer.Abort(Error(), At(0), &actions);
    Cast(&sequencer, Gradient(sequencer, 21, 0, forward, 1));
    Cast(&sequencer, WithTape(sequencer, 20, 0, 2));
    sequencer.Abort(Error(), At(0), &actions);
    Cast(&sequencer, Gradient(sequencer, 31, 0, forward, 2));
    actions.clear();
    sequencer.DropTape(Rank(1), forward, false, sequencer.epoch(), At(0), &actions);
    EXPECT_THAT(Launched(actions), ElementsAre(31)) << "rank 1 gives zeros";
    // Another call has the row of one that never was.
    Cast(&sequencer, Simple(sequencer, 40, 0, 3));
    const Error never = ErrorOf(Refused(&sequencer, Gradient(sequencer, 41, 0, WorldKey(1, 2), 0)));
    EXPECT_EQ(never.reason, Reason::kMismatch);
    EXPECT_TRUE(never.alone);
    for (int i = 0; i < 10; ++i) sequencer.Advance(At(0), &actions);
    const size_t never_launched = rows_per_event == 0 ? 2 : 0;
    EXPECT_EQ(sequencer.HeldRows(), before + 1 + never_launched);
    sequencer.DropTape(Rank(0), forward, false, sequencer.epoch(), At(0), &actions);
    EXPECT_EQ(sequencer.HeldRows(), before + never_launched);
  }
}

TEST(SequencerMemoryTest, TapesOfAnEpochThatEndedTakeNoRoom) {
  SequencerOptions options;
  options.max_tapes = 2;
  options.rows_per_event = 0;
  Sequencer sequencer(2, options);
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    for (int64_t call = 2 * epoch; call < 2 * epoch + 2; ++call) {
      Cast(&sequencer, WithTape(sequencer, 1 + call, 0, call));
    }
    Actions actions;
    sequencer.Abort(Error(), At(0), &actions);
  }
  // The other rank is where the first one was, whose tape is there and hidden.
  EXPECT_THAT(Failed(Cast(&sequencer, WithTape(sequencer, 10, 1, 0))), ElementsAre(10));
  EXPECT_THAT(Launched(Cast(&sequencer, WithTape(sequencer, 11, 0, 6))), IsEmpty());
  EXPECT_THAT(Launched(Cast(&sequencer, WithTape(sequencer, 12, 1, 6))), ElementsAre(11, 12));
  // What has been launched goes on to take its room.
  Actions actions;
  sequencer.Abort(Error(), At(0), &actions);
  Cast(&sequencer, WithTape(sequencer, 20, 0, 7));
  EXPECT_EQ(ErrorOf(Refused(&sequencer, WithTape(sequencer, 21, 0, 8))).reason, Reason::kQuota);
}

TEST(SequencerMemoryTest, AnEventLetsGoOfSoManyEntriesOfAMemberThatIsGone) {
  for (const bool dies : {false, true}) {
    SCOPED_TRACE(dies);
    Sequencer sequencer = World(2, /*rows_per_event=*/2);
    const size_t before = sequencer.HeldRows();
    for (int64_t call = 0; call < 5; ++call) {
      Forward(&sequencer, 1 + 2 * call, call, /*without_tape=*/{0});
    }
    Actions actions;
    if (dies) {
      sequencer.Dead(Rank(1), "killed", At(0), &actions);
    } else {
      sequencer.Left(Rank(1), At(0), &actions);
    }
    EXPECT_GT(sequencer.HeldRows(), before);
    EXPECT_LT(sequencer.HeldRows(), before + 5);
    for (int i = 0; i < 3; ++i) sequencer.Advance(At(1), &actions);
    EXPECT_EQ(sequencer.HeldRows(), before);
  }
}

TEST(SequencerMemoryTest, EntriesOfAMemberThatHasLeftAreNoneBeforeTheyGo) {
  Sequencer sequencer = World(2, /*rows_per_event=*/0);
  const InstanceKey of_both = Forward(&sequencer, 1, 0);
  const InstanceKey of_leaver = Forward(&sequencer, 3, 1, /*without_tape=*/{0});
  Actions actions;
  sequencer.Left(Rank(1), At(0), &actions);
  EXPECT_THAT(actions, IsEmpty());
  const absl::Status none = Refused(&sequencer, Gradient(sequencer, 10, 0, of_leaver, 0));
  EXPECT_EQ(ErrorOf(none).reason, Reason::kMismatch) << none;
  EXPECT_TRUE(ErrorOf(none).alone);
  const Actions alone = Cast(&sequencer, Gradient(sequencer, 11, 0, of_both, 0));
  ASSERT_THAT(Launched(alone), ElementsAre(11));
  EXPECT_THAT(alone[0].instances[0].absent, ElementsAre(GroupRank(1)));
}

// A gradient that `rank` could not take; no epoch ends for it.
void RefuseGradient(Sequencer* sequencer, int32_t rank) {
  RefusedMember member;
  member.rank = Rank(rank);
  member.drops_tapes = true;
  Error why(Reason::kBadType, "no");
  why.alone = true;
  Actions actions;
  sequencer->Refuse({member}, sequencer->epoch(), why, At(0), &actions);
  EXPECT_THAT(actions, IsEmpty());
}

TEST(SequencerMemoryTest, AnEventLetsGoOfSoManyEntriesOfAMemberThatWasRefusedAGradient) {
  Sequencer sequencer = World(2, /*rows_per_event=*/2);
  const size_t before = sequencer.HeldRows();
  for (int64_t call = 0; call < 5; ++call) {
    Forward(&sequencer, 1 + 2 * call, call, /*without_tape=*/{0});
  }
  RefuseGradient(&sequencer, 1);
  EXPECT_EQ(sequencer.HeldRows(), before + 3);
  Actions actions;
  sequencer.Advance(At(1), &actions);
  EXPECT_EQ(sequencer.HeldRows(), before + 1);
  sequencer.Advance(At(1), &actions);
  EXPECT_EQ(sequencer.HeldRows(), before);
}

TEST(SequencerMemoryTest, EntriesOfAMemberThatWasRefusedAGradientAreNoneBeforeTheyGo) {
  Sequencer sequencer = World(2, /*rows_per_event=*/0);
  const InstanceKey of_both = Forward(&sequencer, 1, 0);
  const InstanceKey of_refused = Forward(&sequencer, 3, 1, /*without_tape=*/{0});
  RefuseGradient(&sequencer, 1);
  RefuseGradient(&sequencer, 1);
  const size_t held = sequencer.HeldRows();
  // What it records from there on is as ever.
  const InstanceKey later = Forward(&sequencer, 5, 2);
  Cast(&sequencer, Gradient(sequencer, 10, 1, later, 0));
  EXPECT_THAT(Launched(Cast(&sequencer, Gradient(sequencer, 11, 0, later, 0))),
              ElementsAre(10, 11));
  const absl::Status none = Refused(&sequencer, Gradient(sequencer, 12, 0, of_refused, 0));
  EXPECT_EQ(ErrorOf(none).reason, Reason::kMismatch) << none;
  EXPECT_TRUE(ErrorOf(none).alone);
  const absl::Status own = Refused(&sequencer, Gradient(sequencer, 13, 1, of_both, 0));
  EXPECT_EQ(own.code(), absl::StatusCode::kInvalidArgument) << own;
  const auto asks_in_vain = [&](int64_t run, int32_t request) {
    const Actions actions = Cast(&sequencer, Gradient(sequencer, run, 0, of_both, request));
    EXPECT_THAT(FailedAlone(actions), ElementsAre(run));
    EXPECT_THAT(actions[0].error->message, HasSubstr("could not take a gradient since"));
  };
  asks_in_vain(14, 0);
  // It has none to drop; nor does it give zeros when it has left.
  Actions actions;
  sequencer.DropTape(Rank(1), of_both, false, Epoch(1), At(0), &actions);
  asks_in_vain(15, 1);
  RefuseGradient(&sequencer, 1);
  sequencer.Left(Rank(1), At(0), &actions);
  asks_in_vain(16, 2);
  EXPECT_THAT(actions, IsEmpty());
  EXPECT_EQ(sequencer.HeldRows(), held + 1);
}

TEST(SequencerMemoryTest, AnEndedEpochHandsOutItsTables) {
  Sequencer sequencer = World(2);
  for (int64_t call = 0; call < 3; ++call) {
    Cast(&sequencer, WithTape(sequencer, 1 + call, 0, call));
  }
  Actions actions;
  sequencer.Abort(Error(), At(0), &actions);
  EXPECT_EQ(actions.back().kind, Kind::kEpochEnded);
  EXPECT_EQ(actions.back().remaining_rows, 3);
  EXPECT_NE(actions.back().remains, nullptr);
  const Epoch open = sequencer.epoch();
  for (int32_t member = 0; member < 2; ++member) {
    Cast(&sequencer, WithTape(sequencer, 10 + member, member, 3));
  }
  actions.clear();
  sequencer.Shrink(At(0), &actions);  // and with them all tapes
  EXPECT_EQ(actions.back().epoch, open);
  EXPECT_EQ(actions.back().remaining_rows, 1);
}

// Sends of rank 0 to itself that could not be made.
RefusedMember RefusedSends(int64_t first_tag, int64_t last_tag, int64_t next) {
  RefusedMember member;
  for (int64_t tag = first_tag; tag <= last_tag; ++tag) {
    RefusedCalls calls;
    calls.source = GroupRank(0);
    calls.destination = GroupRank(0);
    calls.tag = tag;
    calls.next = next;
    member.calls.push_back(calls);
  }
  return member;
}

TEST(SequencerMemoryTest, RefusalsAddNoMoreCountersThanTheySay) {
  Sequencer sequencer = World(1);
  Error why(Reason::kBadType, "no");
  why.alone = true;
  Actions actions;
  const size_t before = sequencer.HeldRows();
  // Nothing is counted: that is where an end of a pair begins.
  EXPECT_EQ(sequencer.NewPairs({RefusedSends(1, 100, 0)}), 0u);
  sequencer.Refuse({RefusedSends(1, 100, 0)}, Epoch(1), why, At(0), &actions);
  EXPECT_EQ(sequencer.HeldRows(), before);
  EXPECT_EQ(sequencer.NewPairs({RefusedSends(1, 100, 1)}), 100u);
  sequencer.Refuse({RefusedSends(1, 100, 1)}, Epoch(1), why, At(0), &actions);
  EXPECT_EQ(sequencer.HeldRows(), before + 100);
  EXPECT_EQ(sequencer.NewPairs({RefusedSends(51, 150, 2)}), 50u);
  // In a later step all begin again.
  RefusedMember later = RefusedSends(1, 100, 1);
  later.step = 1;
  EXPECT_EQ(sequencer.NewPairs({later}), 100u);
}

TEST(SequencerMemoryTest, OfALongLineTheEndIsKept) {
  Sequencer sequencer = World(2);
  Error why(Reason::kBadType, "no");
  why.alone = true;
  why.source = std::string(4000, 'x') + "/train.cc:7";
  Actions actions;
  sequencer.Refuse({RefusedAt(0, 0, 1)}, Epoch(1), why, At(0), &actions);
  const Actions passed = Cast(&sequencer, Simple(sequencer, 1, 1, 0));
  ASSERT_THAT(Failed(passed), ElementsAre(1));
  EXPECT_THAT(passed[0].error->message, HasSubstr("x/train.cc:7"));
  EXPECT_LT(passed[0].error->message.size(), 1000u);
}

// Launches a gang of both ranks' `calls` calls; the second rank's stand in `line`, and nobody has
// made just such runs before.
void LaunchNew(Sequencer* sequencer, int64_t number, int64_t base, int64_t calls,
               const std::string& line) {
  Actions actions;
  for (int32_t rank = 0; rank < 2; ++rank) {
    TestRun run(2 * number + rank + 1, sequencer->epoch());
    const int32_t slot = run.Slot(kWorld, 2, {rank}, {base});
    for (int64_t call = 0; call < calls; ++call) {
      Participation& part = run.AllReduce(slot, rank);
      part.node = static_cast<int32_t>(number * calls + call);
      part.descriptor.dims = {number + 1};
      part.source = rank == 0 ? absl::StrCat(std::string(400, 'x'), number, ".cc:1") : line;
    }
    actions = Cast(sequencer, run);
  }
  for (const SequencerAction& action : actions) {
    Actions none;
    if (action.kind != Kind::kLaunch) continue;
    sequencer->Finished(action.ticket, absl::OkStatus(), At(0), &none);
  }
}

TEST(SequencerMemoryTest, WhatAWorldRemembersOfItsGangsAndLinesIsSmall) {
  constexpr int64_t kCalls = 300;
  SequencerOptions options;
  options.check_call_sites = CheckCallSites::kWarn;
  Sequencer sequencer(2, options);
  const std::string line = std::string(400, 'y') + ".cc:1";
  LaunchNew(&sequencer, 0, 0, kCalls, line);  // what it holds for a run is there from now on
  const HeapUse heap;
  for (int64_t number = 1; number < 1200; ++number) {
    LaunchNew(&sequencer, number, number * kCalls, kCalls, line);
  }
  std::cout << heap.bytes() << " bytes" << std::endl;
  EXPECT_LT(heap.bytes(), 100 << 10);
}

// Searches have numbers that rows remember: one that came again would find them searched.
TEST(SequencerMemoryTest, SearchesAreNumberedForCenturies) {
  constexpr int64_t kSearchesASecond = 10'000'000;
  constexpr int64_t kSecondsOfACentury = int64_t{100} * 366 * 24 * 3600;
  const auto last = std::numeric_limits<sequencer_tables::SearchNumber>::max();
  EXPECT_GT(last / kSearchesASecond, kSecondsOfACentury);
  EXPECT_TRUE((
      std::is_same_v<decltype(sequencer_tables::Component::mark), sequencer_tables::SearchNumber>));
  EXPECT_TRUE((std::is_same_v<decltype(sequencer_tables::Component::circle),
                              sequencer_tables::SearchNumber>));
}

// Whatever the tables have grown to: what waits, what may be differentiated, and what was once.
TEST(SequencerMemoryTest, HoldsNoMoreBytesThanItSays) {
  for (const int32_t size : {1, 2, 4, 5, 8, 64}) {
    SCOPED_TRACE(size);
    const int64_t calls = 40000 / size;
    std::deque<TestRun> runs;
    for (int32_t rank = 0; rank < size; ++rank) {
      runs.emplace_back(0, Epoch(1));
      runs.back().AllReduce(runs.back().Slot(kWorld, size, {rank}, {0}), rank).wants_grad = true;
      runs.back().Build();
    }
    // Of its own there is a little for each member, for the runs that are under way, and at first.
    const int64_t little = 4096 + 512 * size;
    Actions actions;
    actions.reserve(64);
    const HeapUse heap;
    Sequencer sequencer(size, SequencerOptions());
    int64_t votes = 0;
    const auto vote = [&](int32_t rank, int64_t call) {
      Vote& next = runs[static_cast<size_t>(rank)].vote();
      next.run = RunHandle(++votes);
      next.epoch = sequencer.epoch();
      next.groups[0].base[0].call = call;
      const int64_t room = sequencer.HeldBytes() + sequencer.BytesPerCall();
      actions.clear();
      ASSERT_TRUE(sequencer.Submit(next, At(0), &actions).ok());
      if (!actions.empty()) {
        const Ticket ticket = actions[0].ticket;
        actions.clear();
        sequencer.Finished(ticket, absl::OkStatus(), At(0), &actions);
      }
      EXPECT_LE(sequencer.HeldBytes(), std::max(room, int64_t{8192}));
    };
    for (int64_t call = 0; call < calls; ++call) {
      for (int32_t rank = 0; rank < size; ++rank) vote(rank, call);
      ASSERT_LE(heap.bytes(), sequencer.HeldBytes() + little) << call;
    }
    for (int64_t call = 0; call < calls; ++call) {
      for (int32_t rank = 0; rank < size; ++rank) {
        sequencer.DropTape(Rank(rank), WorldKey(1, call), false, Epoch(1), At(0), &actions);
      }
      ASSERT_LE(heap.bytes(), sequencer.HeldBytes() + little) << call;
    }
    EXPECT_EQ(sequencer.HeldRows(), 0u);
    if (size == 1) continue;
    // Pending runs have bytes of their own.
    for (int64_t call = 0; call < calls; ++call) {
      vote(0, calls + call);
      ASSERT_LE(heap.bytes(), sequencer.HeldBytes() + little + 512 * (call + 1)) << call;
    }
  }
}

// Tables that are full move what they have to others: a vote never waits until all has been moved.
TEST(SequencerMemoryTest, AVoteMovesLittleHoweverMuchThereIs) {
  constexpr int64_t kCalls = 64;  // of a run
  constexpr int64_t kMostBytes = 1 << 20;
  const SequencerOptions options;
  struct Case {
    int32_t size;  // of which the first rank votes
    bool wants_grad;
    size_t calls;
  };
  // What may be differentiated, what waits, and the runs of what waits.
  for (const Case& c : {Case{1, true, options.max_tapes}, Case{2, false, options.max_pending}}) {
    SCOPED_TRACE(c.calls);
    TestRun run(0, Epoch(1));
    const int32_t slot = run.Slot(kWorld, c.size, {0}, {0});
    for (int64_t call = 0; call < kCalls; ++call) run.AllReduce(slot, 0).wants_grad = c.wants_grad;
    run.Build();
    Sequencer sequencer(c.size, options);
    Actions actions;
    int64_t most = 0;
    for (int64_t call = 0; call < static_cast<int64_t>(c.calls); call += kCalls) {
      run.vote().run = RunHandle(call + 1);
      run.vote().groups[0].base[0].call = call;
      const HeapUse heap;
      actions.clear();
      ASSERT_TRUE(sequencer.Submit(run.vote(), At(0), &actions).ok());
      most = std::max(most, heap.most_bytes());
      if (actions.empty()) continue;
      const Ticket ticket = actions[0].ticket;
      sequencer.Finished(ticket, absl::OkStatus(), At(0), &actions);
    }
    std::cout << most << " bytes" << std::endl;
    EXPECT_LT(most, kMostBytes);
  }
}

TEST(SequencerMemoryTest, CausesOfEpochsTakeNoMoreThanTheyMay) {
  for (const size_t bytes : {size_t{8}, Error::kMaxBytes, 16 * Error::kMaxBytes}) {
    SCOPED_TRACE(bytes);
    Sequencer sequencer = World(2);
    Error cause(Reason::kAborted, std::string(bytes, 'x'));
    cause.source = std::string(bytes, 'y');
    const HeapUse heap;
    for (int epoch = 0; epoch < 200; ++epoch) {
      {
        Actions actions;
        sequencer.Abort(cause, At(0), &actions);
      }
      ASSERT_LE(heap.bytes(), Sequencer::kMostCauseBytes + 16384) << epoch;
    }
    const Epoch last(sequencer.epoch().value() - 1);
    EXPECT_EQ(sequencer.Cause(last)->reason, Reason::kAborted);
    // Of usual ones all are there that are to be.
    const Epoch first(last.value() + 1 - SequencerOptions().kept_causes);
    EXPECT_EQ(sequencer.Cause(first).has_value(), bytes == 8);
  }
}

// Their graphs may be gone.
TEST(SequencerMemoryTest, LabelsOfTapesAreOfTheBytesThatItSays) {
  constexpr int64_t kCalls = 2000;
  Actions actions;
  const HeapUse heap;
  Sequencer sequencer = World(1);
  for (int64_t call = 0; call < kCalls; ++call) {
    const int64_t room = sequencer.HeldBytes() + sequencer.BytesPerCall();
    {
      TestRun run(1 + call, Epoch(1));
      Participation& part = run.AllReduce(run.Slot(kWorld, 1, {0}, {call}), 0);
      part.wants_grad = true;
      part.leads_to_leaf = true;
      part.descriptor.dims.assign(200, call);
      part.source = absl::StrCat(std::string(400, 'x'), call, ".cc:1");
      ASSERT_TRUE(sequencer.Submit(run.Build(), At(0), &actions).ok());
    }
    sequencer.Finished(actions[0].ticket, absl::OkStatus(), At(0), &actions);
    actions = Actions();
    ASSERT_LE(sequencer.HeldBytes(), std::max(room, int64_t{16384}));
    ASSERT_LE(heap.bytes(), sequencer.HeldBytes() + 16384) << call;
  }
  const int64_t held = sequencer.HeldBytes();
  for (int64_t call = 0; call < kCalls; ++call) {
    sequencer.DropTape(Rank(0), WorldKey(1, call), false, Epoch(1), At(0), &actions);
  }
  EXPECT_LT(sequencer.HeldBytes(), held - kCalls * 512);
}

// A gradient's name is the longer the higher its order is, and what does not stand in the name's
// row is on the heap.
TEST(SequencerMemoryTest, PathsOfGradientsAreOfTheBytesThatItSays) {
  constexpr int64_t kCalls = 1500;
  constexpr int64_t kLittle = 16384;
  for (const int size : {1, 2}) {
    for (const size_t order : {size_t{2}, size_t{3}, size_t{31}, kMaxGradientOrder}) {
      SCOPED_TRACE(absl::StrCat(size, " ranks, order ", order));
      Actions actions;
      actions.reserve(64);
      const HeapUse heap;
      Sequencer sequencer = World(size);
      int64_t votes = 0;
      // The gradients of all ranks, or of the first alone: then they wait.
      const auto ask = [&](const InstanceKey& forward, int64_t request, bool all) {
        for (int32_t rank = 0; rank < (all ? size : 1); ++rank) {
          const int64_t before = sequencer.HeldBytes();
          int64_t room = before + sequencer.BytesPerCall();
          {
            TestRun run(++votes, Epoch(1));
            const int32_t slot = run.Slot(kWorld, size, {rank}, {1});
            run.GradientOf(forward, static_cast<int32_t>(request), slot, rank).wants_grad = true;
            const Vote& vote = run.Build();
            room += *sequencer.PathBytes(vote);
            ASSERT_TRUE(sequencer.Submit(vote, At(0), &actions).ok());
          }
          EXPECT_LE(sequencer.HeldBytes(), std::max(room, before + kLittle));
          for (const SequencerAction& action : std::exchange(actions, {})) {
            Actions none;
            sequencer.Finished(action.ticket, absl::OkStatus(), At(0), &none);
          }
        }
      };
      InstanceKey forward = Forward(&sequencer, 1000000, 0);
      sequencer.Finished(Ticket(1), absl::OkStatus(), At(0), &actions);
      while (forward.path.size() + 1 < order) {
        ask(forward, 0, /*all=*/true);
        forward = forward.Gradient({0, 0});
      }
      for (int64_t request = 0; request < kCalls; ++request) {
        ask(forward, request, /*all=*/true);
        ASSERT_LE(heap.bytes(), sequencer.HeldBytes() + kLittle) << request;
      }
      const int64_t most = heap.bytes();
      for (int64_t request = 0; request < kCalls; ++request) {
        const InstanceKey key = forward.Gradient({0, request});
        for (int32_t rank = 0; rank < size; ++rank) {
          sequencer.DropTape(Rank(rank), key, false, Epoch(1), At(0), &actions);
        }
        ASSERT_LE(heap.bytes(), sequencer.HeldBytes() + kLittle) << request;
      }
      if (order > 2) {
        const auto path = static_cast<int64_t>(order * sizeof(InstanceKey::Request));
        EXPECT_LE(heap.bytes(), most - kCalls * path + kLittle) << "free rows have no path";
      }
      if (size == 1) continue;
      // Pending runs have bytes of their own.
      for (int64_t request = 0; request < kCalls; ++request) {
        ask(forward, kCalls + request, /*all=*/false);
        ASSERT_LE(heap.bytes(), sequencer.HeldBytes() + kLittle + 512 * (request + 1)) << request;
      }
      const int64_t pending = sequencer.HeldBytes();
      sequencer.Abort(Error(Reason::kAborted), At(0), &actions);
      actions = Actions();
      ASSERT_LE(heap.bytes(), sequencer.HeldBytes() + kLittle);
      EXPECT_LT(sequencer.HeldBytes(), pending);
    }
  }
}

// What is looked at once is not there for long.
TEST(SequencerMemoryTest, TheNamesOfAVoteGoWithIt) {
  Sequencer sequencer = World(1);
  InstanceKey forward = Forward(&sequencer, 1, 0);
  const auto deep = [&](int64_t number) {
    TestRun run(number, Epoch(1));
    const int32_t slot = run.Slot(kWorld, 1, {0}, {1});
    run.GradientOf(forward, 0, slot, 0);
    for (int32_t order = 1; order < static_cast<int32_t>(kMaxGradientOrder); ++order) {
      run.GradientHere(order - 1, 0, slot, 0);
    }
    return run;
  };
  // What the lists of a vote have grown to stays.
  TestRun first = deep(2);
  ASSERT_TRUE(sequencer.Resolve(first.Build()).ok());
  sequencer.CallsOf(first.vote());
  const int64_t before = sequencer.HeldBytes();
  const HeapUse heap;
  const auto keys = sequencer.Resolve(first.vote());
  ASSERT_TRUE(keys.ok());
  int64_t paths = 0;
  for (const InstanceKey& key : *keys) paths += HeapBytesOf(key);
  EXPECT_GT(paths, 32768);
  EXPECT_EQ(sequencer.HeldBytes(), before + paths);
  EXPECT_EQ(heap.bytes(), paths);
  EXPECT_THAT(sequencer.CallsOf(first.vote()), SizeIs(1));
  EXPECT_EQ(sequencer.HeldBytes(), before);
  EXPECT_LT(heap.bytes(), 1024);
  first.GradientHere(static_cast<int32_t>(kMaxGradientOrder) - 1, 0, 0, 0);
  EXPECT_THAT(sequencer.Resolve(first.Build()).status().message(), HasSubstr("up to order 64"));
  EXPECT_LT(sequencer.HeldBytes(), before + paths / 2);
  TestRun second = deep(2);
  ASSERT_TRUE(sequencer.Resolve(second.Build()).ok());
  Cast(&sequencer, std::move(second));
  EXPECT_EQ(sequencer.HeldRows(), 1u);
  EXPECT_LE(sequencer.HeldBytes(), before + 64 * sequencer.BytesPerCall());
  EXPECT_LT(heap.bytes(), sequencer.HeldBytes());
}

// Rows of lists are counted as they come and go, and not when somebody asks.
TEST(SequencerMemoryTest, LiveRowsAreThoseOfGroupsAndPairsThatAreThere) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937 random(seed);
  const auto below = [&](int64_t end) {
    return std::uniform_int_distribution<int64_t>(0, end - 1)(random);
  };
  Sequencer sequencer = World(6, /*rows_per_event=*/4);
  const size_t none = sequencer.LiveRows();
  int64_t groups = 0;  // with those that a reform has taken the members of
  std::set<std::tuple<std::vector<int32_t>, int64_t, int64_t>> requests;
  std::map<int32_t, std::set<int64_t>> tags;  // by rank, of its step
  std::vector<int64_t> steps(6);
  int64_t votes = 0;
  Actions actions;
  for (int event = 0; event < 2000; ++event) {
    const auto rank = static_cast<int32_t>(below(sequencer.size()));
    if (below(3) == 0) {
      std::vector<int32_t> list;
      for (int32_t member = 0; member < sequencer.size(); ++member) {
        if (member == rank || below(3) == 0) list.push_back(member);
      }
      const InstanceKey::Request request{below(2), below(3)};
      std::vector<Rank> ranks;
      for (const int32_t member : list) ranks.push_back(Rank(member));
      ASSERT_TRUE(sequencer.AddGroup(Rank(rank), ranks, request).ok());
      if (requests.emplace(list, request.step, request.number).second) ++groups;
    } else if (below(400) == 0 && sequencer.size() > 2) {
      sequencer.Dead(Rank(rank), "killed", At(0), &actions);
      sequencer.Shrink(At(0), &actions);
      requests.clear();
      tags.clear();
      steps.assign(static_cast<size_t>(sequencer.size()), 0);
    } else {
      int64_t& step = steps[static_cast<size_t>(rank)];
      if (below(20) == 0) {
        ++step;
        tags.erase(rank);
      }
      const int64_t tag = below(100);
      TestRun run(++votes, sequencer.epoch(), step);
      const int32_t slot = run.Slot(kWorld, sequencer.size(), {rank}, {0});
      run.SendTo(slot, rank, rank, tag);
      run.RecvFrom(slot, rank, rank, tag);
      for (const SequencerAction& action : Cast(&sequencer, std::move(run))) {
        ASSERT_EQ(action.kind, Kind::kLaunch);
        sequencer.Finished(action.ticket, absl::OkStatus(), At(0), &actions);
      }
      tags[rank].insert(tag);
    }
    size_t pairs = 0;
    for (const auto& used : tags) pairs += 2 * used.second.size();
    ASSERT_EQ(sequencer.LiveRows(), none + static_cast<size_t>(groups) + requests.size() + pairs);
    ASSERT_GE(sequencer.HeldRows(), pairs);
  }
  while (sequencer.NextDeadline() <= At(0)) sequencer.Advance(At(0), &actions);
  EXPECT_EQ(sequencer.LiveRows(),
            none + static_cast<size_t>(groups) + requests.size() + sequencer.HeldRows());
}

// --- Calls that are there whole -----------------------------------------------------------------

// By the first members of the group; the last one's position is further on by `ahead`.
absl::optional<MetGang> Met(Sequencer* sequencer, GroupId group, int64_t call, int64_t ahead = 0,
                            bool named = true) {
  static const std::string* const source = new std::string("meet.cc:7");
  const size_t count = sequencer->GroupMembers(group)->size();
  std::vector<CallPosition> at(count, {0, call, 0});
  at.back().call += ahead;
  std::vector<MetCall> calls(count);
  for (size_t m = 0; m < count; ++m) {
    calls[m].source = source;
    if (named) calls[m].at = &at[m];
  }
  return sequencer->Meet(group, calls, static_cast<int64_t>(count), At(1));
}

// As CanonicalState(), and what that leaves out.
std::string WholeState(const Sequencer& sequencer) {
  std::string state = sequencer.CanonicalState();
  absl::StrAppend(&state, " rows ", sequencer.LiveRows(), " due ",
                  absl::FormatTime(sequencer.NextDeadline()));
  for (int32_t rank = 0; rank < sequencer.size(); ++rank) {
    const absl::optional<InstanceKey> last = sequencer.LastPublished(Rank(rank));
    if (last.has_value()) absl::StrAppend(&state, " last ", last->ToString());
    for (int32_t g = 0; g < sequencer.num_groups(); ++g) {
      absl::StrAppend(&state, " ", sequencer.NextCall(GroupId(g), Rank(rank)).ToString());
    }
  }
  return state;
}

TEST(SequencerMeetTest, IsWhatVotesALaunchAndItsEndComeTo) {
  Sequencer by_votes = World(3);
  const GroupId pair = AddGroup(&by_votes, {2, 0});
  Sequencer whole = by_votes;
  int64_t run = 0;
  const auto vote = [&](GroupId group, int64_t call, bool named) {
    const std::vector<Rank> members(by_votes.GroupMembers(group)->begin(),
                                    by_votes.GroupMembers(group)->end());
    const auto count = static_cast<int32_t>(members.size());
    Actions actions;
    for (int32_t m = 0; m < count; ++m) {
      TestRun one(++run, by_votes.epoch());
      one.AllReduce(one.Slot(group, count, {m},
                             named ? std::vector<int64_t>{call} : std::vector<int64_t>{}),
                    m)
          .source = "meet.cc:7";
      actions = Cast(&by_votes, std::move(one), At(1));
    }
    EXPECT_THAT(actions, SizeIs(1));
    const Ticket ticket = actions.front().ticket;
    by_votes.Finished(ticket, absl::OkStatus(), At(1), &actions);
    return std::make_pair(ticket, actions.front().instances.front().key);
  };
  for (int64_t call = 0; call < 3; ++call) {
    for (const GroupId group : {kWorld, pair}) {
      for (const bool named : {true, false}) {
        const int64_t next = 2 * call + (named ? 0 : 1);
        const auto voted = vote(group, next, named);
        const absl::optional<MetGang> met = Met(&whole, group, next, 0, named);
        ASSERT_TRUE(met.has_value());
        EXPECT_EQ(met->ticket, voted.first);
        EXPECT_EQ(met->key, voted.second);
        EXPECT_EQ(WholeState(whole), WholeState(by_votes));
      }
    }
  }
  // Who goes back is told the same; who is behind, too, with the line of the last call.
  for (const int64_t call : {5, 9}) {
    Actions a;
    Actions b;
    TestRun one = Simple(by_votes, ++run, 1, call);
    const absl::Status voted = by_votes.Submit(one.Build(), At(1), &a);
    EXPECT_EQ(whole.Submit(one.Build(), At(1), &b), voted);
    TestRun behind = Simple(by_votes, ++run, 0, 6);
    EXPECT_EQ(whole.Submit(behind.Build(), At(1), &b), by_votes.Submit(behind.Build(), At(1), &a));
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) {
      ASSERT_EQ(a[i].kind, b[i].kind);
      if (a[i].error != nullptr) {
        EXPECT_EQ(a[i].error->message, b[i].error->message);
      }
    }
    EXPECT_EQ(WholeState(whole), WholeState(by_votes));
  }
}

TEST(SequencerMeetTest, NeedsAllAtOnePositionAndNothingElse) {
  const Sequencer fresh = World(3);
  const auto refuses = [](Sequencer sequencer, int64_t call, int64_t ahead = 0) {
    const std::string before = WholeState(sequencer);
    EXPECT_FALSE(Met(&sequencer, kWorld, call, ahead).has_value());
    EXPECT_EQ(WholeState(sequencer), before);
  };
  Actions actions;
  refuses(fresh, /*call=*/1);
  refuses(fresh, 0, /*ahead=*/1);
  {
    Sequencer pending = fresh;
    Cast(&pending, Simple(pending, 1, 0, 0));
    refuses(pending, 0);
    refuses(pending, 1);
  }
  {
    Sequencer launched = fresh;
    for (int32_t m = 0; m < 3; ++m) actions = Cast(&launched, Simple(launched, m + 1, m, 0));
    EXPECT_FALSE(launched.IsQuiet());
    refuses(launched, 1);
    launched.Finished(actions.front().ticket, absl::OkStatus(), At(0), &actions);
    EXPECT_TRUE(Met(&launched, kWorld, 1).has_value());
  }
  {
    Sequencer left = fresh;
    left.Left(Rank(1), At(0), &actions);
    refuses(left, 0);
  }
  {
    Sequencer dead = fresh;
    dead.Dead(Rank(1), "it is dead", At(0), &actions);
    refuses(dead, 0);
  }
  {
    // Its step is over for one of them.
    Sequencer out_of_line = fresh;
    RefusedMember member;
    member.rank = Rank(2);
    member.rest_of_step = true;
    out_of_line.Refuse({member}, Epoch(1), Error(Reason::kMalformed, "no"), At(0), &actions);
    refuses(out_of_line, 0);
  }
  {
    SequencerOptions options;
    options.max_gang_size = 5;
    refuses(Sequencer(3, options), 0);
    options.max_gang_size = 6;
    Sequencer enough(3, options);
    EXPECT_TRUE(Met(&enough, kWorld, 0).has_value());
  }
}

TEST(SequencerMemoryTest, DoesNotGrowWithTheNumberOfInstances) {
  Sequencer sequencer = World(2);
  size_t size = 0;
  int64_t run = 0;
  for (int64_t i = 0; i < 20000; ++i) {
    const bool tape = i % 2 == 1;
    Actions actions;
    for (int32_t member = 0; member < 2; ++member) {
      actions = Cast(&sequencer, tape ? WithTape(sequencer, ++run, member, i)
                                      : Simple(sequencer, ++run, member, i));
    }
    ASSERT_THAT(actions, SizeIs(1));
    sequencer.Finished(actions[0].ticket, absl::OkStatus(), At(0), &actions);
    if (tape) {
      // Even ones are consumed by a backward on both ranks, odd ones dropped unused.
      for (int32_t member = 0; member < 2 && i % 4 == 1; ++member) {
        actions = Cast(&sequencer, Gradient(sequencer, ++run, member, WorldKey(1, i), 0));
        if (member == 1) {
          ASSERT_THAT(actions, SizeIs(1));
          sequencer.Finished(actions[0].ticket, absl::OkStatus(), At(0), &actions);
        }
      }
      for (int32_t rank = 0; rank < 2; ++rank) {
        sequencer.DropTape(Rank(rank), WorldKey(1, i), i % 4 == 1, Epoch(1), At(0), &actions);
      }
    }
    if (i == 100) size = sequencer.StateSize();
  }
  EXPECT_EQ(sequencer.StateSize(), size);
}

}  // namespace
}  // namespace chorus
