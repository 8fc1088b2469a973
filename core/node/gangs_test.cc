// What becomes of launched work that nobody wants any more. And when the devices of aborted work
// are ended by force: a world says when its ranks are told, and the node when a device has had its
// time, for others' memory goes with it.
#include "core/node/gangs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <iostream>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/base/counting_heap.h"
#include "core/base/error.h"
#include "core/base/work.h"
#include "core/graph/encoding.h"
#include "core/node/node.h"
#include "core/node/node_rig.h"
#include "core/node/records.h"
#include "core/ops/testing/rank_builder.h"
#include "core/runtime/devices.h"
#include "core/runtime/executor.h"
#include "core/runtime/messages.h"
#include "core/transport/command.h"

namespace chorus::node {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int kDevices = 3;
constexpr absl::Duration kMoment = absl::Milliseconds(1);

// What devices were told, and what they say: nothing ends before the test says so.
struct Told {
  std::vector<Executor::OnEvent> on_event{kDevices};
  std::vector<std::pair<int, LaunchId>> launches;  // each with its device
  std::set<LaunchId> abandoned;
  int abandonings = 0;      // calls
  int aborted = 0;          // ends of communicators
  std::vector<int> killed;  // devices
};

class ToldExecutor : public Executor {
 public:
  ToldExecutor(Told* told, int device) : told_(told), device_(device) {}
  void LoadPlan(PlanId id, absl::string_view) override { Say(LoadedMessage{id, {}}); }
  std::shared_ptr<void> UnloadPlan(PlanId) override { return nullptr; }
  void OpenCommunicator(CommunicatorId id, absl::Span<const int>, int) override {
    Say(OpenedMessage{id, {}});
  }
  void AbortCommunicator(CommunicatorId, absl::Status) override { ++told_->aborted; }
  void CloseCommunicator(CommunicatorId) override {}
  bool Launch(absl::string_view launch) override {
    told_->launches.emplace_back(device_, LaunchOf(launch));
    return false;
  }
  bool Continue() override { return false; }
  void Abandon(LaunchId launch) override {
    told_->abandoned.insert(launch);
    ++told_->abandonings;
  }
  void Settled(LaunchId) override {}
  void Settled(TransferId) override {}
  void Upload(TransferId id, int32_t, DeviceAddress, const void*, int64_t) override {
    Say(TransferredMessage{id, {}});
  }
  void Download(TransferId id, int32_t, void*, DeviceAddress, int64_t, LaunchId) override {
    Say(TransferredMessage{id, {}});
  }
  void Kill(absl::string_view) override { told_->killed.push_back(device_); }

  void Say(const EventMessage& event) {
    ByteWriter bytes;
    EncodeEvent(event, &bytes);
    told_->on_event[static_cast<size_t>(device_)](bytes.bytes());
  }

 private:
  Told* const told_;
  const int device_;
};

class ToldDevices : public Devices {
 public:
  explicit ToldDevices(Told* told) : told_(told) {
    info_.backend = "told";
    info_.domains.assign(kDevices, 0);
    info_.host_addressable = true;
  }
  const DevicesInfo& info() const override { return info_; }
  absl::StatusOr<int64_t> WorkspaceBytes(const NodeView&,
                                         absl::Span<const TensorType>) const override {
    return 0;
  }
  absl::StatusOr<DeviceAddress> Allocate(int, int64_t) override {
    return absl::InternalError("the host has the memory");
  }
  int64_t Free(int, DeviceAddress) override { return 0; }
  int64_t freed() const override { return 0; }
  std::unique_ptr<Executor> OpenExecutor(int device, Executor::OnEvent on_event,
                                         DeviceExecutorOptions) override {
    told_->on_event[static_cast<size_t>(device)] = std::move(on_event);
    return std::make_unique<ToldExecutor>(told_, device);
  }

 private:
  Told* const told_;
  DevicesInfo info_;
};

// A rank's all_reduces of its input, one after the other, and the last one's negative, `results`
// times.
Graph AllReduces(int rank, int calls, int results = 0) {
  testing::RankBuilder b(rank, 2);
  b.set_wants_grad(false);
  const ValueIndex x = b.Input(TensorType(DType::kF32, {1}));
  ValueIndex last = x;
  for (int i = 0; i < calls; ++i) last = b.AllReduce(x);
  for (int i = 0; i < results; ++i) AddOutput(&b.graph(), AddOp(&b.graph(), "neg", {last}));
  return b.graph().Build();
}

class GangsTest : public ::testing::Test {
 protected:
  // A session on device 0, and what it was told of its commands.
  struct Client {
    SessionId session;
    WorldId world;
    int64_t sequence = 0;
    std::vector<Reason> told;
    Error last_error;  // that it was told
  };

  explicit GangsTest(const NodeOptions& options = Options())
      : node_(options, std::make_unique<ToldDevices>(&told_), [] {}) {
    ForgetLargestSlice();
  }
  // Its devices' executors end once nothing is under way.
  ~GangsTest() override {
    for (size_t i = 0; i < told_.launches.size(); ++i) End(i);
  }

  static NodeOptions Options() {
    NodeOptions options;
    options.sequencer.exec_timeout = absl::Seconds(300);
    options.kill_timeout = absl::Seconds(10);
    options.max_inline_graph_bytes = int64_t{1} << 20;
    return options;
  }

  // A rank of a world, its own unless told otherwise, with a collective graph, 0, and a local
  // one, 1.
  Client* Open(const std::string& tenant, absl::Duration exec_timeout, int rank = 0, int size = 1) {
    Client* const client = &clients_.emplace_back();
    OpenSessionRequest open;
    open.tenant = tenant;
    open.devices = {DeviceIndex(rank)};
    open.lease = absl::Hours(1);
    client->session = node_.OpenSession(open, now_)->id;
    JoinRequest join;
    join.name = "job";
    join.size = size;
    join.rank = Rank(rank);
    join.exec_timeout = exec_timeout;
    node_.JoinWorld(client->session, join, now_,
                    [client](const absl::StatusOr<WorldInfo>& info) { client->world = info->id; });
    const Graph collective = AllReduceGraph(rank, size, TensorType(DType::kF32, {1}), "a.cc:1");
    int32_t slot = 0;
    for (const Graph& graph : {collective, NegateGraph(1)}) Register(client, slot++, graph);
    EXPECT_THAT(client->told, Each(Reason::kUnspecified));
    return client;
  }
  void Submit(Client* client, CommandBody body) {
    Send(client, std::move(body));
    Poll();
  }
  // The same, and the node has done no more than it does at once.
  void Send(Client* client, CommandBody body) {
    const Command command{Sequence(++client->sequence), std::move(body)};
    ByteWriter frame;
    EncodeFrame(command, &frame);
    const WorkSlice slice;  // as the loop calls it
    node_.Submit(client->session, std::string(frame.bytes()), now_, [client](const Outcome& o) {
      client->told.push_back(o.status.ok() ? Reason::kUnspecified : ErrorOf(o.status).reason);
      if (!o.status.ok()) client->last_error = ErrorOf(o.status);
    });
  }
  void Register(Client* client, int32_t slot, const Graph& graph) {
    RegisterGraph command;
    command.graph = {slot, 1};
    command.encoded = EncodeGraph(graph);
    Submit(client, std::move(command));
  }
  // One that a frame has no room for.
  void RegisterLarge(Client* client, int32_t slot, const Graph& graph) {
    const std::string encoded = EncodeGraph(graph);
    RegisterGraph command;
    command.graph = {slot, 1};
    command.staged_bytes = static_cast<int64_t>(encoded.size());
    node_.CreateStaging(client->session, command.staged_bytes,
                        [&](const absl::StatusOr<StagingArena>& arena) {
                          ASSERT_TRUE(arena.ok()) << arena.status();
                          command.staged.arena = arena->arena;
                        });
    ASSERT_TRUE(node_.WriteStaging(client->session, command.staged.arena, 0, encoded).ok());
    const size_t told = client->told.size();
    Submit(client, std::move(command));
    while (client->told.size() == told) Poll();
  }
  // Calls of its world from `call` on.
  static chorus::Run InWorld(const Client& client, int64_t call, chorus::Run run) {
    RunGroup group;
    group.world = client.world;
    group.epoch = Epoch(1);
    group.base.push_back({0, call, 0});
    run.groups.push_back(group);
    return run;
  }
  // The first one.
  void Vote(Client* client) {
    Submit(client,
           InWorld(*client, 0, DirectRank::LocalRun(0, {DirectRank::Inline({1})}, {{0, 1}})));
  }
  // Launches a gang of the client's, alone in its world.
  void Run(Client* client) {
    const size_t before = told_.launches.size();
    Vote(client);
    ASSERT_EQ(told_.launches.size(), before + 1);
  }
  LaunchId RunLocal(Client* client, int32_t slot) {
    Submit(client, DirectRank::LocalRun(1, {DirectRank::Inline({1})}, {{slot, 1}}));
    return told_.launches.back().second;
  }
  // The device has done what it was told as the `launch`-th.
  void End(size_t launch, const absl::Status& status = {}, bool is_origin = false) {
    Say(launch, status, is_origin);
    Poll();
  }
  // The same, and nobody has heard it yet.
  void Say(size_t launch, const absl::Status& status, bool is_origin = false) {
    const auto [device, id] = told_.launches[launch];
    ToldExecutor(&told_, device).Say(CompletionMessage{id, status, /*held_back=*/false, is_origin});
  }
  void Poll() {
    while (node_.Poll(now_)) {
    }
  }
  void At(absl::Duration after) {
    now_ = start_ + after;
    Poll();
  }

  const absl::Time start_ = absl::FromUnixSeconds(1'000'000'000);
  absl::Time now_ = start_;
  Told told_;
  std::deque<Client> clients_;  // told of what is under way to the end
  LocalNode node_;
};

TEST_F(GangsTest, WhatAnEndedSessionHasLaunchedIsAbandoned) {
  Client* const client = Open("uid:1", absl::Hours(1));
  Client* const other = Open("uid:2", absl::Hours(1));
  const LaunchId first = RunLocal(client, 1);
  RunLocal(other, 1);
  Run(client);
  const LaunchId collective = told_.launches.back().second;
  const LaunchId last = RunLocal(client, 2);
  End(0);
  node_.SessionDied(client->session, now_);
  Poll();
  EXPECT_THAT(told_.abandoned, ElementsAre(collective, last))
      << "the first, " << first.value() << ", has ended";
}

// However long the oldest launch takes, and whatever becomes of the others.
TEST_F(GangsTest, OfLaunchesThatHaveEndedNothingIsKept) {
  constexpr uint32_t kRuns = 5000;  // so many that errors, which are kept by their number, are full
  Client* const client = Open("uid:1", absl::Hours(1));
  Client* const other = Open("uid:2", absl::Hours(1));
  RunLocal(client, 0);
  told_.launches.reserve(8 * kRuns);
  other->told.reserve(8 * kRuns);
  const auto run = [&](uint32_t generation) {
    const TensorId result = {0, generation};
    Submit(other, DirectRank::LocalRun(1, {DirectRank::Inline({1})}, {result}));
    End(told_.launches.size() - 1,
        generation % 2 == 0 ? absl::OkStatus() : absl::InternalError("broken"));
    Release release;
    release.tensors = {result};
    Submit(other, std::move(release));
  };
  uint32_t generation = 0;
  while (generation < kRuns) run(++generation);
  const HeapUse heap;
  while (generation < 2 * kRuns) run(++generation);
  EXPECT_LE(heap.bytes(), 4096);
}

// What has ended before what it reads finishes when that has: a tenant's own are in order, and
// another's do not wait for all of them.
TEST_F(GangsTest, WhatFinishesTakesTurnsByTenant) {
  struct Waiting {
    Client* client;
    size_t last;  // the launch that it waits for
  };
  // Runs that read what a gang makes, which one of its devices has not done with.
  const auto wait = [this](const std::string& tenant, int runs) {
    Waiting waiting = {Open(tenant, absl::Hours(1), 0, 2), 0};
    Client* const peer = Open(tenant, absl::Hours(1), 1, 2);
    Vote(waiting.client);
    Vote(peer);
    const size_t first = told_.launches.size() - 2;
    waiting.last = told_.launches[first].first == 1 ? first : first + 1;
    for (int32_t i = 1; i <= runs; ++i) {
      Submit(waiting.client, DirectRank::LocalRun(1, {TensorId{0, 1}}, {{i, 1}}));
    }
    for (size_t i = first; i < told_.launches.size(); ++i) {
      if (i != waiting.last) End(i);
    }
    waiting.client->told.clear();
    return waiting;
  };
  constexpr int kMany = 250;  // which are told at once that it is there
  const Waiting many = wait("uid:1", kMany);
  const Waiting one = wait("uid:2", 1);
  Say(many.last, absl::OkStatus());
  ASSERT_TRUE(node_.Poll(now_));
  ASSERT_LT(many.client->told.size(), kMany / 2) << "all have finished: nothing to be seen";
  Say(one.last, absl::OkStatus());
  Poll();
  EXPECT_EQ(one.client->told.size(), 2u);
  EXPECT_EQ(many.client->told.size(), kMany + 1u);
  EXPECT_THAT(many.client->told, Each(Reason::kUnspecified));
  const std::vector<FlightEvent> events = node_.Flight("", 10000).value();
  int behind = 0;  // of many, the results that came when the one was there
  for (auto event = events.rbegin(); event->session != one.client->session; ++event) {
    behind += event->session == many.client->session && event->kind == FlightKind::kPublished;
  }
  EXPECT_GT(behind, kMany / 4);
}

class ManyGangsTest : public GangsTest {
 protected:
  static constexpr int kMost = 5000;

  static NodeOptions Many() {
    NodeOptions options = Options();
    options.max_pending_runs = kMost;
    return options;
  }
  ManyGangsTest() : GangsTest(Many()) {}
};

// Nobody is charged for what is kept of them.
TEST_F(ManyGangsTest, OfThousandsAtOnceFewAreKept) {
  Client* const client = Open("uid:1", absl::Hours(1));
  told_.launches.reserve(2 * kMost);
  client->told.reserve(2 * kMost);
  chorus::Run run = DirectRank::LocalRun(1, {DirectRank::Inline({1})}, {});
  run.outputs.resize(1);  // which nobody wants
  const auto at_once = [&](int runs) {
    const size_t first = told_.launches.size();
    for (int i = 0; i < runs; ++i) Submit(client, run);
    ASSERT_EQ(told_.launches.size(), first + static_cast<size_t>(runs));
    for (size_t i = first; i < told_.launches.size(); ++i) End(i);
    ASSERT_EQ(client->told.size(), static_cast<size_t>(client->sequence));
  };
  // So many runs are kept.
  at_once(300);
  const HeapUse heap;
  at_once(kMost);
  std::cout << heap.bytes() << " bytes are kept" << std::endl;
  EXPECT_LE(heap.bytes(), 400 * kMost);
}

// However many runs and launches it had.
TEST(GangTest, OfItsListsLittleIsKept) {
  for (const size_t size : {size_t{1}, Gang::kKeptCapacity, Gang::kKeptCapacity + 1}) {
    Gang gang;
    gang.runs.resize(size);
    gang.launches.resize(size);
    gang.communicators.resize(size);
    gang.Recycle();
    EXPECT_EQ(gang.runs.size() + gang.launches.size() + gang.communicators.size(), 0u);
    EXPECT_LE(gang.runs.capacity(), Gang::kKeptCapacity);
    EXPECT_LE(gang.launches.capacity(), Gang::kKeptCapacity);
    EXPECT_LE(gang.communicators.capacity(), Gang::kKeptCapacity);
  }
}

TEST_F(GangsTest, WhatOthersWantIsNotAbandonedUntilTheyHaveIt) {
  Client* const client = Open("uid:1", absl::Hours(1), 0, 2);
  Client* const peer = Open("uid:1", absl::Hours(1), 1, 2);
  const LaunchId before = RunLocal(client, 1);
  Vote(client);
  Vote(peer);
  ASSERT_EQ(told_.launches.size(), 3);
  const LaunchId behind = RunLocal(client, 2);
  ASSERT_TRUE(node_.CloseSession(client->session, now_).ok());
  Poll();
  EXPECT_THAT(told_.abandoned, ElementsAre(behind));
  End(1);
  End(2);
  EXPECT_EQ(peer->told.back(), Reason::kUnspecified);
  EXPECT_THAT(told_.abandoned, ElementsAre(before, behind));
}

// Named, voted for, decided, launched and completed: what one piece of this may be is bounded by
// how many collectives a graph may have.
TEST_F(GangsTest, NoPieceOfARunOfTheMostCollectivesIsLongerThanASlice) {
  const int calls = NodeOptions().max_graph_collectives;
  Client* const ranks[] = {Open("uid:1", absl::Hours(1), 0, 2),
                           Open("uid:1", absl::Hours(1), 1, 2)};
  for (int rank = 0; rank < 2; ++rank) RegisterLarge(ranks[rank], 2, AllReduces(rank, calls));
  ForgetLargestSlice();
  for (Client* const rank : ranks) {
    Submit(rank, InWorld(*rank, 0, DirectRank::LocalRun(2, {DirectRank::Inline({1})}, {})));
  }
  ASSERT_EQ(told_.launches.size(), 2u);
  End(0);
  End(1);
  for (Client* const rank : ranks) {
    EXPECT_EQ(rank->sequence, static_cast<int64_t>(rank->told.size()));
    EXPECT_THAT(rank->told, Each(Reason::kUnspecified));
  }
  std::cout << LargestSliceWork() << " pieces at once" << std::endl;
  EXPECT_GT(LargestSliceWork(), calls);
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
}

// Of thousands of launches each is abandoned once, and no slice looks at all of them for each.
TEST_F(GangsTest, MuchThatAnEndedSessionHasLaunchedIsAbandonedOnce) {
  constexpr int kRuns = 500;
  Client* const client = Open("uid:1", absl::Hours(1), 0, 2);
  Client* const peer = Open("uid:1", absl::Hours(1), 1, 2);
  Register(peer, 2, AllReduces(/*rank=*/1, kRuns));
  for (int i = 0; i < kRuns; ++i) {
    Submit(client,
           InWorld(*client, i, DirectRank::LocalRun(0, {DirectRank::Inline({1})}, {{2 * i, 1}})));
    RunLocal(client, 2 * i + 1);
  }
  Submit(peer, InWorld(*peer, 0, DirectRank::LocalRun(2, {DirectRank::Inline({1})}, {})));
  // Its plan is loaded in the background.
  while (told_.launches.size() < 2 * kRuns + 1) Poll();
  node_.SessionDied(client->session, now_);
  Poll();
  // What has no collective between it and the end of the log.
  EXPECT_EQ(told_.abandonings, 1);
  // The gang's; the others were launched before.
  for (size_t i = kRuns; i < told_.launches.size(); ++i) End(i);
  EXPECT_EQ(peer->told.back(), Reason::kUnspecified);
  EXPECT_EQ(told_.abandonings, kRuns);
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
}

// A gang's runs have their outcome in turns of bounded work. Meanwhile it is not late, and where it
// has failed nobody of its world goes on before its memory is free.
TEST_F(GangsTest, ManyResultsOfAGangArePublishedOrFailInSlices) {
  constexpr int kRuns = 5;
  constexpr int kResults = 1000;  // of a run
  for (const bool fails : {false, true}) {
    SCOPED_TRACE(fails);
    const std::string tenant = fails ? "uid:1" : "uid:2";
    Client* const client = Open(tenant, absl::Seconds(1), 0, 2);
    Client* const peer = Open(tenant, absl::Seconds(1), 1, 2);
    Register(client, 2, AllReduces(/*rank=*/0, 1, kResults));
    Register(peer, 2, AllReduces(/*rank=*/1, kRuns));
    const size_t first = told_.launches.size();
    for (int i = 0; i < kRuns; ++i) {
      std::vector<TensorId> results;
      for (int r = 0; r < kResults; ++r) results.push_back({i * kResults + r, 1});
      Submit(client,
             InWorld(*client, i, DirectRank::LocalRun(2, {DirectRank::Inline({1})}, results)));
    }
    Submit(peer, InWorld(*peer, 0, DirectRank::LocalRun(2, {DirectRank::Inline({1})}, {})));
    // Large plans are loaded in the background.
    while (told_.launches.size() < first + kRuns + 1) Poll();
    const absl::Status status =
        fails ? MakeError(Reason::kExecFailed, "the device says so") : absl::OkStatus();
    for (size_t i = first + 1; i < told_.launches.size(); ++i) End(i, status);
    ASSERT_EQ(client->told.size(), 3u);
    Say(first, status);
    ASSERT_TRUE(node_.Poll(now_));
    ASSERT_LT(client->told.size(), kRuns + 3u);
    now_ += absl::Seconds(2);
    Send(peer, Release());
    int turns = 1;
    for (; node_.Poll(now_); ++turns) {
      const bool goes_on = fails && peer->told.size() == 5;
      EXPECT_TRUE(!goes_on || node_.Stats("").live_runs == 0);
    }
    EXPECT_GT(turns, 3);
    EXPECT_EQ(peer->told.size(), 5u);
    ASSERT_EQ(client->told.size(), kRuns + 3u);
    for (int i = 0; i < kRuns; ++i) {
      EXPECT_EQ(client->told[3 + static_cast<size_t>(i)],
                fails ? Reason::kExecFailed : Reason::kUnspecified);
    }
    EXPECT_EQ(node_.Stats("").live_runs, 0);
    EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
  }
}

// Its launch has failed, for another rank's input has. It tells when its own inputs are there;
// until then a run that reads what it was to make has no bytes to read, not even where that is one
// of its inputs.
TEST_F(GangsTest, WhoReadsWhatWasNotLaunchedFailsWithIt) {
  Client* const client = Open("uid:1", absl::Hours(1), 0, 2);
  Client* const peer = Open("uid:1", absl::Hours(1), 1, 2);
  for (Client* rank : {client, peer}) {
    testing::RankBuilder b(rank == client ? 0 : 1, 2);
    b.set_wants_grad(false);
    const ValueIndex x = b.Input(TensorType(DType::kF32, {1}));
    AddOutput(&b.graph(), x);
    AddOutput(&b.graph(), b.AllReduce(x));
    Register(rank, 2, b.graph().Build());
    RunLocal(rank, 0);
  }
  const chorus::Run run = DirectRank::LocalRun(2, {TensorId{0, 1}}, {{1, 1}, {2, 1}});
  Submit(client, InWorld(*client, 0, run));
  End(0, MakeError(Reason::kExecFailed, "the device says so"));
  Submit(peer, InWorld(*peer, 0, run));
  for (const int32_t result : {1, 2}) {
    Submit(peer, DirectRank::LocalRun(1, {TensorId{result, 1}}, {{2 + result, 1}}));
  }
  EXPECT_EQ(told_.launches.size(), 2u);
  EXPECT_EQ(peer->told.size(), 3u) << "what it waits for is under way";
  End(1);
  for (const Client* rank : {client, peer}) EXPECT_EQ(rank->told.back(), Reason::kExecFailed);
  EXPECT_EQ(peer->told.size(), 3u + 4u);
  EXPECT_EQ(node_.Stats("").live_runs, 0);
}

// The same where its results have had their buffers when the launch failed: the memory that it was
// promised is given back with what stands there.
TEST_F(GangsTest, WhatWasToBeTakenOverByWhatWasNotLaunchedIsNotWritten) {
  Client* const client = Open("uid:1", absl::Hours(1), 0, 2);
  Client* const peer = Open("uid:1", absl::Hours(1), 1, 2);
  testing::RankBuilder step(1, 2);
  step.set_wants_grad(false);
  const ValueIndex given = AddInput(&step.graph(), TensorType(DType::kF32, {1}), true);
  const ValueIndex x = step.Input(TensorType(DType::kF32, {1}));
  AddOutput(&step.graph(), AddOp(&step.graph(), "neg", {given}), /*may_alias=*/0);
  AddOutput(&step.graph(), step.AllReduce(x));
  Register(peer, 2, step.graph().Build());
  testing::RankBuilder all(0, 2);
  all.set_wants_grad(false);
  const ValueIndex own = all.Input(TensorType(DType::kF32, {1}));
  for (int i = 0; i < 3; ++i) AddOutput(&all.graph(), all.AllReduce(own));
  Register(client, 2, all.graph().Build());
  const TensorId tensor{0, 1};
  RunLocal(peer, tensor.slot);
  RunLocal(peer, 1);
  RunLocal(client, 0);
  End(0);
  // It, what reads its sum, and what reads a result that then fails.
  chorus::Run first = InWorld(
      *peer, 0, DirectRank::LocalRun(2, {tensor, DirectRank::Inline({1})}, {{10, 1}, {11, 1}}));
  first.donate = {true, false};
  Submit(peer, std::move(first));
  Submit(peer, InWorld(*peer, 1, DirectRank::LocalRun(0, {TensorId{11, 1}}, {{12, 1}})));
  Submit(peer, InWorld(*peer, 2, DirectRank::LocalRun(0, {TensorId{1, 1}}, {{13, 1}})));
  End(1, MakeError(Reason::kExecFailed, "the device says so"));
  Submit(client, InWorld(*client, 0,
                         DirectRank::LocalRun(2, {TensorId{0, 1}}, {{10, 1}, {11, 1}, {12, 1}})));
  chorus::Run taker = DirectRank::LocalRun(1, {TensorId{10, 1}}, {{14, 1}});
  taker.donate = {true};
  Submit(peer, std::move(taker));
  EXPECT_EQ(told_.launches.size(), 3u);
  End(2);
  for (const Client* rank : {client, peer}) EXPECT_EQ(rank->told.back(), Reason::kExecFailed);
  EXPECT_EQ(node_.Stats("").live_runs, 0);
  Submit(peer, DirectRank::LocalRun(1, {tensor}, {{15, 1}}));
  ASSERT_EQ(told_.launches.size(), 4u);
  End(3);
  EXPECT_EQ(peer->told.back(), Reason::kUnspecified);
}

TEST_F(GangsTest, ManyThatWaitForOneResultAreLaunchedInSlices) {
  constexpr int kRuns = 1000;
  constexpr int kResults = 10;  // of a run
  Client* const client = Open("uid:1", absl::Hours(1), 0, 2);
  Client* const peer = Open("uid:1", absl::Hours(1), 1, 2);
  GraphBuilder local(1, {});
  const ValueIndex x = AddInput(&local, TensorType(DType::kF32, {1}));
  for (int r = 0; r < kResults; ++r) AddOutput(&local, AddOp(&local, "neg", {x}));
  Register(client, 2, local.Build());
  Vote(client);
  for (int i = 0; i < kRuns; ++i) {
    std::vector<TensorId> results;
    for (int r = 0; r < kResults; ++r) results.push_back({1 + i * kResults + r, 1});
    Submit(client, DirectRank::LocalRun(2, {TensorId{0, 1}}, results));
  }
  ASSERT_THAT(told_.launches, IsEmpty());
  Vote(peer);
  EXPECT_EQ(told_.launches.size(), 2u + kRuns);
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
}

// A kernel that fails is its rank's; a device that is lost is nobody's.
TEST_F(GangsTest, ALostDeviceIsNotTheFaultOfTheRankThatHadIt) {
  Client* const ranks[] = {Open("uid:1", absl::Hours(1), 0, 2),
                           Open("uid:1", absl::Hours(1), 1, 2)};
  // Each failure ends an epoch.
  for (const bool is_lost : {false, true}) {
    SCOPED_TRACE(is_lost);
    const size_t first = told_.launches.size();
    for (Client* const rank : ranks) {
      chorus::Run run = InWorld(*rank, is_lost,
                                DirectRank::LocalRun(0, {DirectRank::Inline({1})}, {{is_lost, 1}}));
      run.groups[0].epoch = Epoch(1 + is_lost);
      Submit(rank, std::move(run));
    }
    ASSERT_EQ(told_.launches.size(), first + 2) << ranks[1]->last_error.message;
    const Reason reason = is_lost ? Reason::kDeviceLost : Reason::kExecFailed;
    const absl::Status why = MakeError(reason, "the device says so");
    End(first, why);
    End(first + 1, why, /*is_origin=*/true);
    for (const Client* const rank : ranks) {
      const Error& told = rank->last_error;
      EXPECT_EQ(told.reason, reason);
      EXPECT_EQ(told.culprit.rank, is_lost ? -1 : 1);
      EXPECT_EQ(told.message, is_lost ? "the device says so" : "rank 1: the device says so");
    }
  }
}

TEST_F(GangsTest, WorkOfAnAbortedGangIsAbandoned) {
  Client* const client = Open("uid:1", kMoment);
  Run(client);
  EXPECT_THAT(told_.abandoned, IsEmpty());
  At(kMoment);
  EXPECT_THAT(told_.abandoned, ElementsAre(told_.launches[0].second));
}

TEST_F(GangsTest, AClientsTimeoutTellsItsRanksAndKillsNoDevice) {
  Client* const client = Open("uid:1", kMoment);
  Run(client);
  At(kMoment);
  EXPECT_EQ(client->told.back(), Reason::kExecTimeout);
  for (const auto later : {absl::Seconds(10) + kMoment, absl::Seconds(310) - kMoment}) {
    At(later);
    EXPECT_THAT(told_.killed, IsEmpty()) << absl::FormatDuration(later);
  }
  At(absl::Seconds(310));
  EXPECT_THAT(told_.killed, ElementsAre(0)) << "by the node's own it hangs";
  At(absl::Seconds(1000));
  EXPECT_THAT(told_.killed, ElementsAre(0)) << "once";
}

TEST_F(GangsTest, ALongerTimeoutOfTheWorldCountsForTheDevice) {
  Client* const client = Open("uid:1", absl::Seconds(1000));
  Run(client);
  At(absl::Seconds(1000));
  EXPECT_EQ(client->told.back(), Reason::kExecTimeout);
  At(absl::Seconds(1010) - kMoment);
  EXPECT_THAT(told_.killed, IsEmpty());
  At(absl::Seconds(1010));
  EXPECT_THAT(told_.killed, ElementsAre(0));
}

// Three ranks whose tenant has little memory; the first two have another world, too.
class ShortOfMemoryTest : public GangsTest {
 protected:
  static constexpr int32_t kPairGraph = 2;  // all_reduce in that one
  using Groups = std::vector<std::vector<Rank>>;

  ShortOfMemoryTest() : GangsTest(Short()) {
    for (int r = 0; r < 3; ++r) Open("uid:1", absl::Hours(1), r, 3);
    for (int r = 0; r < 2; ++r) {
      JoinRequest join;
      join.name = "pair";
      join.size = 2;
      join.rank = Rank(r);
      node_.JoinWorld(rank(r)->session, join, now_,
                      [&](const absl::StatusOr<WorldInfo>& info) { pair_ = info->id; });
      Register(rank(r), kPairGraph, AllReduceGraph(r, 2, TensorType(DType::kF32, {1}), "a.cc:1"));
    }
  }
  static NodeOptions Short() {
    NodeOptions options = Options();
    options.memory_limit_bytes = int64_t{64} << 20;
    return options;
  }
  Client* rank(int r) { return &clients_[static_cast<size_t>(r)]; }

  void VoteInPair(int r) {
    chorus::Run run =
        InWorld(*rank(r), 0, DirectRank::LocalRun(kPairGraph, {DirectRank::Inline({1})}, {{0, 1}}));
    run.groups[0].world = pair_;
    Submit(rank(r), std::move(run));
  }
  // A gang: each rank's all_reduce of the world, its `call`-th, and of those of these groups of
  // which it is a member. `input`: rank 0's.
  void AllReduceIn(const Groups& groups, int call, const Binding& input) {
    const int32_t graph = kPairGraph + 1 + call;
    for (int r = 0; r < 3; ++r) {
      std::vector<GroupSlot> slots = {SlotOf(r, 3)};
      chorus::Run run = InWorld(
          *rank(r), call,
          DirectRank::LocalRun(graph, {r == 0 ? input : Binding(DirectRank::Inline({1}))}, {}));
      for (const std::vector<Rank>& members : groups) {
        const auto own = std::find(members.begin(), members.end(), Rank(r));
        if (own == members.end()) continue;
        slots.push_back(
            SlotOf(static_cast<int>(own - members.begin()), static_cast<int>(members.size())));
        run = InWorld(*rank(r), 0, std::move(run));
        run.groups.back().group =
            *node_.CreateGroup(rank(r)->session, {rank(r)->world, Rank(r), members, {}, {}});
      }
      GraphBuilder builder(1, slots);
      const ValueIndex x = AddInput(&builder, TensorType(DType::kF32, {1}));
      for (size_t slot = 0; slot < slots.size(); ++slot) {
        AddAllReduce(&builder, x, slots[slot].held[0].value(), "a.cc:1", static_cast<int>(slot));
      }
      Register(rank(r), graph, builder.Build());
      Submit(rank(r), std::move(run));
    }
  }
  void TakeAllMemory() {
    for (int64_t bytes = int64_t{32} << 20; bytes >= 4096;) {
      bool has_room = false;
      node_.CreateStaging(rank(2)->session, bytes, [&](const absl::StatusOr<StagingArena>& arena) {
        has_room = arena.ok();
      });
      if (!has_room) bytes /= 2;
    }
  }

  WorldId pair_;
};

// For some of its communicators there is no memory. Those that it would have shared with what is
// under way stay as they are.
TEST_F(ShortOfMemoryTest, AGangThatIsNotLaunchedEndsNothingThatIsUnderWay) {
  constexpr Rank k0(0);
  constexpr Rank k1(1);
  constexpr Rank k2(2);
  // As many as its world is not charged for.
  AllReduceIn({{k0}, {k1}, {k2}, {k0, k1}, {k1, k2}}, 0, DirectRank::Inline({1}));
  ASSERT_EQ(told_.launches.size(), 3u);
  VoteInPair(0);
  AllReduceIn({{k0, k2}, {k2, k0}, {k1, k0}, {k2, k1}}, 1, TensorId{0, 1});
  ASSERT_EQ(told_.launches.size(), 3u) << "it waits for the other world";
  TakeAllMemory();
  VoteInPair(1);
  ASSERT_EQ(told_.launches.size(), 5u) << "the other world's alone";
  End(3);
  End(4);
  for (int r = 0; r < 3; ++r) {
    EXPECT_THAT(rank(r)->told, ::testing::Contains(Reason::kOutOfMemory)) << r;
  }
  EXPECT_EQ(told_.aborted, 0);
  for (size_t launch : {0, 1, 2}) End(launch);
  for (int r = 0; r < 3; ++r) EXPECT_EQ(rank(r)->told.back(), Reason::kUnspecified) << r;
}

TEST_F(GangsTest, ADeviceThatGetsOnWithOthersWorkIsNotKilled) {
  Client* const other = Open("uid:2", absl::Seconds(5000));
  Client* const another = Open("uid:3", absl::Seconds(5000));
  Client* const client = Open("uid:1", kMoment);
  Run(other);
  Run(another);
  Run(client);
  At(kMoment);
  EXPECT_EQ(client->told.back(), Reason::kExecTimeout);
  At(absl::Seconds(300));
  End(0);
  EXPECT_EQ(other->told.back(), Reason::kUnspecified);
  At(absl::Seconds(600));
  End(1);
  EXPECT_EQ(another->told.back(), Reason::kUnspecified);
  At(absl::Seconds(910) - kMoment);
  EXPECT_THAT(told_.killed, IsEmpty()) << "its turn came at 600 s at the earliest";
  At(absl::Seconds(910));
  EXPECT_THAT(told_.killed, ElementsAre(0));
}

// What comes behind does not tell that the device works on this: a stream may hang by itself.
TEST_F(GangsTest, WorkBehindItGivesItNoMoreTime) {
  Client* const client = Open("uid:1", kMoment);
  Client* const other = Open("uid:2", absl::Seconds(5000));
  Run(client);
  Run(other);
  At(absl::Seconds(300));
  End(1);
  At(absl::Seconds(310));
  EXPECT_THAT(told_.killed, ElementsAre(0));
}

TEST_F(GangsTest, WorkThatEndsAfterAllKillsNoDevice) {
  Client* const client = Open("uid:1", kMoment);
  Run(client);
  At(absl::Seconds(299));
  EXPECT_EQ(client->told.back(), Reason::kExecTimeout);
  End(0);
  EXPECT_TRUE(node_.Idle());
  At(absl::Seconds(1000));
  EXPECT_THAT(told_.killed, IsEmpty());
}

}  // namespace
}  // namespace chorus::node
