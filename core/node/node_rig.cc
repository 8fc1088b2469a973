#include "core/node/node_rig.h"

#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "core/backend/fault/fault_backend.h"
#include "core/backend/fault/fault_script.h"
#include "core/backend/host/host_backend.h"
#include "core/backend/sim/sim_backend.h"
#include "core/base/error.h"
#include "core/base/shared_file.h"
#include "core/graph/encoding.h"
#include "core/runtime/devices.h"

namespace chorus::node {

GroupSlot SlotOf(int rank, int size) {
  GroupSlot slot;
  slot.size = size;
  slot.held = {GroupRank(rank)};
  slot.device_slots = {0};
  return slot;
}

ValueIndex AddAllReduce(GraphBuilder* builder, ValueIndex x, int rank, const std::string& source,
                        int group_slot) {
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

ValueIndex AddOp(GraphBuilder* builder, const std::string& op, std::vector<ValueIndex> inputs) {
  NodeSpec spec;
  spec.op = op;
  spec.inputs = std::move(inputs);
  return (*builder->Emit(spec))[0];
}

ValueIndex AddInput(GraphBuilder* builder, TensorType type, bool donatable) {
  GraphInput input;
  input.type = std::move(type);
  input.donatable = donatable;
  return builder->AddInput(input);
}

void AddOutput(GraphBuilder* builder, ValueIndex value, int32_t may_alias) {
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

ValueIndex AddFill(GraphBuilder* builder, int64_t elements, double value) {
  NodeSpec spec;
  spec.op = "fill";
  spec.attributes = {{"dims", std::vector<int64_t>{elements}}, {"dtype", "f32"}, {"value", value}};
  return (*builder->Emit(spec))[0];
}

Graph OnesGraph() {
  GraphBuilder builder(1, {});
  AddOutput(&builder, AddFill(&builder, kLarge, 1.0));
  return builder.Build();
}

Graph SameGraph(int64_t elements) {
  GraphBuilder builder(1, {});
  AddOutput(&builder, AddInput(&builder, TensorType(DType::kF32, {elements})));
  return builder.Build();
}

Graph NegateGraph(int64_t elements) {
  GraphBuilder builder(1, {});
  const ValueIndex x = AddInput(&builder, TensorType(DType::kF32, {elements}), /*donatable=*/true);
  AddOutput(&builder, AddOp(&builder, "neg", {x}), /*may_alias=*/0);
  return builder.Build();
}

// --- Ranks ---------------------------------------------------------------------------------------

DirectRank::DirectRank(NodeLoop* loop, int rank, int size, const std::string& world,
                       std::vector<DeviceIndex> devices, absl::Duration exec_timeout,
                       CheckCallSites check_call_sites, const std::string& tenant)
    : loop_(loop), rank_(rank) {
  OpenSessionRequest open;
  open.tenant = tenant;
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
  loop_->PostOwn([this, join](LocalNode& node, absl::Time now) {
    node.JoinWorld(session_, join, now,
                   [this](absl::StatusOr<WorldInfo> info) { joined_.Set(std::move(info)); });
  });
}

void DirectRank::AwaitWorld() {
  absl::StatusOr<WorldInfo> info = joined_.Get();
  ASSERT_TRUE(info.ok()) << info.status();
  world_ = info->id;
  epoch_ = info->epoch;
}

void DirectRank::SubmitTogether(std::vector<CommandBody> bodies) {
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
  loop_->PostOwn([this, frames = std::move(frames)](LocalNode& node, absl::Time now) {
    for (const auto& entry : frames) {
      node.Submit(session_, entry.first, now, [outcome = entry.second](Outcome o) {
        outcome->Set({o.sequence, Detached(o.status)});
      });
    }
  });
}

void DirectRank::Register(int32_t slot, const Graph& graph) {
  RegisterGraph command;
  command.graph = {slot, 1};
  command.encoded = EncodeGraph(graph);
  Submit(std::move(command));
}

InlineData DirectRank::Inline(const std::vector<float>& x) {
  InlineData data;
  data.bytes.assign(reinterpret_cast<const char*>(x.data()),
                    reinterpret_cast<const char*>(x.data() + x.size()));
  return data;
}

Run DirectRank::LocalRun(int32_t graph, const std::vector<Binding>& inputs,
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

Run DirectRank::WorldRun(int32_t graph, const std::vector<Binding>& inputs,
                         const std::vector<TensorId>& outs) {
  Run run = LocalRun(graph, inputs, outs);
  run.groups.push_back(BindGroup(GroupId(0), index_++));
  return run;
}

GroupId DirectRank::CreateGroup(const std::vector<Rank>& members) {
  return *Call<absl::StatusOr<GroupId>>([&](LocalNode& node, absl::Time, auto* done) {
    done->Set(node.CreateGroup(session_, {world_, Rank(rank_), members, {}, {}}));
  });
}

void DirectRank::RefuseSends(int64_t first, int64_t count) {
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

void DirectRank::AbortWorld(const std::string& why) {
  EXPECT_TRUE(Call<absl::Status>([&](LocalNode& node, absl::Time now, auto* done) {
                done->Set(node.AbortWorld(session_, {world_, Rank(rank_), Epoch(), why}, now));
              }).ok());
}

void DirectRank::RunTwoGroups(int32_t graph, GroupId first, TensorId out) {
  Run run = LocalRun(graph, {}, {out});
  for (const GroupId group : {first, GroupId(0)}) run.groups.push_back(BindGroup(group, 0));
  Submit(std::move(run));
}

Run DirectRank::StepRun(int32_t graph, TensorId donated, int64_t reduced, TensorId out,
                        TensorId sum) {
  const std::vector<float> zeros(static_cast<size_t>(reduced));
  Run run = WorldRun(graph, {donated, Inline(zeros)}, {out, sum});
  run.donate = {true, false};
  return run;
}

NodeStats DirectRank::Stats() {
  return Call<NodeStats>(
      [](LocalNode& node, absl::Time, auto* done) { done->Set(node.Stats("")); });
}

absl::StatusOr<std::vector<float>> DirectRank::Read(TensorId id) {
  return Call<absl::StatusOr<std::vector<float>>>([&](LocalNode& node, absl::Time now, auto* done) {
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

void DirectRank::StartReading(TensorId id, std::shared_ptr<int> reader) {
  loop_->PostOwn([this, id, reader = std::move(reader)](LocalNode& node, absl::Time now) {
    node.ReadTensor(session_, id, now + absl::Hours(1),
                    [reader](const absl::StatusOr<ReadableTensor>&) {});
  });
}

RunGroup DirectRank::BindGroup(GroupId group, int64_t base) const {
  RunGroup bound;
  bound.world = world_;
  bound.group = group;
  bound.epoch = epoch_;
  bound.base.push_back({0, base, 0});
  return bound;
}

absl::StatusOr<StagingArena> DirectRank::CreateStaging(int64_t bytes) {
  return Call<absl::StatusOr<StagingArena>>([&](LocalNode& node, absl::Time, auto* done) {
    node.CreateStaging(session_, bytes,
                       [done](absl::StatusOr<StagingArena> arena) { done->Set(std::move(arena)); });
  });
}

ClientMemory::ClientMemory(DirectRank* rank, int64_t elements) : bytes_(elements * 4) {
  const absl::StatusOr<StagingArena> arena = rank->CreateStaging(bytes_);
  EXPECT_TRUE(arena.ok()) << arena.status();
  arena_ = arena->arena;
  void* mapped = MAP_FAILED;
  const absl::Status confirmed =
      rank->Call<absl::Status>([&](LocalNode& node, absl::Time, Promise<absl::Status>* done) {
        const absl::StatusOr<int> fd = node.StagingFd(rank->session(), arena_);
        if (!fd.ok()) return done->Set(fd.status());
        mapped =
            mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
        SealMapped(*fd);
        done->Set(node.ConfirmStaging(rank->session(), arena_));
      });
  EXPECT_TRUE(confirmed.ok()) << confirmed;
  EXPECT_NE(mapped, MAP_FAILED);
  floats_ = static_cast<float*>(mapped);
  std::fill(floats_, floats_ + elements, -1.0f);
}

ClientMemory::~ClientMemory() { munmap(floats_, static_cast<size_t>(bytes_)); }

OutBinding ClientMemory::From(int64_t element, std::vector<int64_t> strides) const {
  OutBinding binding;
  binding.kind = OutBinding::Kind::kInto;
  binding.into = {arena_, 4 * element, std::move(strides)};
  return binding;
}

void NodeTest::Start(int ranks, NodeOptions options, absl::string_view faults) {
  std::unique_ptr<Backend> backend = HostDevices(ranks);
  if (!faults.empty()) {
    backend = CreateFaultBackend(std::move(backend), *ParseFaultScript(faults), nullptr);
  }
  StartOn(std::move(backend), OneEach(ranks), options);
}

void NodeTest::StartOnSim(int ranks, int devices_per_domain, NodeOptions options) {
  SimBackendOptions sim;
  sim.devices = ranks;
  sim.devices_per_domain = devices_per_domain;
  sim.make_kernel = MakeHostKernel;
  StartOn(CreateSimBackend(sim), OneEach(ranks), std::move(options));
}

void NodeTest::StartOn(std::unique_ptr<Backend> backend,
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

std::unique_ptr<Backend> NodeTest::HostDevices(int count, HostKernelFactory make_kernel) {
  HostBackendOptions host;
  host.devices = count;
  host.pool = &pool_;
  host.make_kernel = make_kernel;
  return CreateHostBackend(host);
}

std::vector<std::vector<DeviceIndex>> NodeTest::OneEach(int ranks) {
  std::vector<std::vector<DeviceIndex>> devices;
  for (int rank = 0; rank < ranks; ++rank) devices.push_back({DeviceIndex(rank)});
  return devices;
}

void NodeTest::EndWhileARunWaits() {
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

}  // namespace chorus::node
