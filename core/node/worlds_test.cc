#include "core/node/worlds.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/backend/backend_options.h"
#include "core/backend/host/host_backend.h"
#include "core/base/bytes.h"
#include "core/base/error.h"
#include "core/base/ids.h"
#include "core/base/thread_pool.h"
#include "core/base/work.h"
#include "core/graph/encoding.h"
#include "core/node/info.h"
#include "core/node/node.h"
#include "core/node/node_rig.h"
#include "core/node/requests.h"
#include "core/ops/graph_builder.h"
#include "core/ops/host_kernels.h"
#include "core/runtime/devices.h"
#include "core/transport/command.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

class WorldsTest : public ::testing::Test {
 protected:
  // A session for each of so many devices.
  void Start(int devices) {
    StartNode(devices);
    for (int device = 0; device < devices; ++device) OpenSession({DeviceIndex(device)});
  }
  void StartNode(int devices) {
    node_ = nullptr;
    HostBackendOptions host;
    host.devices = devices;
    host.pool = &pool_;
    host.make_kernel = MakeHostKernel;
    backend_ = CreateHostBackend(host);
    node_ = std::make_unique<LocalNode>(NodeOptions(), DevicesOf(backend_.get()), [] {});
  }
  void OpenSession(std::vector<DeviceIndex> devices) {
    OpenSessionRequest open;
    open.tenant = "uid:0";
    open.devices = std::move(devices);
    sessions_.push_back(node_->OpenSession(open, now_)->id);
  }
  static JoinRequest RequestOf(int rank, int size) {
    JoinRequest request;
    request.name = "job";
    request.size = size;
    request.rank = Rank(rank);
    return request;
  }
  // One world, whose ranks are the first so many sessions.
  WorldId JoinAll(int size) {
    WorldId world;
    for (int rank = 0; rank < size; ++rank) {
      node_->JoinWorld(session(rank), RequestOf(rank, size), now_,
                       [&](const absl::StatusOr<WorldInfo>& info) {
                         ASSERT_TRUE(info.ok()) << info.status();
                         world = info->id;
                       });
    }
    return world;
  }
  void Poll(absl::Time now) {
    while (node_->Poll(now)) {
    }
  }
  SessionId session(int rank) const { return sessions_[static_cast<size_t>(rank)]; }

  const absl::Time now_ = absl::Now();
  ThreadPool pool_{1};
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<LocalNode> node_;
  std::vector<SessionId> sessions_;
};

// Each member is told of all, in the slice of the last that comes: what the largest world there can
// be has of that is counted, and no more than a slice.
TEST_F(WorldsTest, ALargeWorldIsFormedAndReformedInASlice) {
  Start(kMaxDevices);
  int told = 0;
  WorldId world;
  const auto expect_all_are_told = [&](const std::function<void(int rank)>& ask) {
    told = 0;
    for (int rank = 0; rank < kMaxDevices; ++rank) {
      EXPECT_EQ(told, 0);
      const WorkSlice slice;
      ask(rank);
      if (rank + 1 < kMaxDevices) continue;
      EXPECT_GE(SliceWork(), kMaxDevices * kMaxDevices);
      EXPECT_LE(SliceWork(), kMaxSliceWork);
    }
    EXPECT_EQ(told, kMaxDevices);
  };
  expect_all_are_told([&](int rank) {
    const JoinRequest join = RequestOf(rank, kMaxDevices);
    node_->JoinWorld(session(rank), join, now_, [&](const absl::StatusOr<WorldInfo>& info) {
      ASSERT_TRUE(info.ok()) << info.status();
      world = info->id;
      told += info->members.size() == kMaxDevices ? 1 : 0;
    });
  });
  expect_all_are_told([&](int rank) {
    ReformWorldRequest reform;
    reform.world = world;
    reform.rank = Rank(rank);
    node_->ReformWorld(session(rank), reform, now_,
                       [&](const absl::StatusOr<ReformResult>& result) {
                         ASSERT_TRUE(result.ok()) << result.status();
                         told += result->survivors.size() == kMaxDevices ? 1 : 0;
                       });
  });
}

// A call that is cancelled leaves nothing: it can be made again, and the others wait for it.
TEST_F(WorldsTest, WhoDoesNotWaitForAWorldAnyMoreHasNotAsked) {
  Start(2);
  WorldId world;
  int told = 0;
  const auto join = [&](int rank, const std::shared_ptr<int>& call, const WaitRef& wait) {
    const JoinRequest request = RequestOf(rank, 2);
    const auto joined = [&world, &told, call](const absl::StatusOr<WorldInfo>& info) {
      ASSERT_TRUE(info.ok()) << info.status();
      world = info->id;
      told += *call;
    };
    node_->JoinWorld(session(rank), request, now_, joined, wait);
  };
  const auto reform = [&](int rank, const std::shared_ptr<int>& call, const WaitRef& wait) {
    ReformWorldRequest request;
    request.world = world;
    request.rank = Rank(rank);
    const auto reformed = [&told, call](const absl::StatusOr<ReformResult>& result) {
      ASSERT_TRUE(result.ok()) << result.status();
      told += *call;
    };
    node_->ReformWorld(session(rank), request, now_, reformed, wait);
  };
  const auto ask_for_both = [&](const auto& ask) {
    told = 0;
    auto call = std::make_shared<int>(1);
    const std::weak_ptr<int> left = call;
    auto wait = std::make_shared<Wait>();
    ask(0, std::exchange(call, nullptr), wait);
    EXPECT_FALSE(left.expired());
    node_->Withdraw(wait, now_);
    EXPECT_TRUE(left.expired());
    node_->Withdraw(wait, now_);
    const auto other_wait = std::make_shared<Wait>();
    ask(1, std::make_shared<int>(10), other_wait);
    EXPECT_EQ(told, 0);
    const auto third_wait = std::make_shared<Wait>();
    ask(0, std::make_shared<int>(100), third_wait);
    EXPECT_EQ(told, 110);
    for (const WaitRef& over : {wait, other_wait, third_wait}) node_->Withdraw(over, now_);
  };
  ask_for_both(join);
  ask_for_both(reform);
}

// How calls of ranks that wait for each other end, with the time that each is given.
class WaitingTest : public WorldsTest {
 protected:
  using Ask = std::function<void(int rank, absl::Duration timeout, const WaitRef& wait)>;
  // A world of four that has not been joined.
  Ask Join() {
    Start(4);
    return [this](int rank, absl::Duration timeout, const WaitRef& wait) {
      JoinRequest request = RequestOf(rank, 4);
      request.join_timeout = timeout;
      node_->JoinWorld(session(rank), request, now_, Note<WorldInfo>(rank), wait);
    };
  }
  // One that is complete.
  Ask Reform() {
    Start(4);
    const WorldId world = JoinAll(4);
    return [this, world](int rank, absl::Duration timeout, const WaitRef& wait) {
      ReformWorldRequest request;
      request.world = world;
      request.rank = Rank(rank);
      request.timeout = timeout;
      node_->ReformWorld(session(rank), request, now_, Note<ReformResult>(rank), wait);
    };
  }
  template <typename Result>
  std::function<void(absl::StatusOr<Result>)> Note(int rank) {
    return [this, rank](const absl::StatusOr<Result>& result) {
      told_.emplace_back(rank, ErrorOf(result.status()));
    };
  }
  // Where it is over for one it is for all, so that none that gives up is missing for the others.
  void TheFirstWhoseTimeIsOverEndsIt(const Ask& ask, Reason reason) {
    ask(0, absl::Seconds(9), nullptr);
    ask(1, absl::Seconds(4), nullptr);
    const auto withdrawn = std::make_shared<Wait>();
    ask(2, absl::Seconds(1), withdrawn);
    node_->Withdraw(withdrawn, now_);
    Poll(now_ + absl::Seconds(4) - absl::Milliseconds(1));
    EXPECT_TRUE(told_.empty()) << "of who has given up the deadline counts no more";
    Poll(now_ + absl::Seconds(4));
    ASSERT_EQ(told_.size(), 2u);
    for (const int rank : {0, 1}) {
      EXPECT_EQ(told_[static_cast<size_t>(rank)].first, rank);
      const Error& error = told_[static_cast<size_t>(rank)].second;
      EXPECT_EQ(error.reason, reason);
      EXPECT_EQ(error.culprit.rank, 2) << error.message;
    }
    Poll(now_ + absl::Seconds(9));
    EXPECT_EQ(told_.size(), 2u) << "once each";
  }
  // A client sees the end of its call before the daemon does, and asks again.
  void AskingAgainEndsTheCallBefore(const Ask& ask) {
    const auto before = std::make_shared<Wait>();
    ask(0, absl::Seconds(1), before);
    ask(0, absl::Seconds(9), nullptr);
    ASSERT_EQ(told_.size(), 1u);
    EXPECT_EQ(told_[0].second.reason, Reason::kCancelled);
    node_->Withdraw(before, now_);
    Poll(now_ + absl::Seconds(1));
    for (const int rank : {1, 2, 3}) ask(rank, absl::Seconds(9), nullptr);
    ASSERT_EQ(told_.size(), 5u);
    for (size_t i = 1; i < told_.size(); ++i) {
      EXPECT_EQ(told_[i].second.code, absl::StatusCode::kOk) << told_[i].second.message;
    }
  }

  std::vector<std::pair<int, Error>> told_;  // each with its rank
};

TEST_F(WaitingTest, TheFirstWhoseTimeIsOverEndsAJoin) {
  TheFirstWhoseTimeIsOverEndsIt(Join(), Reason::kJoinTimeout);
}
TEST_F(WaitingTest, TheFirstWhoseTimeIsOverEndsAReform) {
  TheFirstWhoseTimeIsOverEndsIt(Reform(), Reason::kAgreeTimeout);
}
TEST_F(WaitingTest, JoiningAgainEndsTheCallBefore) { AskingAgainEndsTheCallBefore(Join()); }
TEST_F(WaitingTest, ReformingAgainEndsTheCallBefore) { AskingAgainEndsTheCallBefore(Reform()); }

// Of an earlier one, whose ranks are gone, nothing is left that would end it.
TEST_F(WorldsTest, AReformHasItsWholeTime) {
  Start(3);
  const WorldId world = JoinAll(3);
  absl::Status told[3];
  const auto reform = [&](int rank, absl::Time now) {
    ReformWorldRequest request;
    request.world = world;
    request.rank = Rank(rank);
    request.timeout = absl::Seconds(4);
    node_->ReformWorld(session(rank), request, now,
                       [&told, rank](const absl::StatusOr<ReformResult>& result) {
                         told[rank] = result.status();
                       });
  };
  reform(0, now_);
  const absl::Time later = now_ + absl::Seconds(3);
  ASSERT_TRUE(node_->CloseSession(session(0), later).ok());
  EXPECT_FALSE(told[0].ok());
  reform(1, later);
  Poll(now_ + absl::Seconds(4));
  Poll(later + absl::Seconds(4) - absl::Milliseconds(1));
  EXPECT_TRUE(told[1].ok()) << told[1];
  Poll(later + absl::Seconds(4));
  EXPECT_EQ(ErrorOf(told[1]).reason, Reason::kAgreeTimeout) << told[1];
}

// Its launcher starts it as the first time: the size that it gives is right, and it is told so.
TEST_F(WorldsTest, ARankThatIsStartedAgainIsToldThatItsWorldHasShrunk) {
  Start(3);
  const WorldId world = JoinAll(3);
  ASSERT_TRUE(node_->CloseSession(session(2), now_).ok());
  OpenSession({DeviceIndex(2)});
  const auto join_again = [this](int size) {
    absl::Status told;
    node_->JoinWorld(session(3), RequestOf(2, size), now_,
                     [&told](const absl::StatusOr<WorldInfo>& info) { told = info.status(); });
    return ErrorOf(told).reason;
  };
  EXPECT_EQ(join_again(3), Reason::kNeedsReform);
  EXPECT_EQ(join_again(4), Reason::kWorldSize);
  for (const int rank : {0, 1}) {
    ReformWorldRequest request;
    request.world = world;
    request.rank = Rank(rank);
    node_->ReformWorld(
        session(rank), request, now_,
        [](const absl::StatusOr<ReformResult>& result) { EXPECT_TRUE(result.ok()); });
  }
  EXPECT_EQ(join_again(3), Reason::kNeedsReform);
  EXPECT_EQ(join_again(4), Reason::kWorldSize);
}

// Ranks 0 and 1 of two worlds are one session's, rank 2 is another's.
class SeveralRanksTest : public WorldsTest {
 protected:
  SeveralRanksTest() { StartAnew(); }
  void StartAnew() {
    sessions_.clear();
    pair_ = GroupId(-1);
    std::fill(std::begin(last_), std::end(last_), 0);
    StartNode(3);
    OpenSession({DeviceIndex(0), DeviceIndex(1)});
    OpenSession({DeviceIndex(2)});
    world_ = JoinAs("job", 3);
    other_ = JoinAs("other", 3);
  }

  // Device by rank.
  WorldId JoinAs(const std::string& name, int size) {
    WorldId world;
    for (int rank = 0; rank < size; ++rank) {
      JoinRequest join = RequestOf(rank, size);
      join.name = name;
      join.device = DeviceIndex(rank);
      node_->JoinWorld(SessionOf(rank), join, now_, [&](const absl::StatusOr<WorldInfo>& info) {
        ASSERT_TRUE(info.ok()) << info.status();
        world = info->id;
      });
    }
    return world;
  }
  SessionId SessionOf(int rank) const { return session(rank == 2 ? 1 : 0); }
  GroupId GroupOf(const std::vector<Rank>& members) {
    const absl::StatusOr<GroupId> group =
        node_->CreateGroup(SessionOf(members[0].value()), {world_, members[0], members, {}, {}});
    EXPECT_TRUE(group.ok()) << group.status();
    return *group;
  }
  // What comes of a rank's command; OK and not `over` while nothing has.
  struct Told {
    Sequence sequence;
    Error error;
    bool over = false;
  };
  using ToldRef = std::shared_ptr<Told>;
  ToldRef Submit(int rank, CommandBody body) {
    const auto told = std::make_shared<Told>();
    told->sequence = Sequence(++last_[rank == 2 ? 1 : 0]);
    const Command command{told->sequence, std::move(body)};
    ByteWriter frame;
    EncodeFrame(command, &frame);
    node_->Submit(SessionOf(rank), std::string(frame.bytes()), now_,
                  [told](const Outcome& outcome) {
                    told->over = true;
                    if (!outcome.status.ok()) told->error = ErrorOf(outcome.status);
                  });
    Poll(now_);
    return told;
  }
  void Register(int rank, int32_t slot, const Graph& graph) {
    RegisterGraph command;
    command.graph = {slot, 1};
    command.encoded = EncodeGraph(graph);
    ExpectDone(Submit(rank, std::move(command)));
  }
  void ExpectDone(const ToldRef& told) {
    while (!told->over) Poll(now_);
    EXPECT_EQ(told->error.code, absl::StatusCode::kOk) << told->error.message;
  }
  // A run of a rank's, on its device.
  static chorus::Run RunOf(int rank, int32_t graph, const Binding& input, TensorId out) {
    chorus::Run run = DirectRank::LocalRun(graph, {input}, {out});
    run.devices = {DeviceIndex(rank)};
    return run;
  }
  struct InGroup {
    WorldId world;
    GroupId group;
    int member = 0;
    int size = 0;
    int64_t step = 0;
  };
  // Its all_reduce, its first in that group and step or the one behind those before.
  ToldRef AllReduce(int rank, const InGroup& in, const Binding& input, TensorId out) {
    const int32_t graph = next_graph_++;
    Register(rank, graph,
             AllReduceGraph(in.member, in.size, TensorType(DType::kF32, {1}), "a.cc:1"));
    return Submit(rank, Called(in, RunOf(rank, graph, input, out)));
  }
  static chorus::Run Called(const InGroup& in, chorus::Run run) {
    run.groups.emplace_back();
    RunGroup& group = run.groups.back();
    group.world = in.world;
    group.group = in.group;
    group.epoch = Epoch(1);
    if (in.step > 0) group.base.push_back({in.step, 0, 0});
    return run;
  }
  // Ranks 1 and 2 are its members 0 and 1.
  InGroup Pair(int member) {
    if (pair_.value() < 0) pair_ = GroupOf({Rank(1), Rank(2)});
    return {world_, pair_, member, 2};
  }
  InGroup All(int rank) const { return {world_, GroupId(0), rank, 3}; }
  InGroup Other(int rank) const { return {other_, GroupId(0), rank, 3}; }
  // A rank's sum of two tensors, a local run.
  ToldRef Add(int rank, TensorId a, TensorId b, TensorId out) {
    const int32_t graph = next_graph_++;
    GraphBuilder sum(1, {});
    const TensorType type(DType::kF32, {1});
    const ValueIndex x = AddInput(&sum, type);
    AddOutput(&sum, AddOp(&sum, "add", {x, AddInput(&sum, type)}));
    Register(rank, graph, sum.Build());
    chorus::Run run = RunOf(rank, graph, a, out);
    run.inputs.push_back(b);
    return Submit(rank, std::move(run));
  }
  void AbortOther() {
    ASSERT_TRUE(node_->AbortWorld(SessionOf(1), {other_, Rank(1), Epoch(), "enough"}, now_).ok());
    Poll(now_);
  }

  const InlineData x_ = DirectRank::Inline({1});
  WorldId world_;
  WorldId other_;
  GroupId pair_{-1};
  int64_t last_[2] = {};  // commands, by session
  int32_t next_graph_ = 0;
};

TEST_F(SeveralRanksTest, WhoLeavesTakesNoCallsOfItsSessionsOtherRanksWithIt) {
  const ToldRef first = AllReduce(1, Pair(0), x_, {0, 1});
  ASSERT_TRUE(node_->LeaveWorld(SessionOf(0), world_, Rank(0), now_).ok());
  Poll(now_);
  EXPECT_FALSE(first->over) << first->error.message;
  const ToldRef second = AllReduce(2, Pair(1), x_, {0, 1});
  ExpectDone(first);
  ExpectDone(second);
}

TEST_F(SeveralRanksTest, WhoLeavesTakesItsOwnCallsWithIt) {
  const ToldRef own = AllReduce(1, Pair(0), x_, {0, 1});
  ASSERT_TRUE(node_->LeaveWorld(SessionOf(1), world_, Rank(1), now_).ok());
  Poll(now_);
  EXPECT_EQ(own->error.reason, Reason::kCancelled) << own->error.message;
  EXPECT_EQ(own->error.culprit.rank, 1);
}

// It lay between two calls of the rank, of which one is done and one has failed alone. It waits for
// another world, and nobody for it.
TEST_F(SeveralRanksTest, ALocalRunThatTheWorldKnowsEndsNoEpochWhenItsLastRankLeaves) {
  const ToldRef before = AllReduce(2, Pair(1), x_, {0, 1});
  AllReduce(2, Other(2), x_, {1, 1});
  const ToldRef local = Add(2, {0, 1}, {1, 1}, {2, 1});
  const ToldRef behind = AllReduce(2, Pair(1), TensorId{2, 1}, {3, 1});
  ExpectDone(AllReduce(1, Pair(0), x_, {0, 1}));
  ExpectDone(before);
  const GroupId others = GroupOf({Rank(0), Rank(1)});
  const ToldRef waits = AllReduce(1, {world_, others, 1, 2, /*step=*/1}, x_, {1, 1});
  EXPECT_TRUE(behind->error.alone) << behind->error.message;
  EXPECT_FALSE(local->over) << local->error.message;
  ASSERT_TRUE(node_->LeaveWorld(SessionOf(2), world_, Rank(2), now_).ok());
  Poll(now_);
  EXPECT_EQ(local->error.reason, Reason::kCancelled) << local->error.message;
  EXPECT_TRUE(local->error.alone);
  EXPECT_FALSE(waits->over) << waits->error.message;
  ExpectDone(AllReduce(0, {world_, others, 0, 2, /*step=*/1}, x_, {2, 1}));
  ExpectDone(waits);
}

TEST_F(SeveralRanksTest, TheRankWhoseCallIsRefusedOrCancelledIsNamed) {
  struct Way {
    const char* what;
    std::function<void()> end;
  };
  const Way ways[] = {
      {"before its vote",
       [&] {
         Submit(1, Called(Pair(0), RunOf(1, /*graph=*/999, x_, {9, 1})));
       }},
      {"cancelled",
       [&] {
         Submit(1, Cancel{AllReduce(1, All(1), x_, {9, 1})->sequence});
       }},
      {"after its vote",
       [&] {
         AllReduce(1, Other(1), x_, {8, 1});
         AllReduce(1, Pair(0), TensorId{8, 1}, {9, 1});
         AbortOther();
       }},
      {"a local run of it",
       [&] {
         AllReduce(1, All(1), x_, {7, 1});
         AllReduce(1, Other(1), x_, {8, 1});
         Add(1, {7, 1}, {8, 1}, {9, 1});
         AllReduce(1, Pair(0), TensorId{9, 1}, {10, 1});
         AbortOther();
       }},
      {"a local run of it, cancelled",
       [&] {
         AllReduce(1, All(1), x_, {7, 1});
         AllReduce(1, Other(1), x_, {8, 1});
         const Sequence local = Add(1, {7, 1}, {8, 1}, {9, 1})->sequence;
         AllReduce(1, Pair(0), TensorId{9, 1}, {10, 1});
         Submit(1, Cancel{local});
       }},
  };
  for (const Way& way : ways) {
    SCOPED_TRACE(way.what);
    StartAnew();
    const ToldRef waits = AllReduce(2, Pair(1), x_, {0, 1});
    way.end();
    ASSERT_TRUE(waits->over);
    EXPECT_EQ(waits->error.culprit.rank, 1) << waits->error.message;
    EXPECT_THAT(waits->error.message, testing::HasSubstr("rank 1"));
  }
}

// Whatever its groups, and the session's ranks, are by then.
TEST_F(SeveralRanksTest, WhatComesBehindAReformFailsWithTheCauseOfItsEpoch) {
  const auto run_of_all = [&](int64_t epoch, TensorId out) {
    const int32_t graph = next_graph_++;
    Register(2, graph, AllReduceGraph(2, 3, TensorType(DType::kF32, {1}), "a.cc:1"));
    chorus::Run run = Called(All(2), RunOf(2, graph, x_, out));
    run.groups[0].epoch = Epoch(epoch);
    return run;
  };
  Pair(1);
  node_->SessionDied(SessionOf(0), now_);
  Poll(now_);
  ReformWorldRequest reform;
  reform.world = world_;
  reform.rank = Rank(2);
  ReformResult reformed;
  node_->ReformWorld(SessionOf(2), reform, now_, [&](const absl::StatusOr<ReformResult>& result) {
    ASSERT_TRUE(result.ok()) << result.status();
    reformed = *result;
  });
  ASSERT_EQ(reformed.size, 1);
  ASSERT_EQ(reformed.rank, Rank(0));
  const auto expect = [&](const ToldRef& told, Reason reason) {
    EXPECT_EQ(told->error.reason, reason) << told->error.message;
    EXPECT_THAT(told->error.ended, testing::ElementsAre(Error::EndedEpoch{world_, reformed.epoch}));
  };
  expect(Submit(2, run_of_all(1, {0, 1})), Reason::kPeerDied);
  expect(AllReduce(2, Pair(1), x_, {1, 1}), Reason::kPeerDied);
  expect(Submit(2, run_of_all(reformed.epoch.value() - 1, {2, 1})), Reason::kEpochEnded);
  chorus::Refuse refuse;
  refuse.world = world_;
  refuse.epoch = Epoch(1);
  refuse.why = Error(Reason::kBadType, "no such shape");
  refuse.members.emplace_back().rank = Rank(2);
  expect(Submit(2, refuse), Reason::kBadType);
  refuse.by_hand = true;
  expect(Submit(2, refuse), Reason::kBadType);
  ExpectDone(Submit(2, EnterEpoch{world_, Epoch(2)}));
  chorus::Run next = RunOf(2, next_graph_, x_, {3, 1});
  Register(2, next_graph_, AllReduceGraph(0, 1, TensorType(DType::kF32, {1}), "a.cc:1"));
  next = Called({world_, GroupId(0)}, std::move(next));
  next.groups[0].epoch = reformed.epoch;
  ExpectDone(Submit(2, std::move(next)));
}

}  // namespace
}  // namespace chorus::node
