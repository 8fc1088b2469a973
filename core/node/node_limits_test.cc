// What the node charges to a session that makes it hold something, and where it stops.
#include <atomic>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/work.h"
#include "core/collective/instance.h"
#include "core/node/node_rig.h"
#include "core/node/world.h"
#include "core/ops/graph_builder.h"
#include "core/runtime/devices.h"
#include "core/runtime/memory_guard.h"
#include "core/transport/command.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

// Two large all_reduces that nothing orders, that of group slot 0 first. The gang takes group 0,
// the world, before any other. In the program's order one large operand follows the other; in the
// gang's both stand at once.
Graph TwoGroupsGraph(int rank, int size) {
  GraphBuilder builder(1, {SlotOf(rank, size), SlotOf(rank, size)});
  std::vector<ValueIndex> sums;
  for (int group_slot = 0; group_slot < 2; ++group_slot) {
    const ValueIndex x = AddFill(&builder, kLarge, 1.0 + group_slot);
    const ValueIndex y = AddAllReduce(&builder, x, rank, "order.cc:1", group_slot);
    sums.push_back(AddOp(&builder, "sum", {y}));
  }
  AddOutput(&builder, AddOp(&builder, "add", sums));
  return builder.Build();
}

// What waits for a tensor takes memory: a command is charged for each that it names, once.
TEST_F(NodeTest, WhatWaitsForTensorsIsCharged) {
  Start(2);
  for (int r = 0; r < 2; ++r) {
    ranks_[r]->Register(0, AllReduceGraph(r, 2, TensorType(DType::kF32, {2}), "a.cc:1"));
    ranks_[r]->RunInline(0, {1, 2}, {1, 1});
  }
  for (auto& each : ranks_) ASSERT_TRUE(each->LastOutcome().ok()) << each->LastOutcome();
  DirectRank& rank = *ranks_[0];
  rank.RunInline(0, {1, 2}, {0, 1});
  rank.WaitUntilTaken();
  const int64_t idle = rank.Stats().memory_used_bytes;
  MakeReadable readable;
  readable.tensors.assign(MakeReadable::kMaxTensors, TensorId{0, 1});
  rank.Submit(readable);
  rank.WaitUntilTaken();
  const int64_t one = rank.Stats().memory_used_bytes - idle;
  EXPECT_GT(one, 0);
  EXPECT_LT(one, 2048) << "its name comes often";
  readable.tensors.resize(1);
  constexpr int kCommands = 100;
  for (int i = 0; i < kCommands; ++i) rank.Submit(readable);
  rank.WaitUntilTaken();
  const int64_t all = rank.Stats().memory_used_bytes - idle;
  EXPECT_GE(all, (kCommands + 1) * one);
  ranks_[1]->RunInline(0, {3, 4}, {0, 1});
  EXPECT_TRUE(rank.LastOutcome().ok()) << rank.LastOutcome();
  EXPECT_THAT(*rank.Read({0, 1}), testing::ElementsAre(4, 6));
  EXPECT_LE(rank.Stats().memory_used_bytes, idle);
}

// Names that stand for an error keep it, until they are released.
TEST_F(NodeTest, ErrorsThatNamesStandForAreCharged) {
  Start(1);
  DirectRank& rank = *ranks_[0];
  const int64_t idle = rank.Stats().memory_used_bytes;
  constexpr int kRuns = 500;
  constexpr int64_t kBytesPerName = 512;
  Release release;
  for (int32_t i = 0; i < kRuns; ++i) {
    rank.RunLocal(7, {}, {i, 1});  // a graph that is not there
    release.tensors.push_back({i, 1});
  }
  EXPECT_FALSE(rank.LastOutcome().ok());
  const int64_t failed = rank.Stats().memory_used_bytes - idle;
  EXPECT_GE(failed, kRuns * (kBytesPerName + static_cast<int64_t>(sizeof(Error))));
  rank.Submit(release);
  EXPECT_TRUE(rank.LastOutcome().ok());
  rank.RunLocal(7, {}, {kRuns, 1});
  EXPECT_FALSE(rank.LastOutcome().ok());
  EXPECT_LE(rank.Stats().memory_used_bytes - idle,
            failed - kRuns * static_cast<int64_t>(sizeof(Error)));
}

TEST_F(NodeTest, WantOfMemoryIsToldWithOpLineNeedFreeAndTheLargestHolders) {
  NodeOptions options;
  options.memory_limit_bytes = 5 * kLarge * static_cast<int64_t>(sizeof(float)) / 2;
  Start(2, options);
  Graph graph = OnesGraph();
  for (Node& node : graph.nodes) node.source = "train.cc:12";
  for (int r = 0; r < 2; ++r) {
    ranks_[r]->Register(0, graph);
    ranks_[r]->Submit(DirectRank::LocalRun(0, {}, {{0, 1}}));
    EXPECT_TRUE(ranks_[r]->LastOutcome().ok()) << ranks_[r]->LastOutcome();
  }
  ranks_[1]->Submit(DirectRank::LocalRun(0, {}, {{1, 1}}));
  const absl::Status status = ranks_[1]->LastOutcome();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  const std::string held = absl::StrCat(" with ", kLarge * sizeof(float), " bytes");
  for (const std::string& part :
       {std::string("(train.cc:12): out of memory: "), std::string(" bytes are needed, "),
        absl::StrCat(" of the ", options.memory_limit_bytes / 8 * 7,
                     " that tenant uid:0 may hold are free"),
        absl::StrCat("rank 0 of \"job\" (pid 1000)", held),
        absl::StrCat("rank 1 of \"job\" (pid 1001)", held), std::string("--memory_limit_bytes")}) {
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(part));
  }
  EXPECT_EQ(ErrorOf(status).source, "train.cc:12");
  // A tensor that never fits is no wrong type.
  CreateTensor create;
  create.tensor = {2, 1};
  create.type = TensorType(DType::kU8, {options.memory_limit_bytes + 1});
  create.source = DirectRank::Inline({1});
  create.call_site = "data.cc:7";
  ranks_[1]->Submit(std::move(create));
  const Error error = ErrorOf(ranks_[1]->LastOutcome());
  EXPECT_EQ(error.reason, Reason::kOutOfMemory) << error.message;
  EXPECT_EQ(error.code, absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(error.message, testing::HasSubstr("is larger than the limit of"));
  EXPECT_EQ(error.source, "data.cc:7");
  EXPECT_THAT(error.message, testing::AllOf(testing::HasSubstr("from_host (data.cc:7): "),
                                            testing::HasSubstr(held)));
}

// A session may be in hundreds of worlds, with names of 256 bytes: each error would have them all.
TEST_F(NodeTest, OfTheWorldsOfALargestHolderAFewAreNamed) {
  constexpr int kWorlds = 50;
  NodeOptions options;
  options.memory_limit_bytes = int64_t{64} << 20;
  Start(1, options);
  DirectRank& rank = *ranks_[0];
  for (int i = 0; i < kWorlds; ++i) {
    JoinRequest join;
    join.name = absl::StrCat("world", i);
    join.size = 1;
    join.rank = Rank(0);
    EXPECT_TRUE(rank.Call<absl::Status>([&](LocalNode& node, absl::Time now, auto* done) {
                      node.JoinWorld(rank.session(), join, now,
                                     [done](const absl::StatusOr<WorldInfo>& joined) {
                                       done->Set(Detached(joined.status()));
                                     });
                    })
                    .ok());
  }
  CreateTensor create;
  create.tensor = {0, 1};
  create.type = TensorType(DType::kU8, {8});
  create.source = DirectRank::Inline({1, 2});
  rank.Submit(create);
  create.tensor = {1, 1};
  create.type = TensorType(DType::kU8, {options.memory_limit_bytes + 1});
  rank.Submit(create);
  const Error error = ErrorOf(rank.LastOutcome());
  EXPECT_EQ(error.reason, Reason::kOutOfMemory) << error.message;
  EXPECT_THAT(error.message,
              testing::HasSubstr("the largest holders are rank 0 of \"job\" and rank 0 of "
                                 "\"world0\" and rank 0 of \"world1\" and 48 more (pid 1000) "
                                 "with 8 bytes"));
}

// To look at all that a session with tens of thousands of tensors has would take too long.
TEST_F(NodeTest, TheLargestHoldersAreLookedForInSoManyTensors) {
  constexpr int32_t kTensors = 5000;
  NodeOptions options;
  options.memory_limit_bytes = int64_t{64} << 20;
  Start(1, options);
  CreateTensor create;
  create.type = TensorType(DType::kU8, {8});
  create.source = DirectRank::Inline({1, 2});
  std::vector<CommandBody> creates;
  for (int32_t i = 0; i < kTensors; ++i) {
    create.tensor = {i, 1};
    creates.push_back(create);
  }
  ranks_[0]->SubmitTogether(std::move(creates));
  create.tensor = {kTensors, 1};
  create.type = TensorType(DType::kU8, {options.memory_limit_bytes + 1});
  ranks_[0]->Submit(create);
  const absl::Status status = ranks_[0]->LastOutcome();
  EXPECT_EQ(ErrorOf(status).reason, Reason::kOutOfMemory) << status;
  EXPECT_THAT(std::string(status.message()),
              testing::HasSubstr("rank 0 of \"job\" (pid 1000) with at least "));
}

// Pages are unmapped beside the node thread, while the next command may be there already.
TEST_F(NodeTest, WhoNeedsMemoryThatIsOnItsWayBackWaitsForIt) {
  constexpr int64_t kMiB = 1 << 20;
  NodeOptions options;
  options.memory_limit_bytes = 128 * kMiB;
  Start(2, options);
  // Two operands and their sum: 96 MiB and more, each time in other sizes, so that all of the
  // memory has to go and come.
  for (int32_t i = 0; i < 4; ++i) {
    const int64_t elements = (8 + i % 2) * kMiB;
    for (int r = 0; r < 2; ++r) {
      GraphBuilder builder(1, {SlotOf(r, 2)});
      AddOutput(&builder, AddAllReduce(&builder, AddFill(&builder, elements, r + 1), r, "a.cc:1"));
      ranks_[r]->Register(i, builder.Build());
      ASSERT_TRUE(ranks_[r]->LastOutcome().ok());
    }
    for (int r = 0; r < 2; ++r) {
      Release release;
      if (i > 0) release.tensors.push_back({i - 1, 1});
      ranks_[r]->SubmitTogether({release, ranks_[r]->WorldRun(i, {}, {{i, 1}})});
    }
    for (int r = 0; r < 2; ++r) {
      ASSERT_TRUE(ranks_[r]->LastOutcome().ok()) << i << ": " << ranks_[r]->LastOutcome();
      EXPECT_EQ(*ranks_[r]->Read({i, 1}), std::vector<float>(elements, 3.0f)) << i;
    }
  }
  // The same of a tensor that is copied, behind a result.
  const ClientMemory memory(ranks_[0].get(), 7 * kMiB);  // -1 each
  CreateTensor create;
  create.tensor = {9, 1};
  create.type = TensorType(DType::kF32, {7 * kMiB});
  create.source = memory.From(0).into;
  Release release;
  release.tensors = {{3, 1}};
  ranks_[1]->Submit(release);
  ranks_[0]->SubmitTogether({release, create});
  EXPECT_TRUE(ranks_[0]->LastOutcome().ok()) << ranks_[0]->LastOutcome();
  EXPECT_EQ(*ranks_[0]->Read({9, 1}), std::vector<float>(7 * kMiB, -1.0f));
}

// What waits holds its session, whose end needs most of the node.
TEST_F(NodeTest, TheNodeMayEndWhileSomebodyWaitsForMemory) {
  constexpr int64_t kMiB = 1 << 20;
  NodeOptions options;
  options.memory_limit_bytes = 256 * kMiB;
  Start(1, options);
  for (int32_t i = 0; i < 2; ++i) {
    GraphBuilder builder(1, {});
    AddOutput(&builder, AddFill(&builder, (30 + 20 * i) * kMiB, 1));
    ranks_[0]->Register(i, builder.Build());
  }
  ranks_[0]->Submit(DirectRank::LocalRun(0, {}, {{0, 1}}));
  ASSERT_TRUE(ranks_[0]->LastOutcome().ok());
  Release release;
  release.tensors = {{0, 1}};
  ranks_[0]->SubmitTogether({release, DirectRank::LocalRun(1, {}, {{1, 1}})});
  const auto told = std::make_shared<std::vector<absl::Status>>();
  loop_->PostOwn([&](LocalNode& node, absl::Time) {
    node.CreateStaging(
        ranks_[0]->session(), 200 * kMiB,
        [told](const absl::StatusOr<StagingArena>& staging) { told->push_back(staging.status()); });
  });
  loop_.reset();
  EXPECT_EQ(told.use_count(), 1) << "who waits is kept";
  // Some 50 ms are between.
  ASSERT_LE(told->size(), 1u);
  if (!told->empty() && told->front().ok()) {
    std::cout << "the memory came before the node's end: nothing was to be seen\n";
  }
}

// Asks for memory for the gang's order before anything is launched.
TEST_F(NodeTest, AGangWhoseOrderTakesTooMuchMemoryIsRefusedBeforeItsLaunch) {
  for (const bool enough : {false, true}) {
    NodeOptions options;
    // Two results, and for each rank one large operand, or two.
    options.memory_limit_bytes = int64_t{enough ? 48 : 20} << 20;
    options.share_equal_work = false;
    loop_.reset();  // before its backend
    ranks_.clear();
    Start(2, options);
    for (int r = 0; r < 2; ++r) {
      const GroupId group = ranks_[r]->CreateGroup({Rank(0), Rank(1)});
      ranks_[r]->Register(0, TwoGroupsGraph(r, 2));
      ASSERT_TRUE(ranks_[r]->LastOutcome().ok());
      ranks_[r]->RunTwoGroups(0, group, {0, 1});
    }
    if (enough) {
      for (int r = 0; r < 2; ++r) {
        const absl::Status status = ranks_[r]->LastOutcome();
        EXPECT_TRUE(status.ok()) << status;
        EXPECT_THAT(*ranks_[r]->Read({0, 1}), testing::ElementsAre(6.0f * kLarge));
      }
      continue;
    }
    std::vector<Reason> reasons;
    for (int r = 0; r < 2; ++r) {
      const Error error = ErrorOf(ranks_[r]->LastOutcome());
      EXPECT_THAT(error.message, testing::HasSubstr("bytes are needed")) << r;
      reasons.push_back(error.reason);
    }
    EXPECT_THAT(reasons, testing::UnorderedElementsAre(Reason::kOutOfMemory, Reason::kPeerRefused));
    const auto flight = ranks_[0]->Call<std::vector<FlightEvent>>(
        [&](LocalNode& node, absl::Time, auto* done) { done->Set(*node.Flight("", 100)); });
    for (const FlightEvent& event : flight) EXPECT_NE(event.kind, FlightKind::kLaunched);
    const auto devices = ranks_[0]->Call<std::vector<DeviceInfo>>(
        [&](LocalNode& node, absl::Time, auto* done) { done->Set(node.Devices("")); });
    for (const DeviceInfo& device : devices) EXPECT_EQ(device.launches, 0) << device.name;
  }
}

// Each rank's run has one collective and one result; then one of them has a result more.
TEST_F(NodeTest, WhatIsLaunchedTogetherHasSoManyCollectivesAndResults) {
  NodeOptions options;
  options.sequencer.max_gang_size = 4;
  Start(2, options);
  const TensorType type(DType::kF32, {2});
  for (int r = 0; r < 2; ++r) {
    ranks_[r]->Register(0, AllReduceGraph(r, 2, type, "a.cc:1"));
    ranks_[r]->RunInline(0, {1, 2}, {0, 1});
  }
  for (auto& rank : ranks_) EXPECT_TRUE(rank->LastOutcome().ok()) << rank->LastOutcome();
  GraphBuilder builder(1, {SlotOf(1, 2)});
  const ValueIndex sum = AddAllReduce(&builder, AddInput(&builder, type), 1, "a.cc:1");
  AddOutput(&builder, sum);
  AddOutput(&builder, AddOp(&builder, "neg", {sum}));
  ranks_[1]->Register(1, builder.Build());
  ranks_[0]->RunInline(0, {1, 2}, {1, 1});
  ranks_[1]->Submit(ranks_[1]->WorldRun(1, {DirectRank::Inline({1, 2})}, {{1, 1}, {2, 1}}));
  const absl::Status second = ranks_[1]->LastOutcome();
  EXPECT_EQ(ErrorOf(second).reason, Reason::kQuota) << second;
  const absl::Status first = ranks_[0]->LastOutcome();
  EXPECT_EQ(ErrorOf(first).reason, Reason::kPeerRefused) << first;
  EXPECT_EQ(ErrorOf(first).culprit.rank, 1);
}

TEST_F(NodeTest, MemoryIsBackWhenSessionsAre) {
  Start(2);
  for (int r = 0; r < 2; ++r) {
    ranks_[r]->Register(0, AllReduceGraph(r, 2, TensorType(DType::kF32, {4}), "a.cc:1"));
    ranks_[r]->RunInline(0, {1, 2, 3, 4}, {0, 1});
    EXPECT_TRUE(r == 0 || ranks_[r]->LastOutcome().ok());
  }
  for (int r = 0; r < 2; ++r) {
    EXPECT_TRUE(ranks_[r]
                    ->Call<absl::Status>([&](LocalNode& node, absl::Time now, auto* done) {
                      done->Set(node.CloseSession(ranks_[r]->session(), now));
                    })
                    .ok());
  }
  // Large graphs go in the background.
  NodeStats stats = ranks_[0]->Stats();
  const absl::Time deadline = absl::Now() + kPatience;
  while (stats.memory_used_bytes > 0 && absl::Now() < deadline) stats = ranks_[0]->Stats();
  EXPECT_EQ(stats.memory_used_bytes, 0);
  EXPECT_EQ(stats.runs_published, 2);
}

// It has put pages where no account has them, such as into sockets.
TEST_F(NodeTest, WhatIsInNoAccountRefusesArenasAndSessionsMemoryAndOthersGoOn) {
  constexpr int64_t kMost = int64_t{256} << 20;
  std::atomic<int64_t> had_bytes{0};
  const MemoryGuard::Read read = [&had_bytes] { return had_bytes.load(); };
  MemoryGuard guard(kMost, {read, read});
  NodeOptions options;
  options.memory_guard = &guard;
  Start(2, options);
  const auto run = [this](uint32_t generation) {
    for (int r = 0; r < 2; ++r) {
      ranks_[r]->RunInline(0, {1.0f + static_cast<float>(r), 2}, {1, generation});
    }
    for (auto& rank : ranks_) {
      EXPECT_TRUE(rank->LastOutcome().ok()) << rank->LastOutcome();
      Release release;
      release.tensors = {{1, generation}};
      rank->Submit(release);
    }
  };
  for (int r = 0; r < 2; ++r) {
    ranks_[r]->Register(0, AllReduceGraph(r, 2, TensorType(DType::kF32, {2}), "a.cc:1"));
  }
  run(1);
  had_bytes = kMost;
  const auto staging = ranks_[0]->CreateStaging(MemoryGuard::kBytesALook + 1);
  EXPECT_EQ(ErrorOf(staging.status()).reason, Reason::kOutOfMemory);
  EXPECT_THAT(ErrorOf(staging.status()).message, testing::HasSubstr("in no account"));
  const auto attached = ranks_[1]->Call<absl::Status>([&](LocalNode& node, absl::Time, auto* done) {
    done->Set(node.AttachMemory(ranks_[1]->session()).status());
  });
  EXPECT_EQ(ErrorOf(attached).reason, Reason::kOutOfMemory);
  for (uint32_t generation = 2; generation < 13; ++generation) run(generation);
  // Whoever kept them has gone.
  had_bytes = 0;
  absl::Status again = attached;
  const absl::Time deadline = absl::Now() + kPatience;
  while (!again.ok() && absl::Now() < deadline) {  // a refusal counts for a while
    again = ranks_[0]->CreateStaging(MemoryGuard::kBytesALook + 1).status();
  }
  EXPECT_TRUE(again.ok()) << again;
  loop_.reset();
}

// One rank whose session holds two devices, the first of which it joined with.
TEST_F(NodeTest, RunsUnderWayAreChargedUntilTheyEnd) {
  Start(2);
  for (int r = 0; r < 2; ++r) {
    ranks_[r]->Register(0, AllReduceGraph(r, 2, TensorType(DType::kF32, {4}), "a.cc:1"));
    ranks_[r]->RunInline(0, {1, 2, 3, 4}, {0, 1});
  }
  for (int r = 0; r < 2; ++r) EXPECT_TRUE(ranks_[r]->LastOutcome().ok());
  const int64_t idle = ranks_[0]->Stats().memory_used_bytes;
  constexpr int kRuns = 100;
  for (int i = 1; i <= kRuns; ++i) ranks_[0]->RunInline(0, {1, 2, 3, 4}, {i, 1});
  const int64_t waiting = ranks_[0]->Stats().memory_used_bytes;
  EXPECT_GE(waiting, idle + kRuns * 4096);
  for (int i = 1; i <= kRuns; ++i) ranks_[1]->RunInline(0, {1, 2, 3, 4}, {i, 1});
  for (int r = 0; r < 2; ++r) EXPECT_TRUE(ranks_[r]->LastOutcome().ok());
  EXPECT_LE(ranks_[0]->Stats().memory_used_bytes, waiting - kRuns * 2048);  // in steps
}

// Seven bytes of a frame are an instance's key, whether a node uses it or not.
TEST_F(NodeTest, TheInstancesThatARunNamesAreCharged) {
  Start(2);
  constexpr int kInstances = 500;
  GraphBuilder builder(1, {SlotOf(0, 2)});
  const ValueIndex x = AddInput(&builder, TensorType(DType::kF32, {1}));
  AddOutput(&builder, AddAllReduce(&builder, x, 0, "a.cc:1"));
  for (int i = 0; i < kInstances; ++i) AddOp(&builder, "neg", {x});
  Graph graph = builder.Build();
  graph.num_instance_slots = kInstances;
  DirectRank& rank = *ranks_[0];
  rank.Register(0, graph);
  ASSERT_TRUE(rank.LastOutcome().ok()) << rank.LastOutcome();
  const auto run = [&rank](int output) {
    chorus::Run run = rank.WorldRun(0, {DirectRank::Inline({1})}, {{output, 1}});
    run.instances.resize(kInstances);
    for (InstanceKey& key : run.instances) key.path.resize(3);
    rank.Submit(std::move(run));
    rank.WaitUntilTaken();
    return rank.Stats().memory_used_bytes;
  };
  const int64_t one = run(0);
  constexpr int kRuns = 20;
  for (int i = 1; i < kRuns; ++i) run(i);
  ASSERT_EQ(rank.Stats().live_runs, kRuns);
  EXPECT_GE(run(kRuns) - one,
            kRuns * kInstances *
                    static_cast<int64_t>(sizeof(InstanceKey) + 4 * sizeof(InstanceKey::Request)) -
                (64 << 10));  // in steps
  rank.AbortWorld("enough");
}

// An all_reduce that may be differentiated.
ValueIndex AddRecorded(GraphBuilder* builder, ValueIndex x, InstanceRef instance) {
  NodeSpec spec;
  spec.op = "all_reduce";
  spec.inputs = {x};
  spec.collective = Collective();
  spec.collective->kind = CollectiveKind::kAllReduce;
  spec.collective->reduction = Reduction::kSum;
  spec.collective->rank = GroupRank(0);
  spec.collective->instance = instance;
  spec.collective->wants_grad = true;
  return (*builder->Emit(spec))[0];
}

// A few bytes of a frame name a gradient of high order, and the agreement keeps the name.
TEST_F(NodeTest, NamesOfGradientsAreChargedBeforeTheyAreKept) {
  constexpr int kOrder = static_cast<int>(kMaxGradientOrder) - 1;
  constexpr int kCalls = 300;
  Start(1);
  DirectRank& rank = *ranks_[0];
  // The gradient of so high an order of a call, in one graph.
  for (const int order : {0, kOrder}) {
    GraphBuilder builder(1, {SlotOf(0, 1)});
    ValueIndex x = AddInput(&builder, TensorType(DType::kF32, {1}));
    x = AddRecorded(&builder, x, InstanceRef());
    for (int node = 0; node < order; ++node) {
      x = AddRecorded(&builder, x, {InstanceRef::Kind::kGradient, node, 0, -1});
    }
    AddOutput(&builder, x);
    rank.Register(order == 0 ? 0 : 1, builder.Build());
    ASSERT_TRUE(rank.LastOutcome().ok()) << rank.LastOutcome();
  }
  GraphBuilder builder(1, {SlotOf(0, 1)});
  ValueIndex x = AddInput(&builder, TensorType(DType::kF32, {1}));
  for (int i = 0; i < kCalls; ++i) {
    x = AddRecorded(&builder, x, {InstanceRef::Kind::kBound, -1, 0, i});
  }
  AddOutput(&builder, x);
  Graph gradients = builder.Build();
  gradients.num_instance_slots = kCalls;
  rank.Register(2, gradients);
  ASSERT_TRUE(rank.LastOutcome().ok()) << rank.LastOutcome();
  InstanceKey forward;
  forward.since = Epoch(1);
  const auto differentiate = [&](int32_t graph, int order) {
    rank.RunInline(graph, {1}, {2 * graph, 1});
    EXPECT_TRUE(rank.LastOutcome().ok()) << rank.LastOutcome();
    chorus::Run run = rank.WorldRun(2, {DirectRank::Inline({1})}, {{2 * graph + 1, 1}});
    forward.path.assign(static_cast<size_t>(order), {0, 0});
    for (int i = 0; i < kCalls; ++i) run.instances.push_back(forward.Gradient({0, i}));
    rank.Submit(std::move(run));
    EXPECT_TRUE(rank.LastOutcome().ok()) << rank.LastOutcome();
    forward.at.call += 2;  // a run counts as one, with calls of its own or without
    return rank.Stats().memory_used_bytes;
  };
  const int64_t of_first_order = differentiate(0, 0);
  // Of what is pending, of its tape, and of what is kept by its name.
  constexpr int64_t kBytes = 3 * kMaxGradientOrder * sizeof(InstanceKey::Request);
  EXPECT_GE(differentiate(1, kOrder) - of_first_order, kCalls * kBytes);
}

// Each of many runs that read what a local one makes of many results waits for all of these.
TEST_F(NodeTest, WhatARunWaitsForThroughOthersIsCharged) {
  Start(2);
  constexpr int kRuns = 100;
  DirectRank& rank = *ranks_[0];
  rank.Register(0, AllReduceGraph(0, 2, TensorType(DType::kF32, {1}), "a.cc:1"));
  rank.Register(1, NegateGraph(1));
  GraphBuilder builder(1, {});
  ValueIndex sum = AddInput(&builder, TensorType(DType::kF32, {1}));
  for (int i = 1; i < kRuns; ++i) {
    sum = AddOp(&builder, "add", {sum, AddInput(&builder, TensorType(DType::kF32, {1}))});
  }
  AddOutput(&builder, sum);
  rank.Register(2, builder.Build());
  std::vector<Binding> results;
  for (int i = 0; i < kRuns; ++i) {
    rank.RunInline(0, {1}, {i, 1});
    results.emplace_back(TensorId{i, 1});
  }
  rank.Submit(DirectRank::LocalRun(2, results, {{kRuns, 1}}));
  rank.WaitUntilTaken();
  const int64_t before = rank.Stats().memory_used_bytes;
  for (int i = 0; i < kRuns; ++i) rank.RunLocal(1, {TensorId{kRuns, 1}}, {kRuns + 1 + i, 1});
  rank.WaitUntilTaken();
  ASSERT_EQ(rank.Stats().live_runs, 2 * kRuns + 1);
  EXPECT_GE(rank.Stats().memory_used_bytes - before,
            kRuns * (4096 + 56 * kRuns) - (64 << 10));  // in steps
  rank.AbortWorld("enough");
}

TEST_F(NodeTest, GroupsAreChargedBeforeTheyAreMade) {
  NodeOptions options;
  options.memory_limit_bytes = 8 << 20;
  Start(2, options);
  std::vector<GroupId> made[2];
  const auto make = [&](size_t rank, int groups) -> absl::Status {
    DirectRank& asks = *ranks_[rank];
    for (int i = 0; i < groups; ++i) {
      const auto group =
          asks.Call<absl::StatusOr<GroupId>>([&](LocalNode& node, absl::Time, auto* done) {
            done->Set(node.CreateGroup(
                asks.session(),
                {asks.world(), Rank(static_cast<int>(rank)), {Rank(0), Rank(1)}, {}, {}}));
          });
      if (!group.ok()) return group.status();
      made[rank].push_back(*group);
    }
    return absl::OkStatus();
  };
  const int64_t idle = ranks_[0]->Stats().memory_used_bytes;
  EXPECT_TRUE(make(0, 200).ok());
  const int64_t used = ranks_[0]->Stats().memory_used_bytes;
  EXPECT_GE(used, idle + 200 * 512);
  const int64_t free_bytes = options.memory_limit_bytes / 8 * 7 - used;
  ASSERT_TRUE(ranks_[0]->CreateStaging(free_bytes / 4096 * 4096).ok());
  EXPECT_EQ(ErrorOf(make(0, 200)).reason, Reason::kOutOfMemory);
  // What is there takes nothing more.
  const absl::Status others = make(1, static_cast<int>(made[0].size()));
  EXPECT_TRUE(others.ok()) << others;
  EXPECT_EQ(made[1], made[0]);
  EXPECT_EQ(ErrorOf(make(1, 1)).reason, Reason::kOutOfMemory);
}

TEST_F(NodeTest, WhatARefusalCountsIsChargedOrItsRankIsOutOfLine) {
  NodeOptions options;
  options.memory_limit_bytes = 8 << 20;
  Start(2, options);
  ranks_[1]->Register(0, AllReduceGraph(1, 2, TensorType(DType::kF32, {4}), "a.cc:1"));
  ranks_[1]->RunInline(0, {1, 2, 3, 4}, {0, 1});
  ranks_[1]->WaitUntilTaken();
  const int64_t idle = ranks_[0]->Stats().memory_used_bytes;
  ranks_[0]->RefuseSends(0, 1000);
  ASSERT_GE(ranks_[0]->Stats().memory_used_bytes, idle + 1000 * 256);
  // Until there is no room for more. Then the rank takes part in nothing, and nobody waits for it.
  for (int64_t i = 1; i < 30; ++i) ranks_[0]->RefuseSends(i * 1000, 1000);
  const Error waited = ErrorOf(ranks_[1]->LastOutcome());
  EXPECT_EQ(waited.reason, Reason::kMismatch) << waited.message;
  EXPECT_THAT(waited.message, testing::HasSubstr("calls could not be counted"));
}

// It has room for all its members from its first one on.
TEST_F(NodeTest, AWorldIsChargedForMembersThatMayNeverCome) {
  backend_ = HostDevices(1);
  loop_ = std::make_unique<NodeLoop>(NodeOptions(), DevicesOf(backend_.get()));
  constexpr int kRanks = 1024;
  const auto first_of = [this](const std::string& world, int size) {
    return std::make_unique<DirectRank>(loop_.get(), 0, size, world,
                                        std::vector<DeviceIndex>{DeviceIndex(0)});
  };
  const auto small = first_of("small", 2);
  const int64_t one = small->Stats().memory_used_bytes;
  const auto large = first_of("large", kRanks);
  EXPECT_GE(large->Stats().memory_used_bytes - one, kRanks * int64_t{sizeof(World::Member)});
}

TEST_F(NodeTest, ListsEndWhereTheyTakeTooLong) {
  backend_ = HostDevices(1);
  loop_ = std::make_unique<NodeLoop>(NodeOptions(), DevicesOf(backend_.get()));
  constexpr int kRanks = 1024;
  constexpr int kWhole = kMaxListed / kRanks;
  std::vector<std::unique_ptr<DirectRank>> early;
  const auto worlds = [&early](absl::optional<WorldId> one) {
    return early[0]->Call<Listing<WorldInfo>>([one](LocalNode& node, absl::Time now, auto* done) {
      done->Set(*node.Worlds("", one, now));
    });
  };
  const auto pending = [&early] {
    return early[0]->Call<Listing<PendingView>>(
        [](LocalNode& node, absl::Time now, auto* done) { done->Set(node.Pending("", now)); });
  };
  while (early.size() < kWhole + 2) {
    early.push_back(std::make_unique<DirectRank>(loop_.get(), 0, kRanks,
                                                 absl::StrCat("job", early.size()),
                                                 std::vector<DeviceIndex>{DeviceIndex(0)}));
    const size_t listed = std::min<size_t>(early.size(), kWhole);
    EXPECT_EQ(worlds(absl::nullopt).rows.size(), listed);
    EXPECT_EQ(worlds(absl::nullopt).truncated, early.size() >= kWhole);
    EXPECT_EQ(pending().rows.size(), listed);
    EXPECT_EQ(pending().truncated, early.size() >= kWhole);
  }
  const Listing<WorldInfo> last = worlds(WorldId(kWhole + 2));
  ASSERT_EQ(last.rows.size(), 1u);
  EXPECT_EQ(last.rows[0].name, absl::StrCat("job", kWhole + 1));
  EXPECT_FALSE(last.truncated);
}

// However much is in them, each is looked at for a moment.
TEST_F(NodeTest, StatsAreCountedByTheWorldsThatTheyAreOf) {
  backend_ = HostDevices(1);
  loop_ = std::make_unique<NodeLoop>(NodeOptions(), DevicesOf(backend_.get()));
  std::vector<std::unique_ptr<DirectRank>> ranks;
  const auto work = [&ranks] {
    return ranks[0]->Call<int64_t>([](LocalNode& node, absl::Time, auto* done) {
      const WorkSlice slice;
      node.Stats("");
      done->Set(SliceWork());
    });
  };
  const auto join = [&] {
    ranks.push_back(std::make_unique<DirectRank>(loop_.get(), 0, 1,
                                                 absl::StrCat("job", ranks.size()),
                                                 std::vector<DeviceIndex>{DeviceIndex(0)}));
    ranks.back()->AwaitWorld();
  };
  join();
  const int64_t of_one = work();
  while (ranks.size() < 20) join();
  EXPECT_EQ(work(), of_one + 19);
  for (int i = 0; i < 50; ++i) ranks[0]->CreateGroup({Rank(0)});
  EXPECT_EQ(ranks[0]->Stats().agreement_rows, 20 + 100);
  EXPECT_EQ(work(), of_one + 19);
}

}  // namespace
}  // namespace chorus::node
