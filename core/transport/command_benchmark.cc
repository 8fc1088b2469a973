// Nanoseconds to encode and to decode what an eager collective sends.

#include "benchmark/benchmark.h"
#include "core/transport/command.h"
#include "core/transport/sample_commands.h"

namespace chorus {
namespace {

void BM_EncodeSmallRun(benchmark::State& state) {
  const Command command = SampleSmallRun(1);
  ByteWriter out;
  for (auto _ : state) {
    out.Clear();
    EncodeFrame(command, &out);
    benchmark::DoNotOptimize(out.bytes().data());
  }
}
BENCHMARK(BM_EncodeSmallRun);

void BM_DecodeSmallRun(benchmark::State& state) {
  ByteWriter out;
  EncodeFrame(SampleSmallRun(1), &out);
  for (auto _ : state) {
    absl::StatusOr<Command> command = DecodeFrame(out.bytes());
    benchmark::DoNotOptimize(command);
  }
}
BENCHMARK(BM_DecodeSmallRun);

}  // namespace
}  // namespace chorus
