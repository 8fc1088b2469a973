// What batches cost that are stacked from an array's rows, and the share of a step that waits for
// them.
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "benchmark/benchmark.h"
#include "chorus/data/data.h"
#include "core/base/clock.h"

namespace chorus {
namespace data {
namespace {

constexpr int64_t kImages = 60000;
constexpr int64_t kPixels = 784;
constexpr int64_t kBatch = 64;

// The sizes of Fashion-MNIST.
std::shared_ptr<const Dataset> Images() {
  return *TensorDataset::Create(
      {HostTensor::Of(std::vector<uint8_t>(kImages * kPixels, 7), {kImages, kPixels}),
       HostTensor::Of(std::vector<uint8_t>(kImages, 3), {kImages})});
}

// Batches one behind the other, epoch by epoch, and `step` behind each. "waited": the share of the
// time in which Next waited.
template <typename Step>
void Run(benchmark::State& state, int threads, const Step& step) {
  DataLoader::Options options;
  options.batch_size = kBatch;
  options.threads = threads;
  const std::shared_ptr<const Dataset> dataset = Images();
  const auto loader =
      *DataLoader::Create(dataset, *DistributedSampler::Create(dataset->size(), {}), options);
  const absl::Time start = SteadyNow();
  for (auto _ : state) {
    absl::StatusOr<Batch> batch = loader->Next();
    if (batch.ok() && batch->empty()) {
      loader->SetEpoch(loader->epoch() + 1);
      batch = loader->Next();
    }
    if (!batch.ok()) {
      state.SkipWithError(batch.status().ToString().c_str());
      return;
    }
    step();
    benchmark::DoNotOptimize(batch->host[0].bytes());
  }
  state.SetItemsProcessed(state.iterations() * kBatch);
  state.counters["waited"] = absl::FDivDuration(loader->waited(), SteadyNow() - start);
}

void Batches(benchmark::State& state) {
  Run(state, static_cast<int>(state.range(0)), [] {});
}
BENCHMARK(Batches)->ArgName("threads")->Arg(0)->Arg(1)->Arg(2)->UseRealTime();

// A step of a millisecond, which is a fast one.
void BesideSteps(benchmark::State& state) {
  Run(state, static_cast<int>(state.range(0)), [] {
    const absl::Time until = SteadyNow() + absl::Milliseconds(1);
    while (SteadyNow() < until) {
    }
  });
}
BENCHMARK(BesideSteps)->ArgName("threads")->Arg(0)->Arg(1)->Arg(2)->UseRealTime();

}  // namespace
}  // namespace data
}  // namespace chorus
