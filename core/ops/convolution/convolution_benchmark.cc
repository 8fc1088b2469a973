// The convolutions of a ResNet-18 at batch 16, forward and both gradients, on one thread.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/ops/convolution/convolution.h"
#include "core/ops/convolution/convolution_host.h"
#include "core/ops/op.h"

namespace chorus {
namespace {

struct Layer {
  int64_t in, out, size, kernel, stride;
};
constexpr Layer kLayers[] = {
    {3, 64, 224, 7, 2},   {64, 64, 56, 3, 1},   {64, 128, 56, 3, 2},  {128, 128, 28, 3, 1},
    {64, 128, 56, 1, 2},  {128, 256, 28, 3, 2}, {256, 256, 14, 3, 1}, {128, 256, 28, 1, 2},
    {256, 512, 14, 3, 2}, {512, 512, 7, 3, 1},  {256, 512, 14, 1, 2},
};
constexpr int64_t kBatch = 16;

std::vector<float> Numbers(const TensorType& type) {
  std::vector<float> numbers(static_cast<size_t>(type.num_elements()));
  for (size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = static_cast<float>(i * 37 % 101) / 101 - 0.5f;
  }
  return numbers;
}

void Convolve(benchmark::State& state, const Layer& layer, const std::string& op) {
  const int64_t padding = layer.kernel / 2;
  const int64_t size = (layer.size + 2 * padding - layer.kernel) / layer.stride + 1;
  const TensorType x(DType::kF32, {kBatch, layer.in, layer.size, layer.size});
  const TensorType w(DType::kF32, {layer.out, layer.in, layer.kernel, layer.kernel});
  const TensorType y(DType::kF32, {kBatch, layer.out, size, size});
  const bool gives_x = op == "convolution_data_grad";
  const bool gives_w = op == "convolution_weight_grad";
  const std::vector<const TensorType*> types = {gives_x ? &y : &x, gives_w ? &y : &w};
  const TensorType& out = gives_x ? x : gives_w ? w : y;
  const Attributes attributes = {{"padding", std::vector<int64_t>{padding, padding}},
                                 {"stride", std::vector<int64_t>{layer.stride, layer.stride}}};
  NodeView node;
  node.op = op;
  node.inputs = types;
  node.attributes = attributes;
  std::unique_ptr<HostKernel> kernel;
  for (const HostKernelEntry& entry : ConvolutionHostKernels()) {
    if (entry.op == op) kernel = *entry.make(node, {out});
  }
  const std::vector<float> a = Numbers(*types[0]), b = Numbers(*types[1]);
  std::vector<float> result(static_cast<size_t>(out.num_elements()));
  std::vector<char> workspace(static_cast<size_t>(kernel->workspace_bytes()) + 64);
  const auto at = reinterpret_cast<uintptr_t>(workspace.data());
  char* const aligned = workspace.data() + (64 - at % 64) % 64;
  const void* const in[] = {a.data(), b.data()};
  void* const outs[] = {result.data()};
  for (auto _ : state) {
    const absl::Status status =
        kernel->RunAll({in, outs, {aligned, static_cast<size_t>(kernel->workspace_bytes())}});
    if (!status.ok()) state.SkipWithError(std::string(status.message()).c_str());
  }
  state.counters["multiply_adds"] = benchmark::Counter(
      static_cast<double>(y.num_elements() * layer.in * layer.kernel * layer.kernel),
      benchmark::Counter::kIsIterationInvariantRate);
  state.counters["units"] = static_cast<double>(kernel->units());
  state.counters["workspace"] = static_cast<double>(kernel->workspace_bytes());
}

}  // namespace
}  // namespace chorus

int main(int argc, char** argv) {
  for (const char* op : {"convolution", "convolution_data_grad", "convolution_weight_grad"}) {
    for (const chorus::Layer& layer : chorus::kLayers) {
      const std::string name = std::string(op) + "/" + std::to_string(layer.in) + "x" +
                               std::to_string(layer.size) + "/" + std::to_string(layer.out) + "/" +
                               std::to_string(layer.kernel) + "/" + std::to_string(layer.stride);
      benchmark::RegisterBenchmark(
          name.c_str(),
          [layer, op](benchmark::State& state) { chorus::Convolve(state, layer, op); })
          ->Unit(benchmark::kMillisecond)
          ->UseRealTime();
    }
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
