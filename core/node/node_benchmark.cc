// What an all_reduce of W ranks costs the node itself, alone and as one of many in a graph: W
// frames in through real rings, W published results out, on one thread, without any hand-off
// between processes. And what one command costs at a time that has as many results as a graph may
// have: the node does nothing else meanwhile.
//
// Run: bazel run //core/node:node_benchmark. Floor and hand-offs: tools/bench.
#include <time.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "core/backend/host/host_backend.h"
#include "core/base/thread_pool.h"
#include "core/base/work.h"
#include "core/graph/encoding.h"
#include "core/node/names.h"
#include "core/node/node.h"
#include "core/ops/graph_builder.h"
#include "core/ops/host_kernels.h"
#include "core/runtime/budget.h"
#include "core/runtime/devices.h"
#include "core/transport/command.h"
#include "core/transport/completion.h"
#include "core/transport/doorbell.h"
#include "core/transport/ring.h"
#include "core/transport/session_memory.h"

namespace chorus::node {
namespace {

// What `work` takes of a processor on this thread: how long it is whatever else is on the machine.
template <typename Work>
absl::Duration TimeOf(Work work) {
  const auto used = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return absl::DurationFromTimespec(time);
  };
  const absl::Duration begun = used();
  work();
  return used() - begun;
}

double MedianMicroseconds(std::vector<absl::Duration> times) {
  std::sort(times.begin(), times.end());
  return absl::ToDoubleMicroseconds(times[times.size() / 2]);
}

GroupSlot GroupOf(int rank, int size) {
  GroupSlot slot;
  slot.size = size;
  slot.held = {GroupRank(rank)};
  slot.device_slots = {0};
  return slot;
}

ValueIndex AddScalar(GraphBuilder* builder) {
  GraphInput input;
  input.type = TensorType(DType::kF32, {1});
  return builder->AddInput(input);
}

NodeSpec AllReduceOf(ValueIndex x, int rank) {
  NodeSpec spec;
  spec.op = "all_reduce";
  spec.inputs = {x};
  spec.source = "benchmark.cc:1";
  Collective collective;
  collective.kind = CollectiveKind::kAllReduce;
  collective.reduction = Reduction::kSum;
  collective.rank = GroupRank(rank);
  spec.collective = collective;
  return spec;
}

// Each node is a result.
void AddResults(GraphBuilder* builder, const NodeSpec& spec, int results) {
  for (int i = 0; i < results; ++i) {
    GraphOutput output;
    output.value = builder->Emit(spec)->front();
    builder->AddOutput(output);
  }
}

Graph AllReduceGraph(int rank, int size, int collectives) {
  GraphBuilder builder(1, {GroupOf(rank, size)});
  AddResults(&builder, AllReduceOf(AddScalar(&builder), rank), collectives);
  return builder.Build();
}

// all_reduces of one rank, one behind the other, and as many results of them.
Graph ChainGraph(int collectives, int results) {
  GraphBuilder builder(1, {GroupOf(0, 1)});
  ValueIndex x = AddScalar(&builder);
  for (int i = 0; i < collectives; ++i) x = builder.Emit(AllReduceOf(x, 0))->front();
  NodeSpec negated;
  negated.op = "neg";
  negated.inputs = {x};
  AddResults(&builder, negated, results);
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
    if (!node->ConfirmMemory(session).ok()) std::abort();
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

// A run of graph 0 by one member of a world, of one input.
Run RunOf(WorldId world, int results) {
  Run run;
  run.graph = {0, 1};
  InlineData data;
  data.bytes.assign(4, 0);
  run.inputs.push_back(data);
  run.outputs.resize(static_cast<size_t>(results));
  for (OutBinding& out : run.outputs) out.kind = OutBinding::Kind::kFresh;
  RunGroup group;
  group.world = world;
  group.epoch = Epoch(1);
  group.base.push_back({});
  run.groups.push_back(group);
  return run;
}

// The world's id is known when the last of its ranks has joined.
void Join(LocalNode* node, const Client& client, int rank, int size, WorldId* world) {
  JoinRequest join;
  join.name = "bench";
  join.size = size;
  join.rank = Rank(rank);
  join.device = DeviceIndex(rank);
  node->JoinWorld(client.session, join, absl::Now(),
                  [world](absl::StatusOr<WorldInfo> info) { *world = info->id; });
}

// The clients of a world of so many ranks, by rank.
std::vector<Client> JoinAll(LocalNode* node, int size, WorldId* world) {
  std::vector<Client> clients;
  for (int rank = 0; rank < size; ++rank) {
    clients.emplace_back(node, DeviceIndex(rank));
    Join(node, clients.back(), rank, size, world);
  }
  return clients;
}

// Closes the session: the longest of that and the turns that follow, as long as there is work.
absl::Duration LongestOfClosing(LocalNode* node, SessionId session) {
  absl::Duration most = TimeOf([&] {
    const WorkSlice slice;
    if (!node->CloseSession(session, absl::Now()).ok()) std::abort();
  });
  for (bool worked = true; worked;) {
    most = std::max(most, TimeOf([&] { worked = node->Poll(absl::Now()); }));
  }
  return most;
}

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

void Register(LocalNode* node, Client* client, const Graph& graph, GraphId id = {0, 1}) {
  const std::string encoded = EncodeGraph(graph);
  StagingArena staging;
  node->CreateStaging(client->session, encoded.size(),
                      [&](absl::StatusOr<StagingArena> made) { staging = *made; });
  if (!node->WriteStaging(client->session, staging.arena, 0, encoded).ok()) std::abort();
  RegisterGraph registration;
  registration.graph = id;
  registration.staged.arena = staging.arena;
  registration.staged_bytes = static_cast<int64_t>(encoded.size());
  client->Submit(std::move(registration));
}

// All ranks of a world, each with its graph of so many all_reduces.
struct Job {
  Job(int ranks, int collectives)
      : devices(ranks), node({}, DevicesOf(devices.backend.get()), [] {}) {
    clients = JoinAll(&node, ranks, &world);
    for (int rank = 0; rank < ranks; ++rank) {
      Register(&node, &clients[rank], AllReduceGraph(rank, ranks, collectives));
    }
    run = RunOf(world, collectives);
  }
  // The run of all of them with this number, from 1 on, and the release of what the last one gave.
  void Next(uint32_t number) {
    release.tensors.clear();
    for (OutBinding& out : run.outputs) {
      if (number > 1) release.tensors.push_back(out.id);
      out.id = {static_cast<int32_t>(&out - run.outputs.data()), number};
    }
    run.groups[0].base[0].call = int64_t{number - 1} * static_cast<int64_t>(run.outputs.size());
  }
  void Submit(Client* client) {
    if (!release.tensors.empty()) client->Submit(release);
    client->Submit(run);
  }
  bool IsOver() const { return clients.back().Has(run.outputs.back().id); }

  HostDevices devices;
  LocalNode node;
  std::vector<Client> clients;
  WorldId world;
  Run run;
  Release release;
};

void BM_SmallAllReduce(benchmark::State& state) {
  const int ranks = static_cast<int>(state.range(0));
  const int collectives = static_cast<int>(state.range(1));
  Job job(ranks, collectives);
  uint32_t number = 0;
  for (auto _ : state) {
    job.Next(++number);
    for (Client& client : job.clients) job.Submit(&client);
    while (!job.IsOver()) job.node.Poll(absl::Now());
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

// The longest turn of the node for runs of so many collectives, and results of them, by so many
// ranks: the last vote closes their gang.
void BM_LongestGangTurn(benchmark::State& state) {
  Job job(static_cast<int>(state.range(0)), static_cast<int>(state.range(1)));
  std::vector<absl::Duration> longest;
  uint32_t number = 0;
  for (auto _ : state) {
    absl::Duration most;
    const auto turn = [&] {
      bool worked = false;
      most = std::max(most, TimeOf([&] { worked = job.node.Poll(absl::Now()); }));
      return worked;
    };
    job.Next(++number);
    for (Client& client : job.clients) {
      job.Submit(&client);
      while (turn()) {
      }
    }
    while (!job.IsOver()) turn();
    longest.push_back(most);
  }
  // Of the first one the order of its collectives has to be found.
  state.counters["first_us"] = absl::ToDoubleMicroseconds(longest.front());
  state.counters["turn_us"] = MedianMicroseconds(std::move(longest));
}
BENCHMARK(BM_LongestGangTurn)
    ->ArgNames({"ranks", "collectives"})
    ->Args({1, 2048})
    ->Args({2, 2048})
    ->Args({4, 2048})
    ->Args({8, 2048})
    ->Args({16, 2048});  // as many as a gang may have

// The longest turn of the node for a run of so many results and collectives, and for the release of
// the results.
void BM_LongestTurn(benchmark::State& state) {
  const int outputs = static_cast<int>(state.range(0));
  const int collectives = static_cast<int>(state.range(1));
  HostDevices devices(1);
  LocalNode node({}, DevicesOf(devices.backend.get()), [] {});
  Client client(&node, DeviceIndex(0));
  WorldId world;
  Join(&node, client, /*rank=*/0, /*size=*/1, &world);
  Register(&node, &client, ChainGraph(collectives, outputs));
  Run run = RunOf(world, outputs);
  Release release;
  const auto turn = [&node] { return TimeOf([&node] { node.Poll(absl::Now()); }); };
  std::vector<absl::Duration> longest[2];
  uint32_t generation = 0;
  for (auto _ : state) {
    ++generation;
    for (int i = 0; i < outputs; ++i) run.outputs[i].id = {i, generation};
    run.groups[0].base[0].call = int64_t{generation - 1} * collectives;
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
    state.counters[names[i]] = MedianMicroseconds(std::move(longest[i]));
  }
}
BENCHMARK(BM_LongestTurn)
    ->ArgNames({"results", "collectives"})
    ->Args({1, 1})
    ->Args({1000, 1})
    ->Args({4096, 1})  // as many as a graph may have
    ->Args({1, 1000})
    ->Args({1, 2048});  // as many as a graph may have

// Of the results of a run that is refused: each has its own, they have one, or there is no memory
// for names.
enum ResultNames { kEach, kOne, kNoMemory };

// The turn of the node for such a run.
void BM_Refusal(benchmark::State& state) {
  const int results = static_cast<int>(state.range(0));
  const int64_t names = state.range(1);
  HostDevices devices(1);
  NodeOptions options;
  options.memory_limit_bytes = int64_t{64} << 20;
  LocalNode node(options, DevicesOf(devices.backend.get()), [] {});
  Client client(&node, DeviceIndex(0));
  if (names == kNoMemory) {
    const int64_t left = ShareOf(options.memory_limit_bytes) - node.Stats("").memory_used_bytes;
    node.CreateStaging(client.session, (left - Names::kTableStep) / 4096 * 4096,
                       [](const absl::StatusOr<StagingArena>& made) { made.value(); });
  }
  Run run;
  run.graph = {0, 1};  // which is not there
  run.outputs.resize(static_cast<size_t>(results));
  for (OutBinding& out : run.outputs) out.kind = OutBinding::Kind::kFresh;
  std::vector<absl::Duration> turns;
  uint32_t generation = 0;
  for (auto _ : state) {
    ++generation;
    int32_t slot = 0;
    for (OutBinding& out : run.outputs) out.id = {names == kOne ? 0 : slot++, generation};
    client.Submit(run);
    turns.push_back(TimeOf([&node] { node.Poll(absl::Now()); }));
    Release release;
    for (const OutBinding& out : run.outputs) release.tensors.push_back(out.id);
    client.Submit(std::move(release));
    const Sequence released(client.sequence);
    while (!client.waiter->Run(released)->has_value()) node.Poll(absl::Now());
  }
  state.counters["refusal_us"] = MedianMicroseconds(std::move(turns));
}
BENCHMARK(BM_Refusal)
    ->ArgNames({"results", "names"})
    ->Iterations(100)  // of each name so many generations take one byte
    ->Args({1000, kEach})
    ->Args({13000, kEach})  // as many as a frame can name
    ->Args({13000, kOne})
    ->Args({13000, kNoMemory});

// The longest turn of the node for the end of an epoch in which one rank waits for the other with
// so many runs of so many collectives.
void BM_EpochEnd(benchmark::State& state) {
  const auto runs = static_cast<int>(state.range(0));
  const auto collectives = static_cast<int>(state.range(1));
  HostDevices devices(2);
  std::vector<absl::Duration> longest;
  for (auto _ : state) {
    LocalNode node({}, DevicesOf(devices.backend.get()), [] {});
    WorldId world;
    std::vector<Client> clients = JoinAll(&node, /*size=*/2, &world);
    Run run = RunOf(world, collectives);
    const auto submit = [&](Client* client, int call) {
      for (int i = 0; i < collectives; ++i) run.outputs[i].id = {call * collectives + i, 1};
      run.groups[0].base[0].call = int64_t{call} * collectives;
      client->Submit(run);
      while (node.Poll(absl::Now())) {
      }
    };
    // The first one by both: the graph is there when it has ended.
    for (int rank = 0; rank < 2; ++rank) {
      Register(&node, &clients[rank], AllReduceGraph(rank, 2, collectives));
      submit(&clients[rank], 0);
    }
    while (!clients[0].Has(run.outputs.back().id)) node.Poll(absl::Now());
    for (int call = 1; call <= runs; ++call) submit(&clients[0], call);
    longest.push_back(LongestOfClosing(&node, clients[1].session));
  }
  state.counters["end_us"] = MedianMicroseconds(std::move(longest));
}
BENCHMARK(BM_EpochEnd)
    ->ArgNames({"runs", "collectives"})
    ->Args({1, 1})
    ->Args({512, 1})
    ->Args({4, 2048})
    ->Args({31, 2048});  // as many results as a session may have

// The longest turn of the node for a run that takes so many local runs with it into its world, each
// of which reads what all before it make, and all turns that it takes.
void BM_Adoption(benchmark::State& state) {
  const auto locals = static_cast<int32_t>(state.range(0));
  HostDevices devices(2);
  GraphBuilder builder(1, {});
  NodeSpec negated;
  negated.op = "neg";
  negated.inputs = {AddScalar(&builder)};
  for (int32_t i = 1; i < locals; ++i) AddScalar(&builder);
  AddResults(&builder, negated, 1);
  const Graph local_graph = builder.Build();
  std::vector<absl::Duration> longest;
  std::vector<absl::Duration> all;
  for (auto _ : state) {
    LocalNode node({}, DevicesOf(devices.backend.get()), [] {});
    WorldId world;
    std::vector<Client> clients = JoinAll(&node, /*size=*/2, &world);
    Register(&node, &clients[0], AllReduceGraph(0, 2, 1));
    Register(&node, &clients[0], local_graph, {1, 1});
    const auto submit = [&](const Run& run) {
      clients[0].Submit(run);
      longest.emplace_back();
      all.emplace_back();
      for (bool worked = true; worked;) {
        const absl::Duration turn = TimeOf([&] { worked = node.Poll(absl::Now()); });
        longest.back() = std::max(longest.back(), turn);
        all.back() += turn;
      }
    };
    Run run = RunOf(world, 1);
    run.outputs[0].id = {0, 1};
    submit(run);
    for (int32_t i = 1; i <= locals; ++i) {
      Run local;
      local.graph = {1, 1};
      for (int32_t j = 0; j < locals; ++j) local.inputs.emplace_back(TensorId{j < i ? j : 0, 1});
      local.outputs.resize(1);
      local.outputs[0].kind = OutBinding::Kind::kFresh;
      local.outputs[0].id = {i, 1};
      submit(local);
    }
    longest.clear();
    all.clear();
    run.inputs.clear();
    run.inputs.emplace_back(TensorId{locals, 1});
    run.groups[0].base[0].call = 1;
    run.outputs[0].id = {locals + 1, 1};
    submit(run);
  }
  state.counters["turn_us"] = MedianMicroseconds(std::move(longest));
  state.counters["all_us"] = MedianMicroseconds(std::move(all));
}
BENCHMARK(BM_Adoption)->ArgName("locals")->Arg(1)->Arg(100)->Arg(300)->Arg(1020)->Iterations(1);

// The longest turn of the node for the end of a session that has so many results.
void BM_SessionEnd(benchmark::State& state) {
  constexpr int kOutputs = 2048;
  HostDevices devices(1);
  LocalNode node({}, DevicesOf(devices.backend.get()), [] {});
  std::vector<absl::Duration> longest;
  for (auto _ : state) {
    Client client(&node, DeviceIndex(0));
    WorldId world;
    Join(&node, client, /*rank=*/0, /*size=*/1, &world);
    Register(&node, &client, ChainGraph(1, kOutputs));
    Run run = RunOf(world, kOutputs);
    int32_t next = 0;
    for (int32_t i = 0; next < state.range(0); ++i) {
      for (OutBinding& out : run.outputs) out.id = {next++, 1};
      run.groups[0].base[0].call = i;
      client.Submit(run);
      while (!client.Has(run.outputs.back().id)) node.Poll(absl::Now());
    }
    longest.push_back(LongestOfClosing(&node, client.session));
  }
  state.counters["end_us"] = MedianMicroseconds(std::move(longest));
}
BENCHMARK(BM_SessionEnd)->ArgName("results")->Arg(2048)->Arg(16384)->Arg(63488);

// The longest turn of the node for a frame that releases so many small graphs, each with a plan
// that is loaded, and all turns that it takes.
void BM_GraphsRelease(benchmark::State& state) {
  const auto graphs = static_cast<int32_t>(state.range(0));
  HostDevices devices(1);
  LocalNode node({}, DevicesOf(devices.backend.get()), [] {});
  Client client(&node, DeviceIndex(0));
  Run run = RunOf(WorldId(), 1);
  run.groups.clear();
  std::vector<absl::Duration> longest;
  std::vector<absl::Duration> all;
  uint32_t generation = 0;
  for (auto _ : state) {
    ++generation;
    Release release;
    for (int32_t i = 0; i < graphs; ++i) {
      GraphBuilder builder(1, {});
      NodeSpec negated;
      negated.op = "neg";
      negated.source = std::to_string(i);  // no two have the same bytes
      ValueIndex x = AddScalar(&builder);
      for (int n = 0; n < state.range(1); ++n) {
        negated.inputs = {x};
        x = builder.Emit(negated)->front();
      }
      GraphOutput output;
      output.value = x;
      builder.AddOutput(output);
      RegisterGraph registration;
      registration.graph = {i, generation};
      registration.encoded = EncodeGraph(builder.Build());
      client.Submit(std::move(registration));
      run.graph = {i, generation};
      run.outputs[0].id = {i, generation};
      client.Submit(run);
      while (!client.Has(run.outputs[0].id)) node.Poll(absl::Now());
      Release result;
      result.tensors = {run.outputs[0].id};
      client.Submit(std::move(result));
      release.graphs.push_back({i, generation});
    }
    while (node.Poll(absl::Now())) {
    }
    client.Submit(std::move(release));
    longest.emplace_back();
    all.emplace_back();
    for (bool worked = true; worked;) {
      const absl::Duration turn = TimeOf([&] { worked = node.Poll(absl::Now()); });
      longest.back() = std::max(longest.back(), turn);
      all.back() += turn;
    }
  }
  state.counters["turn_us"] = MedianMicroseconds(std::move(longest));
  state.counters["all_us"] = MedianMicroseconds(std::move(all));
}
BENCHMARK(BM_GraphsRelease)
    ->ArgNames({"graphs", "nodes"})
    ->Args({4096, 1})
    ->Args({4096, 40})
    ->Iterations(3);

}  // namespace
}  // namespace chorus::node
