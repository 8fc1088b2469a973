// Runs that fail or go on when there are more of them than a slice of the node thread has time for:
// in turns of bounded work, between which others are heard, while those concerned see it as one
// moment.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/backend/host/host_backend.h"
#include "core/backend/sim/sim_backend.h"
#include "core/base/counting_heap.h"
#include "core/base/error.h"
#include "core/base/thread_pool.h"
#include "core/base/work.h"
#include "core/graph/encoding.h"
#include "core/node/agreement.h"
#include "core/node/node.h"
#include "core/node/node_rig.h"
#include "core/node/records.h"
#include "core/node/waiters.h"
#include "core/ops/graph_builder.h"
#include "core/ops/host_kernels.h"
#include "core/ops/testing/rank_builder.h"
#include "core/runtime/arena.h"
#include "core/runtime/devices.h"
#include "core/transport/command.h"

namespace chorus::node {
namespace {

constexpr int kRanks = 3;
constexpr int kResults = 500;  // of a run
constexpr int kRuns = 20;

// A rank's all_reduces of one number, each a result. Where they are recorded they are no list.
Graph AllReduces(int rank, int results, int ranks = kRanks, bool recorded = false) {
  testing::RankBuilder b(rank, ranks);
  b.set_wants_grad(recorded);
  const ValueIndex x = b.Input(TensorType(DType::kF32, {1}));
  for (int i = 0; i < results; ++i) {
    GraphOutput output;
    output.value = b.AllReduce(x);
    b.graph().AddOutput(output);
  }
  return b.graph().Build();
}

class FailingTest : public ::testing::Test {
 protected:
  // A session, and what becomes of its commands, in the order in which it is told.
  struct Client {
    SessionId session;
    int64_t sequence = 0;
    std::vector<std::pair<int64_t, Reason>> told;
  };

  explicit FailingTest(const NodeOptions& options = {}, bool on_sim = false) {
    ForgetLargestSlice();
    HostBackendOptions host;
    host.devices = kRanks + 1;
    host.pool = &pool_;
    host.make_kernel = MakeHostKernel;
    SimBackendOptions sim;
    static_cast<BackendOptions&>(sim) = host;
    backend_ = on_sim ? CreateSimBackend(sim) : CreateHostBackend(host);
    node_ = std::make_unique<LocalNode>(options, DevicesOf(backend_.get()), [] {});
    for (int i = 0; i <= kRanks; ++i) Open("uid:0", i);
    for (int r = 0; r < kRanks; ++r) {
      const absl::StatusOr<WorldInfo> info = Join(rank(r)->session, "job", r, kRanks);
      if (info.ok()) world_ = info->id;
    }
  }

  Client* Open(const std::string& tenant, int device) {
    OpenSessionRequest open;
    open.tenant = tenant;
    open.devices = {DeviceIndex(device)};
    clients_.push_back(std::make_unique<Client>());
    clients_.back()->session = node_->OpenSession(open, now_)->id;
    return clients_.back().get();
  }
  // What it is told at once; UNKNOWN: it waits for others.
  absl::StatusOr<WorldInfo> Join(SessionId session, const std::string& name, int rank = 0,
                                 int size = 1, absl::optional<DeviceIndex> device = {},
                                 CheckCallSites check_call_sites = CheckCallSites::kOff) {
    JoinRequest join;
    join.name = name;
    join.size = size;
    join.rank = Rank(rank);
    join.device = device;
    join.check_call_sites = check_call_sites;
    const auto told =
        std::make_shared<absl::StatusOr<WorldInfo>>(absl::UnknownError("it waits for others"));
    node_->JoinWorld(session, join, now_,
                     [told](const absl::StatusOr<WorldInfo>& info) { *told = info; });
    return *told;
  }

  int64_t Submit(Client* client, CommandBody body) {
    Command command{Sequence(++client->sequence), std::move(body)};
    ByteWriter frame;
    EncodeFrame(command, &frame);
    node_->Submit(client->session, std::string(frame.bytes()), now_,
                  [client](const Outcome& outcome) {
                    const Reason reason =
                        outcome.status.ok() ? Reason::kUnspecified : ErrorOf(outcome.status).reason;
                    client->told.emplace_back(outcome.sequence.value(), reason);
                  });
    return client->sequence;
  }
  void RegisterAs(Client* client, int slot, const Graph& registered) {
    RegisterGraph graph;
    graph.graph = {slot, 1};
    graph.encoded = EncodeGraph(registered);
    const int64_t sequence = Take(client, std::move(graph));
    while (client->told.empty() || client->told.back().first != sequence) Poll();
  }
  // One that a frame may have no room for.
  void RegisterStaged(Client* client, int slot, const Graph& registered) {
    const std::string encoded = EncodeGraph(registered);
    RegisterGraph graph;
    graph.graph = {slot, 1};
    graph.staged_bytes = static_cast<int64_t>(encoded.size());
    node_->CreateStaging(
        client->session, graph.staged_bytes,
        [&](const absl::StatusOr<StagingArena>& arena) { graph.staged.arena = arena->arena; });
    EXPECT_TRUE(node_->WriteStaging(client->session, graph.staged.arena, 0, encoded).ok());
    const int64_t sequence = Take(client, std::move(graph));
    while (client->told.empty() || client->told.back().first != sequence) Poll();
  }
  // Rank 0's only graph.
  void Register(const Graph& registered) {
    RegisterGraph graph;
    graph.graph = {0, 1};
    graph.encoded = EncodeGraph(registered);
    Submit(rank(0), std::move(graph));
    while (rank(0)->told.empty()) Poll();
  }
  // Rank 0 alone makes its calls, and is told of none. `named`: it keeps the names of the results.
  void RunAhead(bool named = true, int runs = kRuns, bool recorded = false) {
    Register(AllReduces(/*rank=*/0, kResults, kRanks, recorded));
    size_t over = 1;
    for (int number = 0; number < runs; ++number) {
      const TensorId first =
          named ? TensorId{number * kResults, 1} : TensorId{0, static_cast<uint32_t>(number + 1)};
      const chorus::Run run = RunOf(number, first);
      Submit(rank(0), run);
      if (named) continue;
      Release names;
      for (const OutBinding& output : run.outputs) names.tensors.push_back(output.id);
      Submit(rank(0), std::move(names));
      ++over;
    }
    while (Poll()) {
    }
    ASSERT_EQ(rank(0)->told.size(), over);
  }
  // Its results have the slots from that of `first` on.
  chorus::Run RunOf(int number, TensorId first, int results = kResults) const {
    chorus::Run run;
    run.graph = {0, 1};
    InlineData data;
    data.bytes.assign(4, 0);
    run.inputs.push_back(data);
    run.outputs.resize(static_cast<size_t>(results));
    for (OutBinding& output : run.outputs) {
      output.kind = OutBinding::Kind::kFresh;
      output.id = first;
      ++first.slot;
    }
    RunGroup group;
    group.world = world_;
    group.epoch = Epoch(1);
    group.base.push_back({0, int64_t{number} * results, 0});
    run.groups.push_back(group);
    return run;
  }
  // Of a graph that negates one number, without the others.
  static chorus::Run Negation(int graph, TensorId of, TensorId result) {
    chorus::Run run;
    run.graph = {graph, 1};
    run.inputs.push_back(of);
    run.outputs.resize(1);
    run.outputs[0].kind = OutBinding::Kind::kFresh;
    run.outputs[0].id = result;
    return run;
  }
  // Of a call that rank 1 could not make; its texts are as long as they may be.
  Refuse LongRefusal() const {
    Refuse refuse;
    refuse.world = world_;
    refuse.epoch = Epoch(1);
    refuse.members.emplace_back().rank = Rank(1);
    refuse.why = Error(Reason::kMalformed, std::string(Error::kMaxBytes, 'm'));
    refuse.why.source = std::string(Error::kMaxBytes, 's');
    return refuse;
  }
  // As the loop calls them.
  int64_t Take(Client* client, CommandBody body) {
    const WorkSlice slice;
    return Submit(client, std::move(body));
  }
  void Close(Client* client) {
    const WorkSlice slice;
    ASSERT_TRUE(node_->CloseSession(client->session, now_).ok());
  }
  bool Poll() { return node_->Poll(now_); }
  Client* rank(int i) { return clients_[static_cast<size_t>(i)].get(); }
  Client* bystander() { return clients_[kRanks].get(); }
  // What the node has charged its clients for.
  int64_t charged() const { return node_->Stats("").memory_used_bytes; }

  const absl::Time now_ = absl::Now();
  ThreadPool pool_{1};
  std::unique_ptr<Backend> backend_;
  std::vector<std::unique_ptr<Client>> clients_;
  WorldId world_;
  std::unique_ptr<LocalNode> node_;
};

TEST_F(FailingTest, ManyFailInTurnsOfBoundedWork) {
  RunAhead();
  Close(rank(2));
  int turns = 0;
  while (rank(0)->told.size() < kRuns + 1) {
    ASSERT_TRUE(Poll()) << rank(0)->told.size() << " commands of " << kRuns + 1 << " have ended";
    ++turns;
  }
  EXPECT_GT(turns, 3);
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
  for (int i = 1; i <= kRuns; ++i) {
    EXPECT_EQ(rank(0)->told[static_cast<size_t>(i)],
              std::make_pair(int64_t{i + 1}, Reason::kPeerLeft));
  }
  EXPECT_EQ(node_->Stats("").live_runs, 0);
  EXPECT_EQ(node_->Stats("").runs_failed, kRuns);
}

TEST_F(FailingTest, ACancelCountsTheRunsThatItLooksAt) {
  constexpr int kSmall = 800;
  Register(AllReduces(/*rank=*/0, /*results=*/1));
  for (int number = 0; number < kSmall; ++number) {
    Submit(rank(0), RunOf(number, {number, 1}, /*results=*/1));
  }
  while (Poll()) {
  }
  ForgetLargestSlice();
  Take(rank(0), Cancel{Sequence(1)});  // nothing: it is over
  EXPECT_GE(LargestSliceWork(), kSmall / 8);
}

// However small each of them is.
TEST_F(FailingTest, AnEpochOfManyRunsEndsInTurnsOfBoundedWork) {
  constexpr int kSmall = 1020;  // of a rank
  for (const int r : {0, 1}) {
    RegisterGraph graph;
    graph.graph = {0, 1};
    graph.encoded = EncodeGraph(AllReduces(r, /*results=*/1));
    Submit(rank(r), std::move(graph));
    for (int number = 0; number < kSmall; ++number) {
      Submit(rank(r), RunOf(number, {number, 1}, /*results=*/1));
    }
  }
  while (Poll()) {
  }
  ASSERT_EQ(node_->Stats("").live_runs, 2 * kSmall);
  Close(rank(2));
  ASSERT_GT(node_->Stats("").live_runs, 0) << "all failed in one slice: nothing to be seen";
  while (Poll()) {
  }
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
  EXPECT_EQ(node_->Stats("").runs_failed, 2 * kSmall);
  for (const int r : {0, 1}) {
    ASSERT_EQ(rank(r)->told.size(), kSmall + 1u);
    for (size_t i = 1; i < rank(r)->told.size(); ++i) {
      EXPECT_EQ(rank(r)->told[i].second, Reason::kPeerLeft) << i;
    }
  }
}

// However long that is, and however many wait for their turn to fail with it.
TEST_F(FailingTest, RunsThatWaitToFailHaveTheirCauseInCommon) {
  constexpr int kLocals = 1000;
  RegisterAs(rank(0), 0, AllReduces(/*rank=*/0, /*results=*/1));
  RegisterAs(rank(0), 1, NegateGraph(1));
  Take(rank(0), RunOf(0, {0, 1}, /*results=*/1));
  for (int i = 1; i <= kLocals; ++i) Take(rank(0), Negation(1, {0, 1}, {i, 1}));
  while (Poll()) {
  }
  ASSERT_EQ(node_->Stats("").live_runs, kLocals + 1);
  const int64_t charged_before = charged();
  const HeapUse heap;
  Take(rank(1), LongRefusal());
  ASSERT_GT(node_->Stats("").live_runs, kLocals / 2) << "they fail at once: nothing to be seen";
  // Of each run a closure; and what the node remembers of errors and of commands.
  constexpr int64_t kFew = int64_t{256} << 10;
  EXPECT_LE(heap.bytes(), charged() - charged_before + kLocals * 256 + kFew);
  while (Poll()) {
  }
  EXPECT_EQ(node_->Stats("").runs_failed, kLocals + 1);
  ASSERT_EQ(rank(0)->told.size(), kLocals + 3u);
  for (size_t i = 2; i < rank(0)->told.size(); ++i) {
    EXPECT_EQ(rank(0)->told[i], std::make_pair(static_cast<int64_t>(i) + 1, Reason::kPeerRefused));
  }
}

// What runs had in common with others that have not come, too: of each one buffer for each group of
// equal work.
TEST_F(FailingTest, AnEpochLetsGoOfEqualWorkInTurnsOfBoundedWork) {
  constexpr int kRunsAhead = 60;
  constexpr int kGroups = 900;
  constexpr int64_t kElements = 16384;  // so many that it is worth while to share
  testing::RankBuilder b(/*rank=*/0, kRanks);
  b.set_wants_grad(false);
  NodeSpec fill;
  fill.op = "fill";
  fill.attributes = TypeAttributes(TensorType(DType::kF32, {kElements}));
  fill.attributes.push_back({"value", 0.0});
  const ValueIndex sum = b.AllReduce((*b.graph().Emit(fill))[0]);
  for (int64_t i = 0; i < kGroups; ++i) {
    GraphOutput output;
    output.value = b.Op("slice", {sum}, {{"axis", int64_t{0}}, {"begin", i}, {"end", i + 1}});
    b.graph().AddOutput(output);
  }
  Register(b.graph().Build());
  for (int number = 0; number < kRunsAhead; ++number) {
    chorus::Run run = RunOf(number, {0, 1}, /*results=*/1);
    run.inputs.clear();
    run.outputs.assign(kGroups, OutBinding());
    Take(rank(0), run);
    while (Poll()) {
    }
  }
  ASSERT_EQ(node_->Stats("").live_runs, kRunsAhead);
  ASSERT_EQ(rank(0)->told.size(), 1u);
  Close(rank(2));
  while (Poll()) {
  }
  EXPECT_EQ(rank(0)->told.size(), kRunsAhead + 1u);
  EXPECT_EQ(node_->Stats("").runs_failed, kRunsAhead);
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
}

// A command that the background is done with waits for them, and no slice waits for the background,
// which still has what the epoch kept.
TEST_F(FailingTest, WhoComesBackFromTheBackgroundMeanwhileWaits) {
  RunAhead();
  GraphBuilder builder(1, {});
  GraphInput input;
  input.type = TensorType(DType::kF32, {1000});
  NodeSpec negate;
  negate.op = "neg";
  negate.inputs = {builder.AddInput(input)};
  for (int i = 0; i < 3000; ++i) negate.inputs = *builder.Emit(negate);
  GraphOutput output;
  output.value = negate.inputs[0];
  builder.AddOutput(output);
  Graph graph = builder.Build();
  graph.inputs[0].type.dims[0] = Dim::Symbol(0, 1000);
  RegisterGraph local;
  local.graph = {1, 1};
  local.encoded = EncodeGraph(graph);
  const int64_t registered = Submit(rank(0), std::move(local));
  while (rank(0)->told.empty() || rank(0)->told.back().first != registered) Poll();

  // To be planned at its size, and behind it what keeps the background from the epoch's remains.
  InlineData data;
  data.bytes.assign(8, 0);
  CreateTensor create;
  create.tensor = {20000, 1};
  create.type = TensorType(DType::kF32, {2});
  create.device = DeviceIndex(0);
  create.source = data;
  Submit(rank(0), std::move(create));
  chorus::Run run;
  run.graph = {1, 1};
  run.inputs.push_back(TensorId{20000, 1});
  run.outputs.resize(1);
  run.outputs[0].kind = OutBinding::Kind::kFresh;
  run.outputs[0].id = {20001, 1};
  const int64_t planned = Submit(rank(0), std::move(run));
  for (int i = 0; i < 4; ++i) {
    RegisterGraph large;
    large.graph = {i, 1};
    large.encoded = EncodeGraph(AllReduces(/*rank=*/0, 1200 + i));
    Submit(bystander(), std::move(large));
  }
  Close(rank(2));
  while (rank(0)->told.size() < kRuns + 4) Poll();
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
  EXPECT_EQ(rank(0)->told.back(), std::make_pair(planned, Reason::kUnspecified));
}

// Of one number, or of what rank 0 and others make of it together: so many results, each of its
// own.
Graph ManyResults(int results, bool local) {
  testing::RankBuilder b(/*rank=*/0, kRanks);
  b.set_wants_grad(false);
  ValueIndex x = b.Input(TensorType(DType::kF32, {1}));
  if (!local) x = b.AllReduce(x);
  for (int i = 0; i < results; ++i) {
    GraphOutput output;
    output.value = b.Op("neg", {x});
    b.graph().AddOutput(output);
  }
  Graph graph = b.graph().Build();
  if (local) graph.group_slots.clear();
  return graph;
}

TEST_F(FailingTest, TheResultsOfALargestRunAreNamedPublishedAndFailedWithinASlice) {
  const int most = NodeOptions().max_graph_outputs;
  const auto await = [this](Client* client, int64_t sequence) {
    while (client->told.size() < static_cast<size_t>(sequence)) Poll();
    return client->told.back().second;
  };
  const auto register_graph = [&](Client* client, int slot, const Graph& made) {
    RegisterStaged(client, slot, made);
    return client->told.back().second;
  };
  EXPECT_EQ(register_graph(bystander(), 0, ManyResults(most + 1, /*local=*/true)),
            Reason::kMalformed);
  EXPECT_EQ(register_graph(rank(0), 0, ManyResults(most, /*local=*/false)), Reason::kUnspecified);
  EXPECT_EQ(register_graph(rank(0), 1, ManyResults(most, /*local=*/true)), Reason::kUnspecified);
  for (const int r : {1, 2}) register_graph(rank(r), 0, AllReduces(r, /*results=*/1));

  chorus::Run local = RunOf(0, {0, 1}, most);
  local.graph = {1, 1};
  local.groups.clear();
  EXPECT_EQ(await(rank(0), Take(rank(0), std::move(local))), Reason::kUnspecified);
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork) << "it is launched where it is named";

  const auto number = [this](int call, TensorId first, int results) {
    chorus::Run run = RunOf(0, first, results);
    run.groups[0].base[0].call = call;
    return run;
  };
  const int64_t published = Take(rank(0), number(0, {most, 1}, most));
  for (const int r : {1, 2}) Take(rank(r), number(0, {0, 1}, 1));
  EXPECT_EQ(await(rank(0), published), Reason::kUnspecified);
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);

  const int64_t failed = Take(rank(0), number(1, {2 * most, 1}, most));
  Close(rank(2));
  EXPECT_EQ(await(rank(0), failed), Reason::kPeerLeft);
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
}

// A frame may name thousands of results, and each is told to the session.
TEST_F(FailingTest, TheNamesOfARunThatIsRefusedAreCounted) {
  constexpr int kNames = 13000;
  const WorkSlice slice;
  Submit(bystander(), RunOf(0, {0, 1}, kNames));
  ASSERT_EQ(bystander()->told.size(), 1u);
  EXPECT_EQ(bystander()->told[0].second, Reason::kUnknownName) << "the graph is not there";
  EXPECT_EQ(node_->Describe(bystander()->session, now_)->live_tensors, kNames);
  EXPECT_GE(SliceWork(), kNames / 2);
  EXPECT_LE(SliceWork(), kMaxSliceWork - kTurnWork);
}

// A frame names as many entries as a turn has no time for. What comes behind it in its log, and a
// rank that asks for a gradient then, finds all of them dropped.
TEST_F(FailingTest, TapesAreDroppedInTurns) {
  constexpr int kCalls = static_cast<int>(DropTape::kMaxEntries);
  for (int r = 0; r < kRanks; ++r) {
    for (const bool is_gradient : {false, true}) {
      Graph graph = AllReduces(r, is_gradient ? 1 : kCalls);
      for (Node& node : graph.nodes) {
        node.collective->wants_grad = !is_gradient;
        if (is_gradient) node.collective->instance = {InstanceRef::Kind::kBound, -1, 0, 0};
      }
      graph.num_instance_slots = is_gradient ? 1 : 0;
      RegisterGraph command;
      command.graph = {is_gradient ? 1 : 0, 1};
      command.encoded = EncodeGraph(graph);
      Submit(rank(r), std::move(command));
    }
    Submit(rank(r), RunOf(0, {0, 1}, kCalls));
  }
  const auto await = [this](int r, size_t told) {
    while (rank(r)->told.size() < told) Poll();  // the background plans
  };
  for (int r = 0; r < kRanks; ++r) await(r, 3);
  DropTape drop;
  for (int call = 0; call < kCalls; ++call) {
    DropTape::Entry& entry = drop.entries.emplace_back();
    entry.world = world_;
    entry.key.since = Epoch(1);
    entry.key.at.call = call;
  }
  for (const int r : {1, 2}) {
    for (DropTape::Entry& entry : drop.entries) entry.member = GroupRank(r);
    Take(rank(r), drop);
    Take(rank(r), Cancel{Sequence(2)});  // nothing: it is over
    EXPECT_EQ(rank(r)->told.size(), 3u) << "a turn has no time for all of them";
    await(r, 5);
    EXPECT_THAT(rank(r)->told, ::testing::Each(::testing::Field(&std::pair<int64_t, Reason>::second,
                                                                Reason::kUnspecified)));
    EXPECT_EQ(rank(r)->told[4].first, 5) << "in their order";
  }
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
  chorus::Run gradient = RunOf(kCalls, {kCalls, 1}, /*results=*/1);
  gradient.graph = {1, 1};
  gradient.instances = {drop.entries.back().key.Gradient({0, 0})};
  Submit(rank(0), std::move(gradient));
  await(0, 4);
  EXPECT_EQ(rank(0)->told.back().second, Reason::kUnspecified) << "the others give zeros";
}

// Runs of a barrier have no memory that could be looked at.
TEST_F(FailingTest, WhoLooksForTheLargestHoldersCountsRunsWithoutMemoryToo) {
  constexpr int kWaiting = 200;
  testing::RankBuilder b(/*rank=*/0, kRanks);
  b.Barrier();
  Register(b.graph().Build());
  for (int number = 0; number < kWaiting; ++number) {
    chorus::Run run = RunOf(number, {0, 1}, /*results=*/0);
    run.inputs.clear();
    run.groups[0].base[0].call = number;
    Submit(rank(0), std::move(run));
  }
  ASSERT_EQ(node_->Stats("").live_runs, kWaiting);
  CreateTensor create;
  create.tensor = {0, 1};
  create.type = TensorType(DType::kU8, {NodeOptions().memory_limit_bytes + 1});
  create.device = DeviceIndex(0);
  create.source = InlineData();
  const WorkSlice slice;
  Submit(rank(0), std::move(create));
  EXPECT_EQ(rank(0)->told.back().second, Reason::kOutOfMemory);
  EXPECT_GE(SliceWork(), 2 * kWaiting);
}

// As many commands wait for one result as their session can pay for.
TEST_F(FailingTest, ManyHearOfAResultInTurnsOfBoundedWork) {
  constexpr size_t kWait = 3000;
  static_assert(kWait * kWorkPerWaiter > kMaxSliceWork, "all would be told in one slice");
  for (const bool fails : {false, true}) {
    SCOPED_TRACE(fails);
    const int32_t slot = fails ? 1 : 0;
    for (int r = 0; r < kRanks; ++r) {
      if (fails) break;
      RegisterGraph graph;
      graph.graph = {0, 1};
      graph.encoded = EncodeGraph(AllReduces(r, 1));
      Submit(rank(r), std::move(graph));
    }
    const auto all_reduce = [&](int r) {
      const WorkSlice slice;  // the last one's may be where they begin to be told
      Submit(rank(r), RunOf(slot, {slot, 1}, /*results=*/1));
    };
    all_reduce(0);
    const size_t before = rank(0)->told.size();
    for (size_t i = 0; i < kWait; ++i) Submit(rank(0), MakeReadable{{{slot, 1}}});
    ASSERT_EQ(rank(0)->told.size(), before);
    if (fails) {
      Close(rank(2));
    } else {
      all_reduce(1);
      all_reduce(2);
    }
    int turns = 0;
    while (rank(0)->told.size() < before + kWait + 1) {
      ASSERT_TRUE(Poll()) << rank(0)->told.size();
      ++turns;
    }
    EXPECT_GT(turns, 3);
    EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
    const Reason expected = fails ? Reason::kPeerLeft : Reason::kUnspecified;
    for (size_t i = before; i < rank(0)->told.size(); ++i) {
      ASSERT_EQ(rank(0)->told[i].second, expected) << i;
    }
  }
}

// As many as wait with it.
TEST_F(FailingTest, CommandsThatWaitHaveTheErrorOfATensorInCommon) {
  constexpr int kWait = 500;
  RegisterAs(rank(0), 0, AllReduces(/*rank=*/0, /*results=*/1));
  Take(rank(0), RunOf(0, {0, 1}, /*results=*/1));
  Take(rank(1), LongRefusal());
  chorus::Run pending = RunOf(1, {1, 1}, /*results=*/1);
  pending.groups.front().epoch = Epoch(2);
  Take(rank(0), std::move(pending));
  while (Poll()) {
  }
  ASSERT_EQ(node_->Stats("").runs_failed, 1);
  ASSERT_EQ(node_->Stats("").live_runs, 1);
  const size_t told = rank(0)->told.size();
  const int64_t charged_before = charged();
  const HeapUse heap;
  for (int i = 0; i < kWait; ++i) Take(rank(0), MakeReadable{{{1, 1}, {0, 1}}});
  EXPECT_EQ(rank(0)->told.size(), told);
  // What the log has of commands that are not over.
  constexpr int64_t kPerCommand = 512;
  EXPECT_LE(heap.bytes(), charged() - charged_before + kWait * kPerCommand);
  Close(rank(2));
  while (Poll()) {
  }
  ASSERT_EQ(rank(0)->told.size(), told + 1 + kWait);
  for (size_t i = told; i < rank(0)->told.size(); ++i) {
    EXPECT_EQ(rank(0)->told[i].second, i == told ? Reason::kPeerLeft : Reason::kPeerRefused) << i;
  }
}

NodeOptions WithoutTime() {
  NodeOptions options;
  options.DoLater();
  return options;
}

// No slice has time for a second run.
class LaterTest : public FailingTest {
 protected:
  LaterTest() : FailingTest(WithoutTime()) {}
};

// Those of one tenant wait for their own, and keep their order; another tenant's do not wait for
// all of them.
TEST_F(LaterTest, WhatFailsTakesTurnsByTenant) {
  constexpr int kLocals = 1000;
  RegisterAs(rank(0), 0, AllReduces(/*rank=*/0, /*results=*/1));
  RegisterAs(rank(0), 1, NegateGraph(1));
  Client* const other = Open("uid:1", /*device=*/0);
  Client* const peer = Open("uid:1", /*device=*/1);
  ASSERT_FALSE(Join(other->session, "pair", 0, 2).ok());
  const absl::StatusOr<WorldInfo> pair = Join(peer->session, "pair", 1, 2);
  ASSERT_TRUE(pair.ok()) << pair.status();
  RegisterAs(other, 0, AllReduces(/*rank=*/0, /*results=*/1, /*ranks=*/2));
  chorus::Run run = RunOf(0, {0, 1}, /*results=*/1);
  run.groups[0].world = pair->id;
  const int64_t sequence = Take(other, std::move(run));
  Take(rank(0), RunOf(0, {0, 1}, /*results=*/1));
  for (int i = 1; i <= kLocals; ++i) Take(rank(0), Negation(1, {0, 1}, {i, 1}));
  while (node_->Stats("").live_runs < kLocals + 2) Poll();

  Close(rank(2));
  // From then on there is one turn for each of the others.
  while (rank(0)->told.size() < 3) ASSERT_TRUE(Poll());
  Close(peer);
  int turns = 0;
  for (; other->told.back().first != sequence; ++turns) ASSERT_TRUE(Poll());
  EXPECT_EQ(other->told.back().second, Reason::kPeerLeft);
  EXPECT_LT(turns, 50);
  EXPECT_LT(rank(0)->told.size(), kLocals / 2) << "all have failed: nothing to be seen";
  while (Poll()) {
  }
  ASSERT_EQ(rank(0)->told.size(), kLocals + 3u);
  for (size_t i = 2; i < rank(0)->told.size(); ++i) {
    EXPECT_EQ(rank(0)->told[i], std::make_pair(static_cast<int64_t>(i) + 1, Reason::kPeerLeft));
  }
}

// One that was waited for is launched, and another one ends: a slice has one of the two.
TEST_F(LaterTest, ALaunchAndAnEndTakeTurns) {
  constexpr int kMany = 1400;    // results of each rank, published in one piece
  constexpr int kLarge = 30000;  // numbers: two kernels, which the node thread just runs itself
  const auto register_graph = [this](int r, int slot, const Graph& made) {
    RegisterGraph graph;
    graph.graph = {slot, 1};
    graph.encoded = EncodeGraph(made);
    const int64_t registered = Submit(rank(r), std::move(graph));
    while (rank(r)->told.empty() || rank(r)->told.back().first != registered) Poll();
  };
  for (int r = 0; r < kRanks; ++r) {
    register_graph(r, 0, AllReduces(r, kMany));
    register_graph(r, 1, AllReduces(r, 1));
  }
  GraphBuilder builder(1, {});
  GraphInput input;
  input.type = TensorType(DType::kF32, {1});
  NodeSpec expand;
  expand.op = "expand";
  expand.inputs = {builder.AddInput(input)};
  expand.attributes = {{"dims", std::vector<int64_t>{kLarge}}};
  NodeSpec negate;
  negate.op = "neg";
  negate.inputs = *builder.Emit(std::move(expand));
  GraphOutput output;
  output.value = (*builder.Emit(std::move(negate)))[0];
  builder.AddOutput(output);
  register_graph(0, 2, builder.Build());

  for (int r = 0; r < kRanks; ++r) Submit(rank(r), RunOf(0, {0, 1}, kMany));
  const auto all_reduce_one = [this](int r) {
    chorus::Run run = RunOf(kMany, {kMany, 1}, /*results=*/1);
    run.graph = {1, 1};
    Submit(rank(r), std::move(run));
  };
  all_reduce_one(0);
  all_reduce_one(1);
  chorus::Run consumer;
  consumer.graph = {2, 1};
  consumer.inputs.push_back(TensorId{kMany, 1});
  consumer.outputs.resize(1);
  consumer.outputs[0].kind = OutBinding::Kind::kFresh;
  consumer.outputs[0].id = {kMany + 1, 1};
  Submit(rank(0), std::move(consumer));
  const auto published = [this] { return node_->Stats("").runs_published; };
  while (published() == 0) Poll();
  ASSERT_LT(published(), kRanks) << "all have ended at once: nothing to be seen";
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
  ForgetLargestSlice();
  all_reduce_one(2);
  while (published() < 2 * kRanks + 1) Poll();
  EXPECT_GT(LargestSliceWork(), kMaxSliceWork * 3 / 4) << "others have run the kernels";
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
}

// Neither the member that has such runs nor another one, which might want their memory; others are
// heard.
TEST_F(FailingTest, NoMemberGoesOnBeforeAllHaveFailed) {
  RunAhead();
  Close(rank(2));
  ASSERT_LT(rank(0)->told.size(), kRuns + 1) << "all failed in one slice: nothing to be seen";
  Release all;
  for (int i = 0; i < kRuns * kResults; ++i) all.tensors.push_back({i, 1});
  const int64_t last = Submit(rank(0), std::move(all));
  Submit(rank(1), Release());
  Submit(bystander(), Release());
  EXPECT_EQ(bystander()->told.size(), 1u);
  while (rank(0)->told.size() < kRuns + 1) {
    EXPECT_EQ(rank(1)->told.size(), 0u) << rank(0)->told.size();
    ASSERT_TRUE(Poll());
  }
  // Agreement's tables are let go of in the background.
  while (rank(0)->told.size() < kRuns + 2u || rank(1)->told.empty()) Poll();
  ASSERT_EQ(rank(0)->told.size(), kRuns + 2u);
  EXPECT_EQ(rank(0)->told.back(), std::make_pair(last, Reason::kUnspecified));
  EXPECT_EQ(rank(1)->told.size(), 1u);
  EXPECT_EQ(node_->Stats("").live_buffers, 0);
}

// Which may be large where the runs themselves fail at once.
TEST_F(FailingTest, NoMemberGoesOnBeforeAgreementsTablesAreGone) {
  RunAhead(/*named=*/true, /*runs=*/2);
  Close(rank(2));
  ASSERT_EQ(node_->Stats("").runs_failed, 2);
  Submit(rank(1), Release());
  Submit(bystander(), Release());
  EXPECT_EQ(bystander()->told.size(), 1u);
  EXPECT_EQ(rank(1)->told.size(), 0u);
  while (rank(1)->told.empty()) Poll();
}

// Also where a member asks for something that does not wait for its log.
TEST_F(FailingTest, AgreementsTablesAreChargedUntilTheyAreGone) {
  RunAhead(/*named=*/true, kRuns, /*recorded=*/true);
  Close(rank(2));
  const auto make_group = [this] {
    CreateGroupRequest group;
    group.world = world_;
    group.members = {Rank(0), Rank(1)};
    group.rank = Rank(0);
    const absl::StatusOr<GroupId> made = node_->CreateGroup(rank(0)->session, group);
    EXPECT_TRUE(made.ok()) << made.status();
  };
  const auto tables = [this] { return node_->Stats("").memory_used_bytes; };
  const int64_t with_tables = tables();
  make_group();
  EXPECT_GE(tables(), with_tables);
  const int64_t last = Submit(rank(1), Release());
  while (rank(1)->told.empty() || rank(1)->told.back().first != last) Poll();
  make_group();
  constexpr int64_t kBytesPerCall = 64;  // and more
  EXPECT_LE(tables(), with_tables - kRuns * kResults * kBytesPerCall);
}

TEST_F(FailingTest, ASessionsMemoryIsFreeWhenItsRunsHaveFailed) {
  RunAhead(/*named=*/false);
  ASSERT_GT(node_->Stats("").live_buffers, 0);
  Close(rank(0));
  ASSERT_GT(node_->Stats("").live_runs, 0) << "all failed in one slice: nothing to be seen";
  bool released = false;
  node_->AfterReleases("uid:0", [&] {
    released = true;
    EXPECT_EQ(node_->Stats("").live_runs, 0);
    EXPECT_EQ(node_->Stats("").live_buffers, 0);
  });
  while (Poll()) {
  }
  EXPECT_TRUE(released);
}

// A session may be in hundreds of worlds.
TEST_F(FailingTest, ASessionLeavesItsWorldsInTurnsOfBoundedWork) {
  constexpr int kWorlds = 800;
  const auto worlds = [this] { return node_->Worlds("", absl::nullopt, now_)->rows.size(); };
  const size_t others = worlds();
  const int64_t used = node_->Stats("").memory_used_bytes;
  for (int i = 0; i < kWorlds; ++i) {
    ASSERT_TRUE(Join(bystander()->session, absl::StrCat("one", i)).ok());
  }
  ASSERT_EQ(worlds(), others + kWorlds);
  // Each may come to remember why epochs have ended.
  EXPECT_GE(node_->Stats("").memory_used_bytes - used, kWorlds * Agreement::kMostCauseBytes);
  Close(bystander());
  ASSERT_GT(worlds(), others) << "it has left all in one slice: nothing to be seen";
  bool released = false;
  node_->AfterReleases("uid:0", [&] {
    released = true;
    EXPECT_EQ(worlds(), others + 1);
  });
  // It makes room for a session that wants its rank.
  EXPECT_TRUE(Join(rank(0)->session, "one0").ok());
  int turns = 0;
  while (!released) {
    ASSERT_TRUE(Poll());
    ++turns;
  }
  EXPECT_GT(turns, 3);
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
}

// A session with two ranks of a world, of which one has asked for a smaller one: neither survives,
// and a rank that joins a world of that name then finds a new one.
TEST_F(FailingTest, WhoHasEndedDoesNotSurviveAReform) {
  OpenSessionRequest open;
  open.tenant = "uid:0";
  open.devices = {DeviceIndex(0), DeviceIndex(1)};
  const SessionId both = node_->OpenSession(open, now_)->id;
  ASSERT_FALSE(Join(both, "pair", 0, 2, DeviceIndex(0)).ok());
  const absl::StatusOr<WorldInfo> pair = Join(both, "pair", 1, 2, DeviceIndex(1));
  ASSERT_TRUE(pair.ok()) << pair.status();
  absl::Status reformed;
  ReformWorldRequest reform;
  reform.world = pair->id;
  reform.rank = Rank(1);
  node_->ReformWorld(both, reform, now_,
                     [&](const absl::StatusOr<ReformResult>& r) { reformed = r.status(); });
  // It leaves its world behind one that takes many turns to leave all of its own.
  for (int i = 0; i < 800; ++i) {
    ASSERT_TRUE(Join(bystander()->session, absl::StrCat("one", i)).ok());
  }
  Close(bystander());
  {
    const WorkSlice slice;
    ASSERT_TRUE(node_->CloseSession(both, now_).ok());
  }
  ASSERT_TRUE(reformed.ok()) << "it has left already: nothing to be seen";
  EXPECT_FALSE(Join(rank(0)->session, "pair", 0, 2).ok());
  EXPECT_EQ(ErrorOf(reformed).reason, Reason::kSessionLost) << reformed;
  const absl::StatusOr<WorldInfo> next = Join(rank(1)->session, "pair", 1, 2);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_NE(next->id, pair->id);
  while (Poll()) {
  }
  EXPECT_EQ(node_->Worlds("", absl::nullopt, now_)->rows.size(), 2u);
}

// A rank's all_reduce, local runs of which each reads what all before it make, and an all_reduce of
// what the last one makes, which takes all of them with it into the world.
class AdoptionTest : public FailingTest {
 protected:
  explicit AdoptionTest(const NodeOptions& options = {}) : FailingTest(options) {}

  void RegisterAllReduces(int r, int results) {
    RegisterGraph graph;
    graph.graph = {0, 1};
    graph.encoded = EncodeGraph(AllReduces(r, results));
    Take(rank(r), std::move(graph));
  }
  // Of rank `r`, whose number is r + 1.
  chorus::Run AllReduceOf(int r, int number, TensorId first, int results) const {
    chorus::Run run = RunOf(number, first, results);
    const auto x = static_cast<float>(r + 1);
    std::memcpy(absl::get<InlineData>(run.inputs[0]).bytes.data(), &x, sizeof(x));
    return run;
  }
  void SubmitAll(int locals) {
    RegisterAllReduces(0, /*results=*/1);
    GraphBuilder builder(1, {});
    GraphInput input;
    input.type = TensorType(DType::kF32, {1});
    std::vector<ValueIndex> inputs;
    for (int i = 0; i <= locals; ++i) inputs.push_back(builder.AddInput(input));
    NodeSpec add;
    add.op = "add";
    add.inputs = {inputs[0], inputs[1]};
    GraphOutput output;
    output.value = builder.Emit(std::move(add))->front();
    builder.AddOutput(output);
    RegisterGraph graph;
    graph.graph = {1, 1};
    graph.encoded = EncodeGraph(builder.Build());
    Take(rank(0), std::move(graph));
    while (rank(0)->told.size() < 2) Poll();

    first_ = Take(rank(0), AllReduceOf(0, 0, {0, 1}, 1));
    for (int i = 0; i < locals; ++i) {
      chorus::Run local;
      local.graph = {1, 1};
      // What the one before it makes, then all.
      for (int j = 0; j <= locals; ++j) local.inputs.push_back(TensorId{j > i ? 0 : j, 1});
      local.inputs[0] = TensorId{i, 1};
      local.inputs[1] = TensorId{0, 1};
      if (i > 0) local.inputs[2] = TensorId{1, 1};
      local.outputs.resize(1);
      local.outputs[0].kind = OutBinding::Kind::kFresh;
      local.outputs[0].id = {i + 1, 1};
      Take(rank(0), std::move(local));
      while (Poll()) {
      }
    }
    chorus::Run last = RunOf(1, {locals + 1, 1}, 1);
    last.inputs[0] = TensorId{locals, 1};
    last_ = Take(rank(0), std::move(last));
  }
  // Of rank 0, the sequences of its runs of which this is noted, in order, each with its ticket.
  std::vector<std::pair<int64_t, Ticket>> Noted(FlightKind kind) const {
    std::vector<std::pair<int64_t, Ticket>> noted;
    const std::vector<FlightEvent> events = node_->Flight("", 10000).value();
    for (const FlightEvent& event : events) {
      if (event.session != clients_[0]->session || event.kind != kind) continue;
      noted.emplace_back(event.sequence.value(), event.ticket);
    }
    return noted;
  }

  void AwaitVotes(size_t votes) {
    while (Noted(FlightKind::kVoted).size() < votes) ASSERT_TRUE(Poll());
  }

  int64_t first_ = 0;  // its sequence, and the last one's
  int64_t last_ = 0;
};

constexpr int kManyLocals = 300;
static_assert(kManyLocals * kManyLocals / 2 > 2 * kMaxSliceWork, "a slice would do for all");

TEST_F(AdoptionTest, LocalRunsGoIntoAWorldInTurnsOfBoundedWork) {
  SubmitAll(kManyLocals);
  int turns = 0;
  for (; Poll(); ++turns) {
  }
  EXPECT_GT(turns, 10);
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
  const auto voted = Noted(FlightKind::kVoted);
  ASSERT_EQ(voted.size(), kManyLocals + 2u);
  for (size_t i = 0; i < voted.size(); ++i) {
    EXPECT_EQ(voted[i].first, first_ + static_cast<int64_t>(i));
  }
  Close(rank(2));
  while (Poll()) {
  }
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
  EXPECT_EQ(node_->Stats("").runs_failed, kManyLocals + 2);
  EXPECT_EQ(rank(0)->told.back(), std::make_pair(last_, Reason::kPeerLeft));
}

// Nobody is left behind whose world is in another epoch.
TEST_F(AdoptionTest, AnEpochMayEndMeanwhile) {
  SubmitAll(kManyLocals);
  AwaitVotes(kManyLocals / 2);
  const size_t voted = Noted(FlightKind::kVoted).size();
  ASSERT_LT(voted, kManyLocals + 1u) << "all in one slice: nothing to be seen";
  Close(rank(2));
  while (Poll()) {
  }
  EXPECT_EQ(Noted(FlightKind::kVoted).size(), voted + 1) << "the last one is late";
  EXPECT_EQ(node_->Stats("").live_runs, 0);
  ASSERT_EQ(rank(0)->told.size(), kManyLocals + 4u);
  for (size_t i = 2; i < rank(0)->told.size(); ++i) {
    EXPECT_EQ(rank(0)->told[i].second, Reason::kPeerLeft) << i;
  }
}

TEST_F(AdoptionTest, TheirSessionMayEndMeanwhile) {
  SubmitAll(kManyLocals);
  AwaitVotes(kManyLocals / 2);
  ASSERT_LT(Noted(FlightKind::kVoted).size(), kManyLocals + 1u);
  Close(rank(0));
  bool released = false;
  node_->AfterReleases("uid:0", [&] { released = true; });
  while (Poll()) {
  }
  EXPECT_TRUE(released);
  EXPECT_EQ(node_->Stats("").live_runs, 0);
  EXPECT_EQ(node_->Stats("").live_buffers, 0);
}

NodeOptions WithFailWork(int64_t work) {
  NodeOptions options;
  options.fail_work = work;
  return options;
}

// One step in each turn, as many as there is time for, all in one.
class AdoptionInSlicesTest : public AdoptionTest, public ::testing::WithParamInterface<int64_t> {
 protected:
  AdoptionInSlicesTest() : AdoptionTest(WithFailWork(GetParam())) {}
};
INSTANTIATE_TEST_SUITE_P(Work, AdoptionInSlicesTest,
                         ::testing::Values(int64_t{-1}, kTurnWork / 8, kMaxSliceWork));

TEST_P(AdoptionInSlicesTest, TheyAreLaunchedTogetherAndInOrderHoweverManySlicesItTook) {
  constexpr int kLocals = 40;
  SubmitAll(kLocals);
  EXPECT_EQ(Noted(FlightKind::kVoted).size() == kLocals + 2u, GetParam() == kMaxSliceWork);
  while (Poll()) {
  }
  ASSERT_EQ(Noted(FlightKind::kVoted).size(), kLocals + 2u);
  EXPECT_TRUE(Noted(FlightKind::kLaunched).empty());
  // The other ranks make both calls in one run.
  for (const int r : {1, 2}) {
    RegisterAllReduces(r, /*results=*/2);
    while (rank(r)->told.empty()) Poll();
    Take(rank(r), AllReduceOf(r, 0, {0, 1}, 2));
  }
  while (node_->Stats("").runs_published < kLocals + 4) Poll();
  const auto launched = Noted(FlightKind::kLaunched);
  ASSERT_EQ(launched.size(), kLocals + 2u);
  for (size_t i = 0; i < launched.size(); ++i) {
    EXPECT_EQ(launched[i].first, first_ + static_cast<int64_t>(i));
    EXPECT_EQ(launched[i].second, launched[0].second);
  }
  constexpr float kFirst = 1 + 2 + 3;
  float result = 0;
  node_->ReadTensor(rank(0)->session, {kLocals + 1, 1}, now_, [&](auto view) {
    ASSERT_TRUE(view.ok()) << view.status();
    std::memcpy(&result, view->data, sizeof(result));
  });
  EXPECT_EQ(result, kFirst * (kLocals + 1) + 2 + 3);
}

// A session has a run in each of many worlds, and all read what one local run makes, which waits
// for other ranks: when that fails each of these worlds is told.
class InManyWorldsTest : public FailingTest {
 protected:
  static constexpr int kWorlds = 800;
  static constexpr size_t kRegistered = 3;
  static constexpr size_t kOwnRuns = kWorlds + 2;

  void Wait() {
    testing::RankBuilder alone(/*rank=*/0, /*size=*/1);
    alone.set_wants_grad(false);
    GraphOutput output;
    output.value = alone.AllReduce(alone.Input(TensorType(DType::kF32, {1})));
    alone.graph().AddOutput(output);
    const Graph graphs[kRegistered] = {AllReduces(/*rank=*/0, /*results=*/1), NegateGraph(1),
                                       alone.graph().Build()};
    for (size_t slot = 0; slot < kRegistered; ++slot) {
      RegisterGraph graph;
      graph.graph = {static_cast<int32_t>(slot), 1};
      graph.encoded = EncodeGraph(graphs[slot]);
      Take(rank(0), std::move(graph));
    }
    while (rank(0)->told.size() < kRegistered) Poll();

    Take(rank(0), RunOf(0, {0, 1}, /*results=*/1));
    chorus::Run local = RunOf(0, {1, 1}, /*results=*/1);
    local.graph = {1, 1};
    local.inputs[0] = TensorId{0, 1};
    local.groups.clear();
    local_ = Take(rank(0), std::move(local));
    for (int i = 0; i < kWorlds; ++i) {
      const absl::StatusOr<WorldInfo> world = Join(rank(0)->session, absl::StrCat("one", i));
      ASSERT_TRUE(world.ok()) << world.status();
      chorus::Run of_world = RunOf(0, {2 + i, 1}, /*results=*/1);
      of_world.graph = {2, 1};
      of_world.inputs[0] = TensorId{1, 1};
      of_world.groups[0].world = last_world_ = world->id;
      Take(rank(0), std::move(of_world));
    }
    while (Poll()) {
    }
    ASSERT_EQ(node_->Stats("").live_runs, kOwnRuns);
  }
  // No epoch ends with that.
  void CancelLocal() {
    Take(rank(0), Cancel{Sequence(local_)});
    ASSERT_LT(node_->Stats("").runs_failed, kWorlds) << "all in one slice: nothing to be seen";
  }

  int64_t local_ = 0;  // its number
  WorldId last_world_;
};

TEST_F(InManyWorldsTest, TheyAreToldOfWhatFailedInTurnsOfBoundedWork) {
  Wait();
  Close(rank(2));
  int turns = 0;
  while (rank(0)->told.size() < kRegistered + kOwnRuns) {
    ASSERT_TRUE(Poll()) << rank(0)->told.size();
    ++turns;
  }
  EXPECT_GT(turns, kWorlds / 20);
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
  for (size_t i = kRegistered; i < rank(0)->told.size(); ++i) {
    EXPECT_EQ(rank(0)->told[i].second, Reason::kPeerLeft) << i;
  }
  EXPECT_EQ(node_->Stats("").runs_failed, kOwnRuns);
}

// Each of them fails with what its own world says of it, which may be long.
TEST_F(InManyWorldsTest, WhatTheyFailWithIsChargedWhileTheyWait) {
  Wait();
  const int64_t charged_before = charged();
  const HeapUse heap;
  // Why its epoch has ended each world was charged for when it was made; and of each, how it ended
  // and how its run did, the node remembers in any case.
  constexpr int64_t kRemembered = 3 * kWorlds * int64_t{Error::kMaxBytes + 512};
  constexpr int64_t kFew = int64_t{1} << 20;
  const auto expect_charged = [&] {
    EXPECT_LE(heap.bytes(), charged() - charged_before + kRemembered + kFew);
  };
  Take(rank(1), LongRefusal());
  // Then what the runs themselves were charged for goes, which is more than they have.
  while (node_->Stats("").runs_failed < kWorlds / 4) {
    expect_charged();
    ASSERT_TRUE(Poll());
  }
  while (Poll()) {
  }
  EXPECT_EQ(node_->Stats("").runs_failed, kOwnRuns);
}

TEST_F(InManyWorldsTest, TheirSessionGoesOnWhenAllHaveBeenTold) {
  Wait();
  CancelLocal();
  const int64_t last = Submit(rank(0), Release());
  Submit(bystander(), Release());
  EXPECT_EQ(bystander()->told.size(), 1u);
  // The first run waits for its other ranks still.
  while (rank(0)->told.back().first != last) ASSERT_TRUE(Poll());
  EXPECT_EQ(node_->Stats("").runs_failed, kWorlds + 1);
  EXPECT_EQ(node_->Stats("").live_runs, 1);
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
  std::vector<Reason> of_runs;
  for (const auto& [sequence, reason] : rank(0)->told) {
    if (sequence >= local_ && sequence <= local_ + kWorlds) of_runs.push_back(reason);
  }
  EXPECT_THAT(of_runs, ::testing::AllOf(::testing::SizeIs(kWorlds + 1),
                                        ::testing::Each(Reason::kCancelled)));
}

// Its run has failed with its epoch then, and with nothing else.
TEST_F(InManyWorldsTest, OneOfThemMayEndItsEpochMeanwhile) {
  Wait();
  CancelLocal();
  ASSERT_TRUE(
      node_->AbortWorld(rank(0)->session, {last_world_, Rank(0), Epoch(), "enough"}, now_).ok());
  while (Poll()) {
  }
  EXPECT_EQ(node_->Stats("").runs_failed, kWorlds + 1);
  EXPECT_THAT(rank(0)->told,
              ::testing::Contains(std::make_pair(local_ + kWorlds, Reason::kAborted)));
}

// Ranks of worlds of two, whose calls are in different lines, as long as lines may be.
class CallSitesTest : public FailingTest {
 protected:
  static constexpr int kLines = 1000;

  // A rank makes its calls in so many runs. They are recorded: no list, of which the votes would
  // have been charged for more than is left when it has been launched.
  void RegisterAll(int runs) {
    runs_ = runs;
    for (int r = 0; r < 2; ++r) {
      int line = 0;
      for (int run = 0; run < runs; ++run) {
        testing::RankBuilder b(r, /*size=*/2);
        const ValueIndex x = b.Input(TensorType(DType::kF32, {1}));
        for (int i = 0; i < kLines / runs; ++i) b.AllReduce(x);
        Graph graph = b.graph().Build();
        for (Node& node : graph.nodes) {
          node.source = absl::StrCat(std::string(500, static_cast<char>('a' + r)), ":", ++line);
        }
        RegisterStaged(rank(r), run, graph);
      }
    }
  }
  int64_t TakeAll(Client* client) {
    for (int number = 0; number < runs_; ++number) {
      chorus::Run run = RunOf(0, {0, 1}, /*results=*/0);
      run.graph = {number, 1};
      run.groups[0].base[0].call = int64_t{number} * kLines / runs_;
      Take(client, std::move(run));
    }
    return client->sequence;
  }
  // Rank 0 has voted when this returns.
  void Begin(const std::string& world, CheckCallSites check_call_sites) {
    for (int r = 0; r < 2; ++r) {
      const absl::StatusOr<WorldInfo> info =
          Join(rank(r)->session, world, r, 2, DeviceIndex(r), check_call_sites);
      if (info.ok()) world_ = info->id;
    }
    TakeAll(rank(0));
    while (Poll()) {
    }
  }
  // Then they are compared.
  int64_t TakeOther() { return TakeAll(rank(1)); }
  void Finish(int64_t sequence) {
    // Some of its runs are launched, others run at once: the last one need not end last.
    const auto& told = rank(1)->told;
    const auto outcome = [&] {
      return std::find_if(told.begin(), told.end(),
                          [sequence](const auto& row) { return row.first == sequence; });
    };
    while (Poll() || outcome() == told.end()) {
    }
    EXPECT_EQ(outcome()->second, Reason::kUnspecified);
  }
  std::vector<FlightEvent> WrittenDown() const {
    std::vector<FlightEvent> events = node_->Flight("", 10000).value();
    events.erase(std::remove_if(events.begin(), events.end(),
                                [](const FlightEvent& event) {
                                  return event.kind != FlightKind::kCallSitesDiffer;
                                }),
                 events.end());
    return events;
  }

  int runs_ = 0;
};

// One vote may bring as many as a world may ever have.
TEST_F(CallSitesTest, ThoseThatDifferAreWrittenDownInTurnsOfBoundedWork) {
  RegisterAll(/*runs=*/1);
  Begin("warned", CheckCallSites::kWarn);
  const int64_t sequence = TakeOther();
  EXPECT_LT(WrittenDown().size(), kLines) << "all in one slice: nothing to be seen";
  while (WrittenDown().size() < kLines) ASSERT_TRUE(Poll());
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
  Finish(sequence);
  const std::vector<FlightEvent> written = WrittenDown();
  ASSERT_EQ(written.size(), kLines);
  for (size_t i = 0; i < written.size(); ++i) {
    const absl::StatusOr<Error> error = node_->FindError(written[i].error, "uid:0");
    ASSERT_TRUE(error.ok()) << error.status();
    ASSERT_EQ(error->source, absl::StrCat(std::string(500, 'b'), ":", i + 1));
  }
}

TEST_F(CallSitesTest, WhatIsToBeWrittenDownIsCharged) {
  struct Use {
    int64_t heap = 0;
    int64_t charged = 0;
  };
  const auto vote = [this](const std::string& world, CheckCallSites check_call_sites) {
    Begin(world, check_call_sites);
    const int64_t charged_before = charged();
    const HeapUse heap;
    const int64_t sequence = TakeOther();
    const Use use = {heap.bytes(), charged() - charged_before};
    Finish(sequence);
    return use;
  };
  RegisterAll(/*runs=*/10);             // more than a vote is charged for
  vote("first", CheckCallSites::kOff);  // plans are loaded
  const int64_t charged_before = charged();
  const Use off = vote("off", CheckCallSites::kOff);
  const int64_t of_a_world = charged() - charged_before;
  const Use warned = vote("warned", CheckCallSites::kWarn);
  // Those that were written down at once are remembered as errors.
  constexpr int64_t kFew = int64_t{256} << 10;
  EXPECT_GT(warned.heap - off.heap, kLines * 1024);
  EXPECT_LE(warned.heap - off.heap, warned.charged - off.charged + kFew);
  EXPECT_LE(charged() - charged_before, 2 * of_a_world + kFew) << "it is still charged";
}

// A caller that waits for that hears of it, though the node ends.
TEST_F(FailingTest, TheNodesEndIsTheirs) {
  RunAhead();
  Close(rank(0));
  bool released = false;
  node_->AfterReleases("uid:0", [&] { released = true; });
  EXPECT_FALSE(released);
  node_.reset();
  EXPECT_TRUE(released);
}

// --- Memory -------------------------------------------------------------------------------------

class ReservingTest : public FailingTest {
 protected:
  static constexpr int kArenas = 30;
  // So large that each result has an arena of its own.
  static constexpr int64_t kElements = (int64_t{9} << 20) / 4;
  static constexpr int64_t kBytes = 4 * kElements;
  // What a turn makes.
  static constexpr int64_t kMost = kMaxSliceWork / 2 / Arena::kWorkToMake + 1;
  static_assert(kArenas > kMost, "a turn would do for all");

  explicit ReservingTest(const NodeOptions& options = {}, bool on_sim = false)
      : FailingTest(options, on_sim) {}

  // Of rank 0; `local`: without the others.
  static Graph ResultsOf(bool local) {
    testing::RankBuilder b(/*rank=*/0, kRanks);
    b.set_wants_grad(false);
    for (int i = 0; i < kArenas; ++i) {
      NodeSpec fill;
      fill.op = "fill";
      fill.attributes = TypeAttributes(TensorType(DType::kF32, {kElements}));
      fill.attributes.push_back({"value", static_cast<double>(i)});
      const ValueIndex filled = (*b.graph().Emit(fill))[0];
      GraphOutput output;
      output.value = local ? filled : b.AllReduce(filled);
      b.graph().AddOutput(output);
    }
    Graph graph = b.graph().Build();
    if (local) graph.group_slots.clear();
    return graph;
  }
  // Its first turn is over when this returns.
  void BeginRun(bool local) {
    Register(ResultsOf(local));
    chorus::Run run = RunOf(/*number=*/0, {0, 1}, kArenas);
    run.inputs.clear();
    if (local) run.groups.clear();
    sequence_ = Take(rank(0), std::move(run));
  }
  // Until all is there; others are heard in each turn, and each makes its share.
  void AwaitMemory() {
    int64_t live = LiveBuffers();
    EXPECT_GT(live, 0);
    EXPECT_LE(live, kMost) << "all in one turn: nothing to be seen";
    while (live < kArenas) {
      const size_t heard = bystander()->told.size();
      Submit(bystander(), Release());
      ASSERT_TRUE(Poll());
      EXPECT_GT(bystander()->told.size(), heard);
      const int64_t more = LiveBuffers() - live;
      EXPECT_GT(more, 0);
      EXPECT_LE(more, kMost);
      live += more;
    }
  }
  bool IsOver() { return rank(0)->told.back().first == sequence_; }
  Reason Outcome() {
    while (!IsOver()) Poll();
    return rank(0)->told.back().second;
  }
  int64_t LiveBuffers() const { return node_->Stats("").live_buffers; }

  int64_t sequence_ = 0;
};

TEST_F(ReservingTest, ManyArenasAreMadeInTurnsOfBoundedWork) {
  BeginRun(/*local=*/true);
  AwaitMemory();
  EXPECT_EQ(Outcome(), Reason::kUnspecified);
  EXPECT_EQ(LiveBuffers(), kArenas);
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
}

TEST_F(ReservingTest, WhatRanksHaveInCommonToo) {
  BeginRun(/*local=*/false);
  AwaitMemory();
  while (Poll()) {
  }
  EXPECT_EQ(node_->Stats("").live_runs, 1) << "it waits for the others";
  EXPECT_EQ(LiveBuffers(), kArenas + 1) << "one is its workspace";
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
  Close(rank(2));
  EXPECT_EQ(Outcome(), Reason::kPeerLeft);
  while (Poll()) {
  }
  EXPECT_EQ(LiveBuffers(), 0);
}

TEST_F(ReservingTest, ASessionThatEndsMeanwhileLeavesNothing) {
  BeginRun(/*local=*/true);
  ASSERT_GT(LiveBuffers(), 0);
  Close(rank(0));
  while (Poll()) {
  }
  EXPECT_EQ(node_->Stats("").live_runs, 0);
  EXPECT_EQ(LiveBuffers(), 0);
}

TEST_F(ReservingTest, AWorldThatEndsMeanwhileLeavesNothing) {
  BeginRun(/*local=*/false);
  ASSERT_GT(LiveBuffers(), 0);
  for (const int r : {0, 1, 2}) Close(rank(r));
  while (Poll()) {
  }
  EXPECT_EQ(node_->Stats("").live_runs, 0);
  EXPECT_EQ(LiveBuffers(), 0);
}

TEST_F(ReservingTest, AnEpochMayEndMeanwhile) {
  BeginRun(/*local=*/false);
  ASSERT_FALSE(IsOver());
  node_->SessionDied(rank(2)->session, now_);
  EXPECT_EQ(Outcome(), Reason::kPeerDied) << "it is late";
  while (Poll()) {
  }
  EXPECT_EQ(LiveBuffers(), 0);
}

// By rank 0 alone.
class ReservingAloneTest : public ReservingTest {
 protected:
  explicit ReservingAloneTest(bool on_sim = false) : ReservingTest(/*options=*/{}, on_sim) {}

  static TensorType Large() { return TensorType(DType::kF32, {kElements}); }
  // Memory of the client's from that byte on.
  ExternalRange Staged(int64_t offset) {
    ExternalRange range;
    node_->CreateStaging(
        rank(0)->session, 2 * kBytes,
        [&](const absl::StatusOr<StagingArena>& arena) { range.arena = arena->arena; });
    range.offset = offset;
    return range;
  }
  void Run(Graph graph, std::vector<Binding> inputs, std::vector<OutBinding> outputs) {
    graph.group_slots.clear();
    Register(graph);
    chorus::Run run;
    run.graph = {0, 1};
    run.inputs.assign(inputs.begin(), inputs.end());
    run.outputs.assign(outputs.begin(), outputs.end());
    sequence_ = Take(rank(0), std::move(run));
  }
  static std::vector<OutBinding> Named(int32_t results) {
    std::vector<OutBinding> outputs(static_cast<size_t>(results));
    for (int32_t i = 0; i < results; ++i) {
      outputs[static_cast<size_t>(i)].kind = OutBinding::Kind::kFresh;
      outputs[static_cast<size_t>(i)].id = {i, 1};
    }
    return outputs;
  }
};

TEST_F(ReservingAloneTest, WhatInputsAreCopiedToIsMadeInTurns) {
  testing::RankBuilder b;
  for (int i = 0; i < kArenas; ++i) {
    GraphOutput output;
    output.value = b.Op("sum", {b.Input(Large())});
    b.graph().AddOutput(output);
  }
  const ExternalRange range = Staged(/*offset=*/1);  // where no device reads
  Run(b.graph().Build(), std::vector<Binding>(kArenas, range), Named(kArenas));
  EXPECT_GT(LiveBuffers(), kArenas) << "sums have their places";
  EXPECT_LT(LiveBuffers(), 2 * kArenas) << "all in one turn: nothing to be seen";
  EXPECT_EQ(Outcome(), Reason::kUnspecified);
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
  EXPECT_EQ(node_->Stats("").paths.copied_bytes, kArenas * kBytes) << "once each";
  while (Poll()) {
  }
  EXPECT_EQ(LiveBuffers(), kArenas) << "sums";
}

class SimReservingTest : public ReservingAloneTest {
 protected:
  SimReservingTest() : ReservingAloneTest(/*on_sim=*/true) {}
};

TEST_F(SimReservingTest, WhatTensorsAreReadFromIsMadeInTurns) {
  BeginRun(/*local=*/true);
  EXPECT_EQ(Outcome(), Reason::kUnspecified);
  ForgetLargestSlice();
  MakeReadable read;
  for (int32_t i = 0; i < kArenas; ++i) read.tensors.push_back({i, 1});
  sequence_ = Take(rank(0), std::move(read));
  EXPECT_GT(LiveBuffers(), kArenas);
  EXPECT_LT(LiveBuffers(), 2 * kArenas) << "all in one turn: nothing to be seen";
  EXPECT_EQ(Outcome(), Reason::kUnspecified);
  EXPECT_EQ(LiveBuffers(), 2 * kArenas);
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
}

TEST_F(SimReservingTest, WhereResultsLandIsMadeInTurns) {
  const ExternalRange range = Staged(/*offset=*/0);
  std::vector<OutBinding> outputs(kArenas);
  for (OutBinding& output : outputs) {
    output.kind = OutBinding::Kind::kInto;
    output.into = range;
    output.into.strides = {2};
  }
  Run(ResultsOf(/*local=*/true), {}, std::move(outputs));
  EXPECT_GT(LiveBuffers(), 0);
  EXPECT_LT(LiveBuffers(), kArenas) << "all in one turn: nothing to be seen";
  EXPECT_EQ(Outcome(), Reason::kUnspecified);
  EXPECT_LE(LargestSliceWork(), kMaxSliceWork);
}

class ShortReservingTest : public ReservingTest {
 protected:
  static NodeOptions Short() {
    NodeOptions options;
    // A tenant may have seven eighths: one arena less than it wants.
    options.memory_limit_bytes = (kArenas - 1) * kBytes / 7 * 8;
    return options;
  }
  ShortReservingTest() : ReservingTest(Short()) {}
};

TEST_F(ShortReservingTest, WhatThereIsNoMemoryForIsRefusedWithAllOfIt) {
  BeginRun(/*local=*/true);
  ASSERT_FALSE(IsOver());
  EXPECT_EQ(Outcome(), Reason::kOutOfMemory);
  EXPECT_EQ(LiveBuffers(), 0);
}

}  // namespace
}  // namespace chorus::node
