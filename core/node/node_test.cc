// The node driven directly: frames in, outcomes and tensors out, over a real backend.
#include "core/node/node.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "core/base/unique_fd.h"
#include "core/node/node_rig.h"
#include "core/ops/graph_builder.h"
#include "core/runtime/devices.h"
#include "core/transport/command.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

TEST_F(NodeTest, OutputsOfARunHaveNamesOfTheirOwn) {
  Start(1);
  GraphBuilder builder(1, {});
  const ValueIndex x = AddInput(&builder, TensorType(DType::kF32, {1}), /*donatable=*/false);
  for (int i = 0; i < 3; ++i) AddOutput(&builder, AddOp(&builder, "neg", {x}), -1);
  ranks_[0]->Register(0, builder.Build());
  const InlineData one = DirectRank::Inline({1});
  ranks_[0]->Submit(DirectRank::LocalRun(0, {one}, {{4, 1}, {2, 1}, {4, 1}}));
  const absl::Status refused = ranks_[0]->LastOutcome();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()),
              testing::HasSubstr("tensor slot 4 is named by two outputs"));
  ranks_[0]->Submit(DirectRank::LocalRun(0, {one}, {{5, 1}, {6, 1}, {7, 1}}));
  EXPECT_TRUE(ranks_[0]->LastOutcome().ok());
}

TEST_F(NodeTest, AllReduceGivesEveryRankTheSum) {
  Start(3);
  for (int r = 0; r < 3; ++r) {
    ranks_[r]->Register(0, AllReduceGraph(r, 3, TensorType(DType::kF32, {4}), "train.cc:1"));
    ranks_[r]->RunInline(0, {1.0f + r, 2, 3, 10.0f * r}, {0, 1});
  }
  for (int r = 0; r < 3; ++r) {
    EXPECT_TRUE(ranks_[r]->LastOutcome().ok());
    const auto got = ranks_[r]->Read({0, 1});
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_THAT(*got, testing::ElementsAre(6, 6, 9, 30));
  }
}

// An all_reduce, and the ranks' inputs as a list and in one tensor.
Graph PathsGraph(int rank, int size) {
  GraphBuilder builder(1, {SlotOf(rank, size)});
  const ValueIndex x = AddInput(&builder, TensorType(DType::kF32, {4}));
  AddOutput(&builder, AddAllReduce(&builder, x, rank, "paths.cc:1"));
  for (const char* op : {"all_gather", "all_gather_into_tensor"}) {
    NodeSpec spec;
    spec.op = op;
    spec.inputs = {x};
    spec.collective = Collective();
    spec.collective->kind = CollectiveKind::kAllGather;
    spec.collective->rank = GroupRank(rank);
    const std::vector<ValueIndex> results = *builder.Emit(spec);
    for (const ValueIndex v : results) AddOutput(&builder, v);
  }
  return builder.Build();
}

TEST_F(NodeTest, StatsTellWhichWayBytesTook) {
  constexpr int kRanks = 3;
  constexpr int64_t kBytes = 16;
  for (const int devices_per_domain : {1, 2, kRanks}) {
    // One domain is the host's here. What all have alike is one for each domain; the list is where
    // the ranks have it if all of them are of one.
    const bool host = devices_per_domain == kRanks;
    const int domains = (kRanks + devices_per_domain - 1) / devices_per_domain;
    SCOPED_TRACE(domains);
    ranks_.clear();
    loop_.reset();
    host ? Start(kRanks) : StartOnSim(kRanks, devices_per_domain);
    for (int r = 0; r < kRanks; ++r) {
      ranks_[r]->Register(0, PathsGraph(r, kRanks));
      std::vector<TensorId> outs;
      for (int i = 0; i < 2 + kRanks; ++i) outs.push_back({i, 1});
      ranks_[r]->Submit(ranks_[r]->WorldRun(0, {DirectRank::Inline({1, 2, 3, 4.0f + r})}, outs));
    }
    for (int r = 0; r < kRanks; ++r) {
      ASSERT_TRUE(ranks_[r]->LastOutcome().ok());
      EXPECT_THAT(*ranks_[r]->Read({1 + kRanks, 1}),
                  testing::ElementsAre(1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 6));
    }
    const PathCounters paths = ranks_[0]->Stats().paths;
    EXPECT_EQ(paths.reduced_bytes, domains * kBytes);
    EXPECT_EQ(paths.copied_bytes, (host ? 1 : 2) * domains * kRanks * kBytes);
    EXPECT_EQ(paths.aliased_bytes, host ? kRanks * (kRanks - 1) * kBytes : 0);
  }
}

// Commands are not waited for one by one: a run of a graph that was refused says why.
TEST_F(NodeTest, RunsOfARefusedGraphTellWhyItWasRefused) {
  NodeOptions options;
  options.memory_limit_bytes = 6 * kLarge;  // for one of the values below, not for two
  Start(1, options);
  GraphBuilder builder(1, {});
  const ValueIndex x = AddFill(&builder, kLarge, 1);
  const ValueIndex both = AddOp(&builder, "add", {x, AddFill(&builder, kLarge, 2)});
  AddOutput(&builder, AddOp(&builder, "sum", {both}));
  ranks_[0]->Register(0, builder.Build());
  EXPECT_EQ(ErrorOf(ranks_[0]->LastOutcome()).reason, Reason::kOutOfMemory);
  ranks_[0]->RunLocal(0, {}, {0, 1});
  EXPECT_EQ(ErrorOf(ranks_[0]->LastOutcome()).reason, Reason::kOutOfMemory);
  EXPECT_EQ(ErrorOf(ranks_[0]->Read({0, 1}).status()).reason, Reason::kOutOfMemory);
  // Another generation is another graph.
  auto later = ranks_[0]->LocalRun(0, {}, {{1, 1}});
  later.graph.generation = 2;
  ranks_[0]->Submit(std::move(later));
  EXPECT_EQ(ErrorOf(ranks_[0]->LastOutcome()).reason, Reason::kUnknownName);
}

// What uses it is told why it is not there.
TEST_F(NodeTest, ATensorThatWasNotMadeStandsForTheError) {
  Start(2);
  DirectRank& rank = *ranks_[0];
  CreateTensor create;
  create.tensor = {1, 1};
  create.type = TensorType(DType::kF32, {2});
  create.device = DeviceIndex(1);  // the other rank's
  create.source = DirectRank::Inline({1, 2});
  rank.Submit(create);
  const Error refused = ErrorOf(rank.LastOutcome());
  EXPECT_EQ(refused.reason, Reason::kMalformed);
  for (int r = 0; r < 2; ++r) {
    ranks_[r]->Register(1, AllReduceGraph(r, 2, create.type, "step.cc:1"));
  }
  rank.RunOn(1, TensorId{1, 1}, {3, 1});
  // The same error, and which epoch is open now.
  const Error of_run = ErrorOf(rank.LastOutcome());
  EXPECT_EQ(of_run.message, refused.message);
  ASSERT_EQ(of_run.ended.size(), 1u);
  EXPECT_EQ(of_run.ended[0].open, Epoch(2));
  EXPECT_EQ(ErrorOf(rank.Read({1, 1}).status()).id, refused.id);
  ranks_[1]->RunInline(1, {1, 2}, {3, 1});
  const Error peer_error = ErrorOf(ranks_[1]->LastOutcome());
  EXPECT_EQ(peer_error.reason, Reason::kPeerRefused);
  EXPECT_THAT(peer_error.message, testing::HasSubstr(refused.message));
  // The name is taken: it is released like any other.
  create.device = DeviceIndex(0);
  rank.Submit(create);
  EXPECT_FALSE(rank.LastOutcome().ok());
  Release release;
  release.tensors = {{1, 1}};
  rank.Submit(release);
  create.tensor = {1, 2};
  rank.Submit(create);
  EXPECT_TRUE(rank.LastOutcome().ok()) << rank.LastOutcome();
  EXPECT_THAT(*rank.Read({1, 2}), testing::ElementsAre(1, 2));
}

TEST_F(NodeTest, CallsInDifferentLinesAreWrittenDownOnceAndTakenForOne) {
  Mutex mutex;
  std::vector<std::string> lines;
  NodeOptions options;
  options.log_failure = [&](absl::string_view, absl::string_view line) {
    MutexLock lock(&mutex);
    lines.emplace_back(line);
  };
  Start(2, options);
  for (int r = 0; r < 2; ++r) {
    ranks_.push_back(std::make_unique<DirectRank>(loop_.get(), r, 2, "warned",
                                                  std::vector<DeviceIndex>{DeviceIndex(r)},
                                                  absl::Duration(), CheckCallSites::kWarn));
  }
  for (int r = 0; r < 2; ++r) ranks_[2 + r]->AwaitWorld();
  for (int r = 0; r < 2; ++r) {
    ranks_[2 + r]->Register(
        0, AllReduceGraph(r, 2, TensorType(DType::kF32, {1}), r == 0 ? "a.cc:1" : "b.cc:2"));
    EXPECT_TRUE(ranks_[2 + r]->LastOutcome().ok());
  }
  for (int32_t call = 0; call < 3; ++call) {
    for (int r = 0; r < 2; ++r) ranks_[2 + r]->RunInline(0, {1.0f + r}, {call, 1});
    for (int r = 0; r < 2; ++r) {
      const absl::Status status = ranks_[2 + r]->LastOutcome();
      EXPECT_TRUE(status.ok()) << status;
      const auto sum = ranks_[2 + r]->Read({call, 1});
      ASSERT_TRUE(sum.ok()) << sum.status();
      EXPECT_THAT(*sum, testing::ElementsAre(3));
    }
  }
  const auto flight = ranks_[0]->Call<std::vector<FlightEvent>>(
      [&](LocalNode& node, absl::Time, auto* done) { done->Set(*node.Flight("", 100)); });
  std::vector<FlightEvent> events;
  for (const FlightEvent& event : flight) {
    if (event.kind == FlightKind::kCallSitesDiffer) events.push_back(event);
  }
  ASSERT_THAT(events, testing::SizeIs(1));
  EXPECT_EQ(events[0].world, ranks_[2]->world());
  const auto found =
      ranks_[0]->Call<absl::StatusOr<Error>>([&](LocalNode& node, absl::Time, auto* done) {
        done->Set(node.FindError(events[0].error, ""));
      });
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->reason, Reason::kMismatch);
  EXPECT_THAT(found->message, testing::AllOf(testing::HasSubstr("is called in different lines: "),
                                             testing::HasSubstr("a.cc:1 on rank 0 (pid 1000)"),
                                             testing::HasSubstr("b.cc:2 on rank 1 (pid 1001)")));
  MutexLock lock(&mutex);
  EXPECT_THAT(lines, testing::ElementsAre(absl::StrCat(
                         "failure: job=\"warned\" rank=- pid=- reason=MISMATCH error_id=",
                         found->id.value(), ": ", found->message)));
}

// Of a graph with symbols a run fixes the sizes, by its tensors; more of them than are kept.
TEST_F(NodeTest, RunsFixTheSizesOfAGraph) {
  Start(2);
  constexpr int64_t kMost = 5;
  for (int r = 0; r < 2; ++r) {
    GraphBuilder builder(1, {SlotOf(r, 2)});
    const ValueIndex x = AddInput(&builder, TensorType(DType::kF32, {kMost}));
    const ValueIndex y = AddInput(&builder, TensorType(DType::kF32, {kMost}));
    const ValueIndex same = AddInput(&builder, TensorType(DType::kF32, {kMost}));
    AddOutput(&builder, AddOp(&builder, "add", {x, same}));
    AddOutput(&builder, AddOp(&builder, "neg", {y}));
    AddOutput(&builder, AddAllReduce(&builder, AddOp(&builder, "sum", {x}), r, "sizes.cc:1"));
    Graph graph = builder.Build();
    for (const int i : {0, 1, 2}) graph.inputs[i].type.dims[0] = Dim::Symbol(i % 2, kMost);
    ranks_[r]->Register(0, graph);
    ASSERT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
  }
  int32_t slot = 0;
  const auto create = [&](DirectRank* rank, int64_t n) {
    CreateTensor command;
    command.tensor = {slot++, 1};
    command.type = TensorType(DType::kF32, {n});
    command.device = DeviceIndex(rank == ranks_[0].get() ? 0 : 1);
    command.source = DirectRank::Inline(std::vector<float>(static_cast<size_t>(n), 1));
    const TensorId id = command.tensor;
    rank->Submit(std::move(command));
    return id;
  };
  for (int round = 0; round < 2; ++round) {
    for (int64_t a = 1; a <= kMost; ++a) {
      for (int64_t b = 1; b <= kMost; ++b) {
        TensorId outs[2][3];
        for (int r = 0; r < 2; ++r) {
          DirectRank& rank = *ranks_[r];
          // Ranks may differ where the collective does not.
          const int64_t rows = r == 0 ? a : b;
          const TensorId x = create(&rank, rows);
          const TensorId y = create(&rank, b);
          for (TensorId& out : outs[r]) out = {slot++, 1};
          // The bytes of a third stand in the frame.
          rank.Submit(rank.WorldRun(
              0, {x, y, DirectRank::Inline(std::vector<float>(static_cast<size_t>(rows), 2))},
              {outs[r][0], outs[r][1], outs[r][2]}));
        }
        for (int r = 0; r < 2; ++r) {
          const int64_t rows = r == 0 ? a : b;
          EXPECT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
          EXPECT_EQ(*ranks_[r]->Read(outs[r][0]), std::vector<float>(static_cast<size_t>(rows), 3));
          EXPECT_EQ(*ranks_[r]->Read(outs[r][1]), std::vector<float>(static_cast<size_t>(b), -1));
          EXPECT_THAT(*ranks_[r]->Read(outs[r][2]), testing::ElementsAre(a + b));
        }
      }
    }
  }
  // What no size can be taken from, or no size can be.
  DirectRank& rank = *ranks_[0];
  const auto refused = [&](std::vector<Binding> inputs) {
    rank.Submit(rank.WorldRun(0, inputs, {{slot++, 1}, {slot++, 1}, {slot++, 1}}));
    const std::string message(rank.LastOutcome().message());
    rank.NextEpoch();
    return message;
  };
  const TensorId two = create(&rank, 2);
  const TensorId three = create(&rank, 3);
  const TensorId six = create(&rank, 6);
  const TensorId none = create(&rank, 0);
  EXPECT_THAT(refused({DirectRank::Inline({1, 1}), two, DirectRank::Inline({1, 1})}),
              testing::HasSubstr("symbol 0 of the graph has no size"));
  EXPECT_THAT(refused({six, two, six}), testing::HasSubstr("got size 6"));
  EXPECT_THAT(refused({none, two, none}), testing::HasSubstr("got size 0"));
  EXPECT_THAT(refused({two, two, three}), testing::HasSubstr("input 0 of the graph is f32[3]"));
  EXPECT_THAT(refused({two, two, DirectRank::Inline({1})}),
              testing::HasSubstr("4 inline bytes for f32[2]"));
}

TEST_F(NodeTest, ItMayEndWhileARunWaitsOnHost) {
  Start(2);
  EndWhileARunWaits();
}

// There the run's memory belongs to the devices.
TEST_F(NodeTest, ItMayEndWhileARunWaitsOnSim) {
  StartOnSim(2);
  EndWhileARunWaits();
}

// A client of ours finds these mistakes itself; another may not.
TEST_F(NodeTest, WhatARunBindsIsCheckedWhateverItsClientHasChecked) {
  Start(2);
  DirectRank& rank = *ranks_[0];
  CreateTensor create;
  create.tensor = {5, 1};
  create.type = TensorType(DType::kF32, {2});
  create.device = DeviceIndex(0);
  create.source = DirectRank::Inline({1, 2});
  rank.Submit(std::move(create));
  EXPECT_TRUE(rank.LastOutcome().ok());
  rank.Register(0, AllReduceGraph(0, 2, TensorType(DType::kF32, {4}), "a.cc:1"));
  rank.RunOn(0, TensorId{5, 1}, {0, 1});
  const absl::Status type = rank.LastOutcome();
  EXPECT_EQ(type.code(), absl::StatusCode::kInvalidArgument) << type;
  EXPECT_THAT(std::string(type.message()), testing::HasSubstr("f32[2]"));
  rank.NextEpoch();
  // The other session's rank.
  rank.Register(1, AllReduceGraph(1, 2, TensorType(DType::kF32, {4}), "a.cc:2"));
  rank.RunInline(1, {1, 2, 3, 4}, {1, 1});
  const absl::Status member = rank.LastOutcome();
  EXPECT_EQ(member.code(), absl::StatusCode::kInvalidArgument) << member;
}

TEST_F(NodeTest, ALeaseIsAsLongAsTheDaemonSays) {
  NodeOptions options;
  options.max_lease = absl::Minutes(2);
  backend_ = HostDevices(1);
  loop_ = std::make_unique<NodeLoop>(options, DevicesOf(backend_.get()));
  const auto open = [&](absl::Duration lease) {
    Promise<absl::StatusOr<SessionInfo>> opened;
    loop_->PostOwn([&](LocalNode& node, absl::Time now) {
      OpenSessionRequest request;
      request.tenant = "uid:0";
      request.lease = lease;
      opened.Set(node.OpenSession(request, now));
    });
    return opened.Get();
  };
  EXPECT_TRUE(open(absl::Minutes(2)).ok());
  const Error refused = ErrorOf(open(absl::Minutes(2) + absl::Nanoseconds(1)).status());
  EXPECT_EQ(refused.reason, Reason::kMalformed);
  EXPECT_EQ(ErrorOf(open(absl::InfiniteDuration()).status()).message,
            "lease: expected at most 2m, got inf");
}

// A hostile client does not wait for Join to return.
TEST_F(NodeTest, ARunInAWorldThatIsNotCompleteIsRefusedAndNothingElse) {
  backend_ = HostDevices(2);
  loop_ = std::make_unique<NodeLoop>(NodeOptions(), DevicesOf(backend_.get()));
  DirectRank early(loop_.get(), 0, 2, "job", {DeviceIndex(0)});
  const std::vector<WorldInfo> worlds =
      early.Call<std::vector<WorldInfo>>([](LocalNode& node, absl::Time now, auto* done) {
        done->Set(node.Worlds("", absl::nullopt, now)->rows);
      });
  ASSERT_EQ(worlds.size(), 1u);
  early.Register(0, AllReduceGraph(0, 2, TensorType(DType::kF32, {4}), "early.cc:1"));
  auto run = early.WorldRun(0, {DirectRank::Inline({1, 2, 3, 4})}, {{0, 1}});
  run.groups[0].world = worlds[0].id;
  run.groups[0].epoch = Epoch(1);
  early.Submit(std::move(run));
  EXPECT_EQ(ErrorOf(early.LastOutcome()).reason, Reason::kWrongState) << early.LastOutcome();
  DirectRank late(loop_.get(), 1, 2, "job", {DeviceIndex(1)});
  early.AwaitWorld();
  late.AwaitWorld();
}

TEST_F(NodeTest, ARunUsesWhatStandsOnItsDevicesOnly) {
  StartOn(HostDevices(2), {{DeviceIndex(0), DeviceIndex(1)}}, {});
  DirectRank& rank = *ranks_[0];
  CreateTensor create;
  create.tensor = {0, 1};
  create.type = TensorType(DType::kF32, {2});
  create.device = DeviceIndex(1);
  create.source = DirectRank::Inline({3, 4});
  rank.Submit(std::move(create));
  ASSERT_TRUE(rank.LastOutcome().ok()) << rank.LastOutcome();
  rank.Register(0, SameGraph(2));
  ASSERT_TRUE(rank.LastOutcome().ok()) << rank.LastOutcome();
  chorus::Run run = DirectRank::LocalRun(0, {TensorId{0, 1}}, {{1, 1}});
  rank.Submit(run);  // on the session's first device
  const absl::Status elsewhere = rank.LastOutcome();
  EXPECT_EQ(elsewhere.code(), absl::StatusCode::kInvalidArgument) << elsewhere;
  EXPECT_THAT(std::string(elsewhere.message()),
              testing::HasSubstr("is on device 0, tensor 0.1 on device 1; copy it first"));
  run.outputs[0].id = {2, 1};
  run.devices = {DeviceIndex(1)};
  rank.Submit(run);
  EXPECT_TRUE(rank.LastOutcome().ok()) << rank.LastOutcome();
  EXPECT_THAT(*rank.Read({2, 1}), testing::ElementsAre(3, 4));
}

TEST_F(NodeTest, ARankRunsOnTheDeviceThatItJoinedWith) {
  StartOn(HostDevices(2), {{DeviceIndex(0), DeviceIndex(1)}}, {});
  DirectRank& rank = *ranks_[0];
  rank.Register(0, AllReduceGraph(0, 1, TensorType(DType::kF32, {2}), "a.cc:1"));
  ASSERT_TRUE(rank.LastOutcome().ok()) << rank.LastOutcome();
  chorus::Run run = rank.WorldRun(0, {DirectRank::Inline({3, 4})}, {{0, 1}});
  run.devices = {DeviceIndex(1)};
  rank.Submit(std::move(run));
  const absl::Status elsewhere = rank.LastOutcome();
  EXPECT_EQ(elsewhere.code(), absl::StatusCode::kInvalidArgument) << elsewhere;
  EXPECT_THAT(std::string(elsewhere.message()),
              testing::HasSubstr("rank 0 joined with device 0; the run puts it on device 1"));
  rank.NextEpoch();
  run = rank.WorldRun(0, {DirectRank::Inline({3, 4})}, {{1, 1}});
  run.devices = {DeviceIndex(0)};
  rank.Submit(std::move(run));
  EXPECT_TRUE(rank.LastOutcome().ok()) << rank.LastOutcome();
  EXPECT_THAT(*rank.Read({1, 1}), testing::ElementsAre(3, 4));
}

TEST_F(NodeTest, WhoGivesUpWaitingForAnOutcomeLeavesNothingBehind) {
  Start(2);
  ranks_[0]->Register(0, AllReduceGraph(0, 2, TensorType(DType::kF32, {4}), "a.cc:1"));
  ranks_[0]->RunInline(0, {1, 2, 3, 4}, {0, 1});
  // Of a run that waits for the other rank, and of one that was never asked for.
  for (const int64_t ahead : {0, 1000}) {
    auto token = std::make_shared<int>();
    const std::weak_ptr<int> weak = token;
    Promise<Reason> reason;
    loop_->PostOwn([&, token = std::move(token)](LocalNode& node, absl::Time now) {
      node.WaitOutcome(
          ranks_[0]->session(), Sequence(ranks_[0]->last_sequence().value() + ahead), now,
          [&reason, token](const Outcome& o) { reason.Set(ErrorOf(o.status).reason); });
    });
    EXPECT_EQ(reason.Get(), Reason::kTransportTimeout);
    // The timer's own copy goes when it has been called.
    ranks_[0]->Stats();
    EXPECT_TRUE(weak.expired()) << ahead;
  }
}

// A pipe stands for a pidfd: the holder of its other end sees when it is closed.
TEST_F(NodeTest, AClosedSessionIsNotWatchedAnyMore) {
  Start(2);
  const auto watch = [&](const DirectRank& rank) {
    int ends[2] = {-1, -1};
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    loop_->WatchProcess("", rank.session(), ends[0]);
    return UniqueFd(ends[1]);
  };
  const auto is_closed = [](const UniqueFd& end, absl::Duration patience) {
    pollfd poll_end{end.get(), 0, 0};  // POLLERR: nobody can read it
    return poll(&poll_end, 1, static_cast<int>(absl::ToInt64Milliseconds(patience))) == 1;
  };
  const UniqueFd first = watch(*ranks_[0]);
  const UniqueFd second = watch(*ranks_[1]);
  const auto close = [&](DirectRank* rank) {
    return rank->Call<absl::Status>([&](LocalNode& node, absl::Time now, auto* done) {
      done->Set(node.CloseSession(rank->session(), now));
    });
  };
  ASSERT_TRUE(close(ranks_[0].get()).ok());
  EXPECT_TRUE(is_closed(first, kPatience));
  EXPECT_FALSE(is_closed(second, absl::ZeroDuration()));
  // Too late: the session has ended.
  EXPECT_TRUE(is_closed(watch(*ranks_[0]), kPatience));
}

}  // namespace
}  // namespace chorus::node
