// What an all_reduce of W ranks costs the node itself, alone and as one of many in a graph: W
// frames in through real rings, W published results out, on one thread, without any hand-off
// between processes. And what one command costs at a time that has as many results as a frame can
// name: the node does nothing else meanwhile.
//
// Run: bazel run //core/node:node_benchmark. Floor and hand-offs: tools/bench.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "core/backend/host/host_backend.h"
#include "core/base/thread_pool.h"
#include "core/graph/encoding.h"
#include "core/node/node.h"
#include "core/ops/graph_builder.h"
#include "core/ops/host_kernels.h"
#include "core/transport/command.h"
#include "core/transport/completion.h"
#include "core/transport/doorbell.h"
#include "core/transport/ring.h"
#include "core/transport/session_memory.h"

namespace chorus::node {
namespace {

Graph AllReduceGraph(int rank, int size, int collectives) {
  GroupSlot slot;
  slot.size = size;
  slot.held = {GroupRank(rank)};
  slot.device_slots = {0};
  GraphBuilder builder(1, {slot});
  GraphInput input;
  input.type = TensorType(DType::kF32, {1});
  const ValueIndex x = builder.AddInput(input);
  NodeSpec spec;
  spec.op = "all_reduce";
  spec.inputs = {x};
  spec.source = "benchmark.cc:1";
  Collective collective;
  collective.kind = CollectiveKind::kAllReduce;
  collective.reduction = Reduction::kSum;
  collective.rank = GroupRank(rank);
  spec.collective = collective;
  for (int i = 0; i < collectives; ++i) {
    GraphOutput output;
    output.value = builder.Emit(spec)->front();
    builder.AddOutput(output);
  }
  return builder.Build();
}

// As many negated inputs.
Graph NegateGraph(int outputs) {
  GraphBuilder builder(1, {});
  GraphInput input;
  input.type = TensorType(DType::kF32, {1});
  NodeSpec spec;
  spec.op = "neg";
  spec.inputs = {builder.AddInput(input)};
  for (int i = 0; i < outputs; ++i) {
    GraphOutput output;
    output.value = builder.Emit(spec)->front();
    builder.AddOutput(output);
  }
  return builder.Build();
}

struct Client {
  Client(LocalNode* node, DeviceIndex device) {
    OpenSessionRequest open;
    open.tenant = "uid:0";
    open.attached = true;
    open.devices = {device};
    session = node->OpenSession(open, absl::Now())->id;
    const SessionDescriptors attached = *node->AttachMemory(session);
    memory = *MapSessionMemory(attached.memory_fd);
    wake = attached.wake_fd;
    writer = std::make_unique<SubmissionRingWriter>(memory.get(), WaitOptions());
    waiter = std::make_unique<CompletionWaiter>(memory.get(), WaitOptions());
  }

  SessionId session;
  std::unique_ptr<SessionMemory> memory;
  int wake = -1;  // the node's
  std::unique_ptr<SubmissionRingWriter> writer;
  std::unique_ptr<CompletionWaiter> waiter;
  int64_t sequence = 0;
  ByteWriter frame;

  void Submit(CommandBody body) {
    Command command;
    command.sequence = Sequence(++sequence);
    command.body = std::move(body);
    frame.Clear();
    EncodeFrame(command, &frame);
    if (!*writer->TryWrite(frame.bytes())) std::abort();
    if (writer->must_ring()) RingWakeEvent(wake);
  }
  bool Has(TensorId id) const { return waiter->Tensor(id)->state == TensorState::kReady; }
};

struct HostDevices {
  explicit HostDevices(int devices) {
    HostBackendOptions host;
    host.devices = devices;
    host.pool = &pool;
    host.make_kernel = MakeHostKernel;
    backend = CreateHostBackend(host);
  }
  ThreadPool pool{2};
  std::unique_ptr<Backend> backend;
};

void BM_SmallAllReduce(benchmark::State& state) {
  const int ranks = static_cast<int>(state.range(0));
  const int collectives = static_cast<int>(state.range(1));
  HostDevices devices(ranks);
  LocalNode node({}, devices.backend.get(), [] {});
  std::vector<Client> clients;
  WorldId world;
  for (int r = 0; r < ranks; ++r) {
    clients.emplace_back(&node, DeviceIndex(r));
    Client& client = clients.back();
    JoinRequest join;
    join.name = "bench";
    join.size = ranks;
    join.rank = Rank(r);
    join.device = DeviceIndex(r);
    node.JoinWorld(client.session, join, absl::Now(),
                   [&world](absl::StatusOr<WorldInfo> info) { world = info->id; });
    RegisterGraph graph;
    graph.graph = {0, 1};
    graph.encoded = EncodeGraph(AllReduceGraph(r, ranks, collectives));
    client.Submit(std::move(graph));
  }
  node.Poll(absl::Now());

  Run run;
  run.graph = {0, 1};
  InlineData data;
  data.bytes.assign(4, 0);
  run.inputs.push_back(data);
  run.outputs.resize(static_cast<size_t>(collectives));
  for (OutBinding& out : run.outputs) out.kind = OutBinding::Kind::kFresh;
  RunGroup group;
  group.world = world;
  group.epoch = Epoch(1);
  group.base.push_back({});
  run.groups.push_back(group);
  Release release;
  uint32_t generation = 0;
  for (auto _ : state) {
    ++generation;
    for (Client& client : clients) {
      if (generation > 1) client.Submit(release);
      run.groups[0].base[0].call = (generation - 1) * collectives;
      for (int i = 0; i < collectives; ++i) run.outputs[i].id = {i, generation};
      client.Submit(run);
    }
    const TensorId last{collectives - 1, generation};
    while (!clients.back().Has(last)) node.Poll(absl::Now());
    release.tensors.clear();
    for (const OutBinding& out : run.outputs) release.tensors.push_back(out.id);
  }
  state.SetItemsProcessed(state.iterations() * ranks * collectives);
}
BENCHMARK(BM_SmallAllReduce)
    ->ArgNames({"ranks", "in_one_graph"})
    ->Args({2, 1})
    ->Args({4, 1})
    ->Args({8, 1})
    ->Args({2, 500})
    ->Args({8, 500});

// The longest turn of the node for a run of so many results, and for their release.
void BM_LongestTurn(benchmark::State& state) {
  const int outputs = static_cast<int>(state.range(0));
  HostDevices devices(1);
  LocalNode node({}, devices.backend.get(), [] {});
  Client client(&node, DeviceIndex(0));
  RegisterGraph graph;
  graph.graph = {0, 1};
  graph.encoded = EncodeGraph(NegateGraph(outputs));
  client.Submit(std::move(graph));
  Run run;
  run.graph = {0, 1};
  InlineData data;
  data.bytes.assign(4, 0);
  run.inputs.push_back(data);
  run.outputs.resize(static_cast<size_t>(outputs));
  for (OutBinding& out : run.outputs) out.kind = OutBinding::Kind::kFresh;
  Release release;
  const auto turn = [&node] {
    const absl::Time begun = absl::Now();
    node.Poll(begun);
    return absl::Now() - begun;
  };
  std::vector<absl::Duration> longest[2];
  uint32_t generation = 0;
  for (auto _ : state) {
    ++generation;
    for (int i = 0; i < outputs; ++i) run.outputs[i].id = {i, generation};
    client.Submit(run);
    absl::Duration most;
    while (!client.Has({outputs - 1, generation})) most = std::max(most, turn());
    longest[0].push_back(most);
    release.tensors.clear();
    for (const OutBinding& out : run.outputs) release.tensors.push_back(out.id);
    client.Submit(release);
    longest[1].push_back(turn());
  }
  const char* const names[] = {"run_us", "release_us"};
  for (int i = 0; i < 2; ++i) {
    std::sort(longest[i].begin(), longest[i].end());
    state.counters[names[i]] = absl::ToDoubleMicroseconds(longest[i][longest[i].size() / 2]);
  }
}
BENCHMARK(BM_LongestTurn)->ArgNames({"results"})->Arg(1)->Arg(100)->Arg(1000)->Arg(8000);

}  // namespace
}  // namespace chorus::node
