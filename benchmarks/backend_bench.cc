// all_reduce on the host backend, called directly: what the system above it can be at best.
//
//   small   one thread enqueues the call and a callback for each member in turn, on idle streams;
//           everything must run in the last call. Nanoseconds a round and a member.
//   sizes   f32 SUM with one shared result, against the memory floor: N reads and 1 write by as
//           many threads, already awake and spinning; the better of plain and streaming stores.
//           Medians of interleaved rounds. Both use the same inner loop, so the ratio is the cost
//           of queues and hand-over.
// Flags: --smoke (briefly, small), --max_bytes=N, --rounds=N, --threads=N. Results are checked.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "benchmarks/memory_traffic.h"
#include "benchmarks/process.h"
#include "benchmarks/stats.h"
#include "core/backend/host/host_backend.h"
#include "core/backend/testing/device_rig.h"
#include "core/base/thread_pool.h"

namespace chorus {
namespace {

double Since(int64_t start) { return static_cast<double>(bench::NowNanos() - start); }

[[noreturn]] void Fail(const char* what) {
  std::fprintf(stderr, "backend_bench: %s\n", what);
  std::exit(1);
}

std::unique_ptr<Backend> Open(int devices, ThreadPool* pool) {
  HostBackendOptions options;
  options.devices = devices;
  options.pool = pool;
  return CreateHostBackend(options);
}

void Small(ThreadPool* pool, int rounds) {
  std::printf("%-8s %8s %12s %12s %12s\n", "small", "members", "p50 ns", "p99 ns", "ns/member");
  for (const int size : {2, 4, 8}) {
    DeviceRig rig(Open(size, pool));
    auto members = rig.OpenAll(1);
    const DeviceAddress result = rig.Upload(0, std::vector<float>(1));
    std::vector<CollectiveCall> calls;
    for (int m = 0; m < size; ++m) {
      calls.push_back(DeviceRig::AllReduceCall(
          DType::kF32, 1, rig.Upload(m, std::vector<float>{1.0f + m}), result));
    }
    int called = 0;
    std::vector<double> times;
    for (int round = 0; round < rounds; ++round) {
      called = 0;
      // The last round's sum is that round's.
      *reinterpret_cast<float*>(result) = std::nanf("");
      const int64_t start = bench::NowNanos();
      for (int m = 0; m < size; ++m) {
        if (!members[m]->Enqueue(calls[m], rig.stream(m)).ok()) Fail("Enqueue failed");
        rig.stream(m)->Callback([&called](absl::Status status) { called += status.ok() ? 1 : 0; });
      }
      times.push_back(Since(start));
      if (called != size) Fail("a small all_reduce did not run in its last call");
    }
    if (rig.Download<float>(0, result, 1)[0] != size * (size + 1) / 2) Fail("wrong sum");
    const bench::RoundStats stats = bench::StatsOf(std::move(times));
    std::printf("%-8s %8d %12.0f %12.0f %12.0f\n", "", size, stats.p50, stats.p99,
                stats.p50 / size);
  }
}

// The second of two turns: in the first the threads start.
double RunFloor(const bench::Traffic& traffic, const bench::TrafficVariant& variant) {
  bench::TrafficTeam team(traffic, variant);
  team.Move();
  const int64_t start = bench::NowNanos();
  team.Move();
  return Since(start);
}

double RunBackend(DeviceRig* rig, std::vector<std::unique_ptr<Communicator>>* members,
                  const std::vector<CollectiveCall>& calls) {
  const int size = static_cast<int>(calls.size());
  std::atomic<int> left{size};
  std::atomic<int> failed{0};
  const int64_t start = bench::NowNanos();
  for (int m = 0; m < size; ++m) {
    if (!(*members)[m]->Enqueue(calls[m], rig->stream(m)).ok()) Fail("Enqueue failed");
    rig->stream(m)->Callback([&left, &failed](const absl::Status& status) {
      if (!status.ok()) failed.fetch_add(1);
      left.fetch_sub(1);
    });
  }
  while (left.load() > 0) std::this_thread::yield();
  const double time = Since(start);
  if (failed.load() > 0) Fail("an all_reduce failed");
  return time;
}

void Sizes(ThreadPool* pool, int rounds, int64_t max_bytes) {
  std::printf("%-8s %8s %12s %12s %12s %12s %8s %8s\n", "sizes", "members", "bytes", "ours us",
              "plain us", "stream us", "GB/s", "ratio");
  for (const int size : {2, 4, 8}) {
    DeviceRig rig(Open(size, pool));
    auto members = rig.OpenAll(1);
    const int64_t most = max_bytes / 4;
    std::vector<const float*> inputs;
    std::vector<DeviceAddress> addresses;
    for (int m = 0; m < size; ++m) {
      addresses.push_back(rig.Upload(m, std::vector<float>(most, 1.0f + m)));
      inputs.push_back(reinterpret_cast<const float*>(addresses[m]));
    }
    const DeviceAddress result = rig.Upload(0, std::vector<float>(most));
    float* const out = reinterpret_cast<float*>(result);
    for (int64_t bytes = 4; bytes <= max_bytes; bytes *= 4) {
      const int64_t count = bytes / 4;
      std::vector<CollectiveCall> calls;
      for (int m = 0; m < size; ++m) {
        calls.push_back(DeviceRig::AllReduceCall(DType::kF32, count, addresses[m], result));
      }
      std::vector<double> ours;
      std::vector<double> plain;
      std::vector<double> streaming;
      const int n = bytes >= (64 << 20) ? std::max(5, rounds / 4) : rounds;
      // A warm-up round of each, then interleaved ones. The spinning threads live only as long as
      // they are measured.
      for (int round = 0; round <= n; ++round) {
        const double our_time = RunBackend(&rig, &members, calls);
        const double plain_time = RunFloor({inputs, {out}, count}, {pool->size(), false, false});
        const double streaming_time = RunFloor({inputs, {out}, count}, {pool->size(), true, false});
        if (round == 0) continue;
        ours.push_back(our_time);
        plain.push_back(plain_time);
        streaming.push_back(streaming_time);
      }
      const float expected = size * (size + 1) / 2;
      // The floor has left the same sums.
      std::fill_n(out, count, std::nanf(""));
      RunBackend(&rig, &members, calls);
      const auto got = rig.Download<float>(0, result, count);
      if (!std::all_of(got.begin(), got.end(), [expected](float x) { return x == expected; })) {
        Fail("wrong sum");
      }
      const double our_time = bench::Percentile(&ours, 0.5);
      const double plain_time = bench::Percentile(&plain, 0.5);
      const double streaming_time = bench::Percentile(&streaming, 0.5);
      std::printf("%-8s %8d %12lld %12.2f %12.2f %12.2f %8.1f %8.2f\n", "", size,
                  static_cast<long long>(bytes), our_time / 1e3, plain_time / 1e3,
                  streaming_time / 1e3, (size + 1) * bytes / our_time,
                  our_time / std::min(plain_time, streaming_time));
      std::fflush(stdout);
    }
  }
}

int64_t Flag(int argc, char** argv, const char* name, int64_t otherwise) {
  const std::string prefix = std::string("--") + name + "=";
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], prefix.c_str(), prefix.size()) == 0) {
      return std::strtoll(argv[i] + prefix.size(), nullptr, 10);
    }
  }
  return otherwise;
}

int Main(int argc, char** argv) {
  const bool smoke = argc > 1 && std::string(argv[1]) == "--smoke";
  const int64_t rounds = Flag(argc, argv, "rounds", smoke ? 3 : 21);
  const int64_t max_bytes = Flag(argc, argv, "max_bytes", smoke ? 1 << 20 : 256 << 20);
  ThreadPool pool(static_cast<int>(Flag(argc, argv, "threads", UsableCpus())));
  std::printf("backend_bench: %d threads\n", pool.size());
  Small(&pool, smoke ? 100 : 100000);
  Sizes(&pool, static_cast<int>(rounds), max_bytes);
  return 0;
}

}  // namespace
}  // namespace chorus

int main(int argc, char** argv) { return chorus::Main(argc, argv); }
