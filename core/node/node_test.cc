// The node driven directly: frames in, outcomes and tensors out, over a real backend.
#include "core/node/node.h"

#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/backend/fault/fault_backend.h"
#include "core/backend/fault/fault_script.h"
#include "core/backend/host/host_backend.h"
#include "core/backend/sim/sim_backend.h"
#include "core/base/mutex.h"
#include "core/base/thread_pool.h"
#include "core/base/unique_fd.h"
#include "core/base/work.h"
#include "core/graph/encoding.h"
#include "core/node/node_loop.h"
#include "core/ops/graph_builder.h"
#include "core/ops/host_kernel.h"
#include "core/ops/host_kernels.h"
#include "core/runtime/devices.h"
#include "core/transport/command.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(30);

// Waits for something that happens on the node thread.
template <typename T>
class Promise {
 public:
  void Set(T value) {
    MutexLock lock(&mutex_);
    value_ = std::move(value);
    done_ = true;
    set_.SignalAll();
  }
  T Get() {
    MutexLock lock(&mutex_);
    const absl::Time deadline = absl::Now() + kPatience;
    while (!done_ && absl::Now() < deadline) set_.WaitFor(&mutex_, deadline - absl::Now());
    EXPECT_TRUE(done_) << "nothing came in time";
    return value_;
  }

 private:
  Mutex mutex_;
  CondVar set_;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  T value_ ABSL_GUARDED_BY(mutex_);
};

// The slot of a group of `size` of which the session holds group rank `rank`, with its first
// device.
GroupSlot SlotOf(int rank, int size) {
  GroupSlot slot;
  slot.size = size;
  slot.held = {GroupRank(rank)};
  slot.device_slots = {0};
  return slot;
}

ValueIndex AddAllReduce(GraphBuilder* builder, ValueIndex x, int rank, const std::string& source,
                        int group_slot = 0) {
  NodeSpec spec;
  spec.op = "all_reduce";
  spec.inputs = {x};
  spec.source = source;
  spec.collective = Collective();
  spec.collective->kind = CollectiveKind::kAllReduce;
  spec.collective->reduction = Reduction::kSum;
  spec.collective->rank = GroupRank(rank);
  spec.collective->group_slot = group_slot;
  return (*builder->Emit(spec))[0];
}

// An op without attributes.
ValueIndex AddOp(GraphBuilder* builder, const std::string& op, std::vector<ValueIndex> inputs) {
  NodeSpec spec;
  spec.op = op;
  spec.inputs = std::move(inputs);
  return (*builder->Emit(spec))[0];
}

ValueIndex AddInput(GraphBuilder* builder, TensorType type, bool donatable = false) {
  GraphInput input;
  input.type = std::move(type);
  input.donatable = donatable;
  return builder->AddInput(input);
}

// `may_alias`: the input that it may take the memory of; -1: none.
void AddOutput(GraphBuilder* builder, ValueIndex value, int32_t may_alias = -1) {
  GraphOutput output;
  output.value = value;
  output.may_alias = may_alias;
  builder->AddOutput(output);
}

Graph AllReduceGraph(int rank, int size, TensorType type, const std::string& source) {
  GraphBuilder builder(1, {SlotOf(rank, size)});
  const ValueIndex x = AddInput(&builder, std::move(type));
  AddOutput(&builder, AddAllReduce(&builder, x, rank, source));
  return builder.Build();
}

constexpr int64_t kLarge = int64_t{1} << 20;  // elements of f32: 4 MiB

ValueIndex AddLargeFill(GraphBuilder* builder, double value) {
  NodeSpec spec;
  spec.op = "fill";
  spec.attributes = {{"dims", std::vector<int64_t>{kLarge}}, {"dtype", "f32"}, {"value", value}};
  return (*builder->Emit(spec))[0];
}

// Two large all_reduces that nothing orders, that of group slot 0 first. The gang takes group 0,
// the world, before any other. In the program's order one large operand follows the other; in the
// gang's both stand at once.
Graph TwoGroupsGraph(int rank, int size) {
  GraphBuilder builder(1, {SlotOf(rank, size), SlotOf(rank, size)});
  std::vector<ValueIndex> sums;
  for (int group_slot = 0; group_slot < 2; ++group_slot) {
    const ValueIndex x = AddLargeFill(&builder, 1.0 + group_slot);
    const ValueIndex y = AddAllReduce(&builder, x, rank, "order.cc:1", group_slot);
    sums.push_back(AddOp(&builder, "sum", {y}));
  }
  AddOutput(&builder, AddOp(&builder, "add", sums));
  return builder.Build();
}

// Makes a tensor of `kLarge` ones.
Graph OnesGraph() {
  GraphBuilder builder(1, {});
  AddOutput(&builder, AddLargeFill(&builder, 1.0));
  return builder.Build();
}

// A tensor under a second name.
Graph SameGraph(int64_t elements) {
  GraphBuilder builder(1, {});
  AddOutput(&builder, AddInput(&builder, TensorType(DType::kF32, {elements})));
  return builder.Build();
}

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

// With a division of whole numbers, which may fail: else a step without collectives holds nothing
// back.
Graph LocalStepGraph() {
  GraphBuilder builder(1, {});
  NodeSpec cast;
  cast.op = "cast";
  cast.attributes = {{"dtype", "i64"}};
  cast.inputs = {BeginStep(&builder)};
  const ValueIndex whole = (*builder.Emit(cast))[0];
  NodeSpec one;
  one.op = "fill";
  one.attributes = TypeAttributes(TensorType(DType::kI64, {}));
  one.attributes.push_back({"value", int64_t{1}});
  AddOutput(&builder, AddOp(&builder, "div", {whole, (*builder.Emit(one))[0]}));
  return builder.Build();
}

// Its input negated, in its memory where that is given away.
Graph NegateGraph(int64_t elements) {
  GraphBuilder builder(1, {});
  const ValueIndex x = AddInput(&builder, TensorType(DType::kF32, {elements}), /*donatable=*/true);
  AddOutput(&builder, AddOp(&builder, "neg", {x}), /*may_alias=*/0);
  return builder.Build();
}

// One rank, as a client that submits frames by calls. It joins with the first of its devices.
class DirectRank {
 public:
  DirectRank(NodeLoop* loop, int rank, int size, const std::string& world,
             std::vector<DeviceIndex> devices, absl::Duration exec_timeout = {},
             CheckCallSites check_call_sites = CheckCallSites::kOff)
      : loop_(loop), rank_(rank) {
    OpenSessionRequest open;
    open.tenant = "uid:0";
    open.pid = 1000 + rank;
    open.devices = devices;
    open.lease = absl::Hours(1);
    session_ = Call<absl::StatusOr<SessionInfo>>([&](LocalNode& node, absl::Time now, auto* done) {
                 done->Set(node.OpenSession(open, now));
               })->id;
    JoinRequest join;
    join.name = world;
    join.size = size;
    join.rank = Rank(rank);
    join.device = devices[0];
    join.exec_timeout = exec_timeout;
    join.check_call_sites = check_call_sites;
    loop_->Post([this, join](LocalNode& node, absl::Time now) {
      node.JoinWorld(session_, join, now,
                     [this](absl::StatusOr<WorldInfo> info) { joined_.Set(std::move(info)); });
    });
  }

  void AwaitWorld() {
    absl::StatusOr<WorldInfo> info = joined_.Get();
    ASSERT_TRUE(info.ok()) << info.status();
    world_ = info->id;
    epoch_ = info->epoch;
  }

  void Submit(CommandBody body) { SubmitTogether({std::move(body)}); }
  // Nothing else happens on the node thread between them: what the first of them launches is not
  // seen to be complete when the last is submitted.
  void SubmitTogether(std::vector<CommandBody> bodies) {
    std::vector<std::pair<std::string, Promise<Outcome>*>> frames;
    for (CommandBody& body : bodies) {
      Command command;
      command.sequence = Sequence(next_++);
      command.body = std::move(body);
      ByteWriter out;
      EncodeFrame(command, &out);
      outcomes_.push_back(std::make_unique<Promise<Outcome>>());
      frames.emplace_back(out.Take(), outcomes_.back().get());
    }
    loop_->Post([this, frames = std::move(frames)](LocalNode& node, absl::Time now) {
      for (const auto& entry : frames) {
        node.Submit(session_, entry.first, now, [outcome = entry.second](Outcome o) {
          outcome->Set({o.sequence, Detached(o.status)});
        });
      }
    });
  }
  absl::Status LastOutcome() { return outcomes_.back()->Get().status; }

  void Register(int32_t slot, const Graph& graph) {
    RegisterGraph command;
    command.graph = {slot, 1};
    command.encoded = EncodeGraph(graph);
    Submit(std::move(command));
  }

  static InlineData Inline(const std::vector<float>& x) {
    InlineData data;
    data.bytes.assign(reinterpret_cast<const char*>(x.data()),
                      reinterpret_cast<const char*>(x.data() + x.size()));
    return data;
  }
  void RunInline(int32_t graph, const std::vector<float>& x, TensorId out) {
    RunOn(graph, Inline(x), out);
  }
  void RunOn(int32_t graph, const Binding& input, TensorId out) {
    Submit(WorldRun(graph, {input}, {out}));
  }

  // A run of a graph without groups.
  static Run LocalRun(int32_t graph, const std::vector<Binding>& inputs,
                      const std::vector<TensorId>& outs) {
    Run run;
    run.graph = {graph, 1};
    run.inputs.assign(inputs.begin(), inputs.end());
    for (const TensorId id : outs) {
      run.outputs.emplace_back();
      run.outputs.back().kind = OutBinding::Kind::kFresh;
      run.outputs.back().id = id;
    }
    return run;
  }
  // A run of a graph with one group, the world, and one collective in it.
  Run WorldRun(int32_t graph, const std::vector<Binding>& inputs,
               const std::vector<TensorId>& outs) {
    Run run = LocalRun(graph, inputs, outs);
    run.groups.push_back(BindGroup(GroupId(0), index_++));
    return run;
  }

  GroupId CreateGroup(const std::vector<Rank>& members) {
    return *Call<absl::StatusOr<GroupId>>([&](LocalNode& node, absl::Time, auto* done) {
      done->Set(node.CreateGroup(session_, {world_, Rank(rank_), members, {}, {}}));
    });
  }
  // Sends to itself, of tags from `first` on, that this rank could not make.
  void RefuseSends(int64_t first, int64_t count) {
    Refuse refuse;
    refuse.world = world_;
    refuse.epoch = epoch_;
    refuse.why = Error(Reason::kBadType, "no such shape");
    refuse.why.alone = true;
    refuse.members.emplace_back().rank = Rank(rank_);
    for (int64_t tag = first; tag < first + count; ++tag) {
      RefusedCalls calls;
      calls.source = GroupRank(rank_);
      calls.destination = GroupRank(rank_);
      calls.tag = tag;
      calls.next = 1;
      refuse.members[0].calls.push_back(calls);
    }
    Submit(std::move(refuse));
    EXPECT_EQ(ErrorOf(LastOutcome()).reason, Reason::kBadType);
  }
  void AbortWorld(const std::string& why) {
    EXPECT_TRUE(Call<absl::Status>([&](LocalNode& node, absl::Time now, auto* done) {
                  done->Set(node.AbortWorld(session_, {world_, Rank(rank_), Epoch(), why}, now));
                }).ok());
  }
  void RunTwoGroups(int32_t graph, GroupId first, TensorId out) {
    Run run = LocalRun(graph, {}, {out});
    for (const GroupId group : {first, GroupId(0)}) run.groups.push_back(BindGroup(group, 0));
    Submit(std::move(run));
  }
  void RunLocal(int32_t graph, const std::vector<Binding>& inputs, TensorId out) {
    Submit(LocalRun(graph, inputs, {out}));
  }
  // A run of a StepGraph.
  Run StepRun(int32_t graph, TensorId donated, int64_t reduced, TensorId out, TensorId sum) {
    const std::vector<float> zeros(static_cast<size_t>(reduced));
    Run run = WorldRun(graph, {donated, Inline(zeros)}, {out, sum});
    run.donate = {true, false};
    return run;
  }
  void RunStep(int32_t graph, TensorId donated, int64_t reduced, TensorId out, TensorId sum) {
    Submit(StepRun(graph, donated, reduced, out, sum));
  }
  Sequence last_sequence() const { return Sequence(next_ - 1); }
  NodeStats Stats() {
    return Call<NodeStats>(
        [](LocalNode& node, absl::Time, auto* done) { done->Set(node.Stats("")); });
  }

  absl::StatusOr<std::vector<float>> Read(TensorId id) {
    return Call<absl::StatusOr<std::vector<float>>>([&](LocalNode& node, absl::Time now,
                                                        auto* done) {
      node.ReadTensor(session_, id, now + kPatience, [done](absl::StatusOr<ReadableTensor> view) {
        if (!view.ok()) return done->Set(Detached(view.status()));
        std::vector<float> values(static_cast<size_t>(view->bytes) / 4);
        if (view->bytes > 0) {
          std::memcpy(values.data(), view->data, static_cast<size_t>(view->bytes));
        }
        done->Set(std::move(values));
      });
    });
  }

  // Until all commands have been taken: reads come behind them, of what does not exist as well.
  void WaitUntilTaken() { EXPECT_FALSE(Read({-1, 1}).ok()); }

  // Holds `reader` until something has come of it.
  void StartReading(TensorId id, std::shared_ptr<int> reader) {
    loop_->Post([this, id, reader = std::move(reader)](LocalNode& node, absl::Time now) {
      node.ReadTensor(session_, id, now + absl::Hours(1),
                      [reader](const absl::StatusOr<ReadableTensor>&) {});
    });
  }

  void NextEpoch() { epoch_ = Epoch(epoch_.value() + 1); }
  // A call that this rank could not make counts all the same.
  void LeaveOut() { ++index_; }
  SessionId session() const { return session_; }
  WorldId world() const { return world_; }

  template <typename T, typename Fn>
  T Call(Fn fn) {
    Promise<T> done;
    loop_->Post([&](LocalNode& node, absl::Time now) { fn(node, now, &done); });
    return done.Get();
  }

 private:
  RunGroup BindGroup(GroupId group, int64_t base) const {
    RunGroup bound;
    bound.world = world_;
    bound.group = group;
    bound.epoch = epoch_;
    bound.base.push_back({0, base, 0});
    return bound;
  }

  NodeLoop* loop_;
  int rank_;
  SessionId session_;
  WorldId world_;
  Epoch epoch_;
  int64_t index_ = 0;
  int64_t next_ = 1;
  Promise<absl::StatusOr<WorldInfo>> joined_;
  std::vector<std::unique_ptr<Promise<Outcome>>> outcomes_;
};

class NodeTest : public testing::Test {
 protected:
  void Start(int ranks, NodeOptions options = {}, absl::string_view faults = "") {
    std::unique_ptr<Backend> backend = HostDevices(ranks);
    if (!faults.empty()) {
      backend = CreateFaultBackend(std::move(backend), *ParseFaultScript(faults), nullptr);
    }
    StartOn(std::move(backend), OneEach(ranks), options);
  }
  void StartOnSim(int ranks, int devices_per_domain = 1) {
    SimBackendOptions sim;
    sim.devices = ranks;
    sim.devices_per_domain = devices_per_domain;
    sim.make_kernel = MakeHostKernel;
    StartOn(CreateSimBackend(sim), OneEach(ranks), {});
  }
  // `devices`: of each rank's session.
  void StartOn(std::unique_ptr<Backend> backend,
               const std::vector<std::vector<DeviceIndex>>& devices, NodeOptions options) {
    if (getenv("CHORUS_TEST_LATER") != nullptr) options.DoLater();
    backend_ = std::move(backend);
    loop_ = std::make_unique<NodeLoop>(options, DevicesOf(backend_.get()));
    const int ranks = static_cast<int>(devices.size());
    for (int rank = 0; rank < ranks; ++rank) {
      ranks_.push_back(std::make_unique<DirectRank>(loop_.get(), rank, ranks, "job",
                                                    devices[static_cast<size_t>(rank)]));
    }
    for (auto& rank : ranks_) rank->AwaitWorld();
  }
  std::unique_ptr<Backend> HostDevices(int count, HostKernelFactory make_kernel = MakeHostKernel) {
    HostBackendOptions host;
    host.devices = count;
    host.pool = &pool_;
    host.make_kernel = make_kernel;
    return CreateHostBackend(host);
  }
  static std::vector<std::vector<DeviceIndex>> OneEach(int ranks) {
    std::vector<std::vector<DeviceIndex>> devices;
    for (int rank = 0; rank < ranks; ++rank) devices.push_back({DeviceIndex(rank)});
    return devices;
  }
  void TearDown() override { loop_.reset(); }

  // Ends the node while rank 0's run, with all its memory, waits for rank 1, and a reader of its
  // result, by a call and by a command, for it.
  void EndWhileARunWaits() {
    ranks_[0]->Register(0, AllReduceGraph(0, 2, TensorType(DType::kF32, {4}), "a.cc:1"));
    EXPECT_TRUE(ranks_[0]->LastOutcome().ok());
    ranks_[0]->RunInline(0, {1, 2, 3, 4}, {0, 1});
    ranks_[0]->WaitUntilTaken();
    auto reader = std::make_shared<int>();
    const std::weak_ptr<int> reads = reader;
    ranks_[0]->StartReading({0, 1}, std::move(reader));
    MakeReadable readable;
    readable.tensors = {{0, 1}};
    ranks_[0]->Submit(std::move(readable));
    // Tasks run in the order in which they are posted.
    EXPECT_FALSE(ranks_[0]->Call<bool>(
        [](LocalNode& node, absl::Time, auto* done) { done->Set(node.Idle()); }));
    EXPECT_FALSE(reads.expired());
    loop_.reset();
    EXPECT_TRUE(reads.expired()) << "what waited for the result is kept";
  }

  ThreadPool pool_{2};
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<NodeLoop> loop_;
  std::vector<std::unique_ptr<DirectRank>> ranks_;
};

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

// --- Outputs in client memory -------------------------------------------------------------------

// A staging arena as its client has it.
class ClientMemory {
 public:
  ClientMemory(DirectRank* rank, int64_t elements) : bytes_(elements * 4) {
    const auto made =
        rank->Call<absl::StatusOr<StagingArena>>([&](LocalNode& node, absl::Time, auto* done) {
          done->Set(node.CreateStaging(rank->session(), bytes_));
        });
    EXPECT_TRUE(made.ok()) << made.status();
    arena_ = made->arena;
    void* const mapped =
        mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE, MAP_SHARED, made->fd, 0);
    EXPECT_NE(mapped, MAP_FAILED);
    floats_ = static_cast<float*>(mapped);
    std::fill(floats_, floats_ + elements, -1.0f);
  }
  ~ClientMemory() { munmap(floats_, static_cast<size_t>(bytes_)); }
  ClientMemory(const ClientMemory&) = delete;
  ClientMemory& operator=(const ClientMemory&) = delete;

  OutBinding From(int64_t element, std::vector<int64_t> strides = {}) const {
    OutBinding binding;
    binding.kind = OutBinding::Kind::kInto;
    binding.into = {arena_, 4 * element, std::move(strides)};
    return binding;
  }
  std::vector<float> Read(int64_t begin, int64_t end) const {
    return std::vector<float>(floats_ + begin, floats_ + end);
  }
  float* data() { return floats_; }

 private:
  const int64_t bytes_;
  ArenaId arena_;
  float* floats_ = nullptr;
};

// The sum, twice.
Graph TwoSumsGraph(int rank, int size, TensorType type) {
  GraphBuilder builder(1, {SlotOf(rank, size)});
  const ValueIndex x = AddInput(&builder, std::move(type));
  const ValueIndex sum = AddAllReduce(&builder, x, rank, "into.cc:1");
  AddOutput(&builder, sum);
  AddOutput(&builder, sum);
  return builder.Build();
}

// Each rank has its own copy, whoever the result is shared with, and may write there.
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

// Commands are not waited for one by one: a run of a graph that was refused says why.
TEST_F(NodeTest, RunsOfARefusedGraphTellWhyItWasRefused) {
  NodeOptions options;
  options.memory_limit_bytes = 6 * kLarge;  // for one of the values below, not for two
  Start(1, options);
  GraphBuilder builder(1, {});
  const ValueIndex x = AddLargeFill(&builder, 1);
  const ValueIndex both = AddOp(&builder, "add", {x, AddLargeFill(&builder, 2)});
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
  readable.tensors.assign(20000, TensorId{0, 1});
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
  loop_->Post([dying](LocalNode& node, absl::Time now) { node.SessionDied(dying, now); });
  const Error error = ErrorOf(ranks_[0]->LastOutcome());
  EXPECT_EQ(error.code, absl::StatusCode::kAborted);
  EXPECT_EQ(error.reason, Reason::kPeerDied);
  EXPECT_EQ(error.culprit.rank, 1);
  EXPECT_EQ(error.culprit.pid, 1001);
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
  loop_->Post([dying](LocalNode& node, absl::Time now) { node.SessionDied(dying, now); });
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
  loop_->Post([&](LocalNode& node, absl::Time now) {
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
  ASSERT_TRUE(
      ranks_[0]
          ->Call<absl::StatusOr<StagingArena>>([&](LocalNode& node, absl::Time, auto* done) {
            done->Set(node.CreateStaging(ranks_[0]->session(), free_bytes / 4096 * 4096));
          })
          .ok());
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
    EXPECT_THAT(error.message, testing::HasSubstr(absl::StrCat("tensor 0.1 was donated to run ",
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
  loop_->Post([&](LocalNode& node, absl::Time now) {
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
  EXPECT_TRUE(ranks_[0]->Call<bool>(
      [](LocalNode& node, absl::Time, auto* done) { done->Set(node.Idle()); }));
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
    ranks_[i]->Register(0, AllReduceGraph(static_cast<int>(i) % 2, 2, type, "x.cc:1"));
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

TEST_F(NodeTest, GroupsAreChargedBeforeTheyAreMade) {
  NodeOptions options;
  options.memory_limit_bytes = 8 << 20;
  Start(2, options);
  const auto make = [&](int groups) {
    absl::Status status;
    for (int i = 0; i < groups && status.ok(); ++i) {
      status = ranks_[0]
                   ->Call<absl::StatusOr<GroupId>>([&](LocalNode& node, absl::Time, auto* done) {
                     done->Set(node.CreateGroup(
                         ranks_[0]->session(),
                         {ranks_[0]->world(), Rank(0), {Rank(0), Rank(1)}, {}, {}}));
                   })
                   .status();
    }
    return status;
  };
  const int64_t idle = ranks_[0]->Stats().memory_used_bytes;
  EXPECT_TRUE(make(200).ok());
  const int64_t used = ranks_[0]->Stats().memory_used_bytes;
  EXPECT_GE(used, idle + 200 * 512);
  const int64_t free_bytes = options.memory_limit_bytes / 8 * 7 - used;
  ASSERT_TRUE(
      ranks_[0]
          ->Call<absl::StatusOr<StagingArena>>([&](LocalNode& node, absl::Time, auto* done) {
            done->Set(node.CreateStaging(ranks_[0]->session(), free_bytes / 4096 * 4096));
          })
          .ok());
  EXPECT_EQ(ErrorOf(make(200)).reason, Reason::kOutOfMemory);
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
  EXPECT_THAT(waited.message, testing::HasSubstr("sends and receives could not be counted"));
}

TEST_F(NodeTest, ALeaseIsAsLongAsTheDaemonSays) {
  NodeOptions options;
  options.max_lease = absl::Minutes(2);
  backend_ = HostDevices(1);
  loop_ = std::make_unique<NodeLoop>(options, DevicesOf(backend_.get()));
  const auto open = [&](absl::Duration lease) {
    Promise<absl::StatusOr<SessionInfo>> opened;
    loop_->Post([&](LocalNode& node, absl::Time now) {
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

TEST_F(NodeTest, WhoGivesUpWaitingForAnOutcomeLeavesNothingBehind) {
  Start(2);
  ranks_[0]->Register(0, AllReduceGraph(0, 2, TensorType(DType::kF32, {4}), "a.cc:1"));
  ranks_[0]->RunInline(0, {1, 2, 3, 4}, {0, 1});
  // Of a run that waits for the other rank, and of one that was never asked for.
  for (const int64_t ahead : {0, 1000}) {
    auto token = std::make_shared<int>();
    const std::weak_ptr<int> weak = token;
    Promise<Reason> reason;
    loop_->Post([&, token = std::move(token)](LocalNode& node, absl::Time now) {
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
    loop_->WatchProcess(rank.session(), ends[0]);
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
