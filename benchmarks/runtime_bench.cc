// What plans, executors and arenas cost on top of the backend.
//
//   buffer    a recycled buffer of a result arena, taken and given back
//   eager     a run of one 4-byte all_reduce on every member: launches by the executor, beside the
//             same calls on the backend; interleaved
//   nodes     a run of many local ops on one element, a node
//   register  10,000 nodes: planned, and loaded on a device
// Flags: --smoke (briefly). Results are checked.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/process.h"
#include "benchmarks/stats.h"
#include "core/backend/host/host_backend.h"
#include "core/backend/testing/device_rig.h"
#include "core/base/bytes.h"
#include "core/base/thread_pool.h"
#include "core/graph/graph.h"
#include "core/ops/graph_builder.h"
#include "core/ops/host_kernels.h"
#include "core/runtime/executor.h"
#include "core/runtime/memory.h"
#include "core/runtime/messages.h"
#include "core/runtime/plan/plan.h"

namespace chorus {
namespace {

double Since(int64_t start) { return static_cast<double>(bench::NowNanos() - start); }

double Median(std::vector<double> values) { return bench::Percentile(&values, 0.5); }

[[noreturn]] void Fail(const char* what) {
  std::fprintf(stderr, "runtime_bench: %s\n", what);
  std::exit(1);
}

std::unique_ptr<Backend> Open(int devices, ThreadPool* pool) {
  HostBackendOptions options;
  options.devices = devices;
  options.pool = pool;
  options.make_kernel = &MakeHostKernel;
  return CreateHostBackend(options);
}

void Report(const char* name, double value, const char* unit) {
  std::printf("%-44s %10.1f %s\n", name, value, unit);
}

void Buffers(int rounds) {
  constexpr int kBatch = 1000;
  const BudgetRef budget = Budget::OfNode(int64_t{1} << 30);
  const ArenaSet::Ptr set = ArenaSet::Create(budget);
  std::vector<double> times;
  for (int round = 0; round < rounds; ++round) {
    const int64_t start = bench::NowNanos();
    for (int i = 0; i < kBatch; ++i) {
      absl::StatusOr<BufferRef> buffer = set->Allocate(256);
      if (!buffer.ok()) Fail("Allocate failed");
    }
    times.push_back(Since(start) / kBatch);
  }
  if (set->live_buffers() != 0) Fail("a buffer was lost");
  Report("buffer: allocate and return", Median(times), "ns");
}

TensorType Vector(int64_t size) { return TensorType(DType::kF32, {size}); }

std::vector<ValueIndex> Emit(GraphBuilder* builder, NodeSpec spec) {
  auto outputs = builder->Emit(std::move(spec));
  if (!outputs.ok()) Fail(outputs.status().ToString().c_str());
  return *std::move(outputs);
}

Plan Compile(const Graph& graph) {
  absl::StatusOr<Plan> plan = CompilePlan(graph, PlanOptions());
  if (!plan.ok()) Fail(plan.status().ToString().c_str());
  return *std::move(plan);
}

Plan EagerAllReduce(int rank, int size) {
  GroupSlot slot;
  slot.size = size;
  slot.held = {GroupRank(rank)};
  slot.device_slots = {0};
  GraphBuilder builder(1, {slot});
  GraphInput input;
  input.type = Vector(1);
  NodeSpec spec;
  spec.op = "all_reduce";
  spec.inputs = {builder.AddInput(input)};
  spec.collective = Collective();
  spec.collective->kind = CollectiveKind::kAllReduce;
  spec.collective->rank = GroupRank(rank);
  spec.collective->reduction = Reduction::kSum;
  GraphOutput output;
  output.value = Emit(&builder, spec)[0];
  builder.AddOutput(output);
  return Compile(builder.Build());
}

// Of one event, which is of nothing that failed.
bool IsCompletion(absl::string_view bytes) {
  const absl::StatusOr<EventMessage> event = DecodeEvent(bytes);
  if (!event.ok()) Fail("an event does not decode");
  const bool ok = absl::visit([](const auto& of) { return of.status.ok(); }, *event);
  if (!ok) Fail("a launch, a plan or a communicator failed");
  return absl::holds_alternative<CompletionMessage>(*event);
}

void Eager(ThreadPool* pool, int size, int rounds) {
  DeviceRig rig(Open(size, pool));
  Backend* const backend = rig.backend();
  std::atomic<int> completed{0};
  std::vector<std::unique_ptr<Executor>> executors;
  std::vector<int> devices;
  for (int m = 0; m < size; ++m) devices.push_back(m);
  const DeviceAddress result = rig.Upload(0, std::vector<float>(1));
  // What is not written anew is seen.
  const auto check = [&] {
    if (rig.Download<float>(0, result, 1)[0] != static_cast<float>(size * (size + 1) / 2)) {
      Fail("wrong sum");
    }
    rig.Write(0, result, std::vector<float>{-1});
  };
  std::vector<LaunchMessage> messages(static_cast<size_t>(size));
  std::vector<CollectiveCall> calls;
  for (int m = 0; m < size; ++m) {
    executors.push_back(CreateDeviceExecutor(
        backend, m, [&](absl::string_view bytes) { completed += IsCompletion(bytes) ? 1 : 0; }));
    const Plan plan = EagerAllReduce(m, size);
    executors.back()->LoadPlan(PlanId(1), plan.device_plans[0]);
    executors.back()->OpenCommunicator(CommunicatorId(2), devices, m);
    LaunchMessage& message = messages[static_cast<size_t>(m)];
    message.plan = PlanId(1);
    const DeviceAddress input = rig.Upload(m, std::vector<float>{1.0f + static_cast<float>(m)});
    message.buffers = {input, result};
    message.collectives.resize(1);
    message.collectives[0].communicator = CommunicatorId(2);
    calls.push_back(DeviceRig::AllReduceCall(DType::kF32, 1, input, result));
  }
  auto members = rig.OpenAll(3);
  std::vector<double> direct;
  std::vector<double> launched;
  ByteWriter bytes;
  LaunchId launch;
  for (int round = 0; round < rounds; ++round) {
    completed = 0;
    int64_t start = bench::NowNanos();
    for (int m = 0; m < size; ++m) {
      if (!members[static_cast<size_t>(m)]
               ->Enqueue(calls[static_cast<size_t>(m)], rig.stream(m))
               .ok()) {
        Fail("Enqueue failed");
      }
      rig.stream(m)->Callback([&](absl::Status status) { completed += status.ok() ? 1 : 0; });
    }
    direct.push_back(Since(start) / size);
    if (completed != size) Fail("a small all_reduce did not run in its last call");
    check();
    completed = 0;
    start = bench::NowNanos();
    for (int m = 0; m < size; ++m) {
      LaunchMessage& message = messages[static_cast<size_t>(m)];
      message.launch = ++launch;
      bytes.Clear();
      EncodeLaunch(message, &bytes);
      executors[static_cast<size_t>(m)]->Launch(bytes.bytes());
    }
    launched.push_back(Since(start) / size);
    if (completed != size) Fail("a launch did not complete in its last call");
    check();
  }
  const std::string name = "eager, " + std::to_string(size) + " members: ";
  Report((name + "backend alone, a member").c_str(), Median(direct), "ns");
  Report((name + "by executors, a member").c_str(), Median(launched), "ns");
}

Graph LocalOps(int nodes) {
  GraphBuilder builder;
  GraphInput input;
  input.type = Vector(1);
  ValueIndex value = builder.AddInput(input);
  for (int i = 0; i < nodes; ++i) {
    NodeSpec spec;
    spec.op = "neg";
    spec.inputs = {value};
    value = Emit(&builder, spec)[0];
  }
  GraphOutput output;
  output.value = value;
  builder.AddOutput(output);
  return builder.Build();
}

void Nodes(ThreadPool* pool, int nodes, int rounds) {
  DeviceRig rig(Open(1, pool));
  int completed = 0;
  const std::unique_ptr<Executor> executor = CreateDeviceExecutor(
      rig.backend(), 0, [&](absl::string_view bytes) { completed += IsCompletion(bytes) ? 1 : 0; });
  const Graph graph = LocalOps(nodes);
  std::vector<double> planned;
  std::vector<double> loaded;
  std::vector<double> launched;
  PlanId id;
  for (int round = 0; round < rounds; ++round) {
    const int64_t start = bench::NowNanos();
    const Plan plan = Compile(graph);
    const int64_t compiled = bench::NowNanos();
    executor->LoadPlan(++id, plan.device_plans[0]);
    const int64_t ready = bench::NowNanos();
    planned.push_back(static_cast<double>(compiled - start) / 1e6);
    loaded.push_back(static_cast<double>(ready - compiled) / 1e6);
    LaunchMessage message;
    message.launch = LaunchId(id.value());
    message.plan = id;
    DeviceAddress output = 0;
    for (const BufferSpec& spec : plan.buffers) {
      message.buffers.push_back(spec.kind == BufferSpec::Kind::kInput
                                    ? rig.Upload(0, std::vector<float>{3})
                                    : rig.Allocate(0, spec.bytes));
      if (spec.kind == BufferSpec::Kind::kOwned) output = message.buffers.back();
    }
    ByteWriter bytes;
    EncodeLaunch(message, &bytes);
    const int64_t begin = bench::NowNanos();
    executor->Launch(bytes.bytes());
    while (executor->Continue()) {
    }
    launched.push_back(Since(begin) / nodes);
    if (completed != static_cast<int>(id.value())) Fail("a small run was not complete at once");
    if (rig.Download<float>(0, output, 1)[0] != (nodes % 2 == 0 ? 3.0f : -3.0f))
      Fail("wrong value");
    executor->UnloadPlan(id);
  }
  Report("nodes: launch, a node", Median(launched), "ns");
  const std::string name = "register, " + std::to_string(nodes) + " nodes: ";
  Report((name + "plan").c_str(), Median(planned), "ms");
  Report((name + "load").c_str(), Median(loaded), "ms");
}

int Main(bool smoke) {
  ThreadPool pool(2);
  Buffers(smoke ? 10 : 2000);
  for (const int size : {1, 2, 4, 8}) Eager(&pool, size, smoke ? 20 : 20000);
  Nodes(&pool, smoke ? 100 : 10000, smoke ? 2 : 20);
  return 0;
}

}  // namespace
}  // namespace chorus

int main(int argc, char** argv) {
  return chorus::Main(argc > 1 && std::strcmp(argv[1], "--smoke") == 0);
}
