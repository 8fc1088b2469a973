// What the `cuda` backend costs on this machine's GPU.
//
//   gpu_bench                 small work, collectives of logical devices, and copies
//   gpu_bench --ops           the local ops' kernels (ops_suite.h)
//     --out=FILE              their figures, a line of JSON each
//     --limit=SECONDS         rows beyond it are left out
//     --smoke                 tiny tensors, each row once
//   gpu_bench --list          what --ops measures, a line of JSON each
//
// With CHORUS_TEST_GPU=driver; else its figures are a stand-in's, and mean nothing. Exit status 2
// for wrong arguments; 3, and one line, where there is no GPU.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "core/backend/cuda/testing/ops_suite.h"
#include "core/backend/cuda/testing/test_gpu.h"
#include "core/backend/cuda/testing/test_kernel_factory.h"
#include "core/backend/testing/device_rig.h"
#include "core/ops/node_spec.h"

namespace chorus {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

double Micros() {
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Spread {
  double median = 0;
  double p99 = 0;
};
Spread SpreadOf(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  return {samples[samples.size() / 2], samples[samples.size() * 99 / 100]};
}

std::unique_ptr<Backend> Open(int devices) {
  CudaBackendOptions options;
  options.devices = devices;
  options.make_kernel = &MakeCudaTestKernel;
  return OpenTestGpu(options, 1);
}

void Row(const std::string& what, const std::string& figures) {
  std::printf("| %s | %s |\n", what.c_str(), figures.c_str());
  std::fflush(stdout);
}
std::string Text(const char* format, double a, double b = 0) {
  char text[128];
  std::snprintf(text, sizeof(text), format, a, b);
  return text;
}

// A kernel of one number: from its launch until its callback has run, and many in a row.
void SmallKernels() {
  DeviceRig rig(Open(1));
  const TensorType type(DType::kF32, {1});
  const TensorType* inputs[] = {&type, &type};
  NodeView node;
  node.op = "test_affine";
  node.inputs = inputs;
  const auto kernel = *rig.backend()->device(0)->MakeKernel(node, {type});
  KernelCall call;
  call.kernel = kernel.get();
  call.inputs = {rig.Upload(0, std::vector<float>{1}), rig.Upload(0, std::vector<float>{2})};
  call.outputs = {rig.Allocate(0, 4)};
  std::vector<double> samples;
  for (int i = 0; i < 3000; ++i) {
    const double start = Micros();
    rig.stream(0)->Launch(call);
    if (!rig.Synchronize(0).ok()) std::exit(1);
    if (i >= 200) samples.push_back(Micros() - start);
  }
  const Spread spread = SpreadOf(samples);
  Row("4 B add, launched and waited for",
      Text("p50 %.1f us, p99 %.1f us", spread.median, spread.p99));
  constexpr int kInARow = 20000;
  double start = Micros();
  for (int i = 0; i < kInARow; ++i) rig.stream(0)->Launch(call);
  const double enqueued = Micros() - start;
  if (!rig.Synchronize(0).ok()) std::exit(1);
  Row("4 B adds in a row, each", Text("%.2f us, of which enqueuing %.2f us",
                                      (Micros() - start) / kInARow, enqueued / kInARow));
}

// all_reduce of logical devices: one that is waited for, and many in a row.
void SmallCollectives(int size) {
  DeviceRig rig(Open(size));
  auto members = rig.OpenAll(1);
  std::vector<CollectiveCall> calls;
  DeviceAddress result = rig.Allocate(0, 4);
  for (int m = 0; m < size; ++m) {
    calls.push_back(
        DeviceRig::AllReduceCall(DType::kF32, 1, rig.Upload(m, std::vector<float>{1}), result));
  }
  const auto once = [&] {
    for (int m = 0; m < size; ++m) {
      if (!members[static_cast<size_t>(m)]
               ->Enqueue(calls[static_cast<size_t>(m)], rig.stream(m))
               .ok())
        std::exit(1);
    }
  };
  std::vector<double> samples;
  for (int i = 0; i < 2000; ++i) {
    const double start = Micros();
    once();
    for (int m = 0; m < size; ++m) {
      if (!rig.Synchronize(m).ok()) std::exit(1);
    }
    if (i >= 200) samples.push_back(Micros() - start);
  }
  const Spread spread = SpreadOf(samples);
  constexpr int kInARow = 3000;
  const double start = Micros();
  for (int i = 0; i < kInARow; ++i) once();
  for (int m = 0; m < size; ++m) {
    if (!rig.Synchronize(m).ok()) std::exit(1);
  }
  Row("all_reduce of 4 B, " + std::to_string(size) + " devices",
      Text("p50 %.1f us, p99 %.1f us", spread.median, spread.p99) +
          Text("; in a row, each %.2f us", (Micros() - start) / kInARow));
}

// Of (size + 1) operands: every input is read, one result is written.
void LargeCollectives(int size, int64_t bytes) {
  DeviceRig rig(Open(size));
  auto members = rig.OpenAll(1);
  const DeviceAddress result = rig.Allocate(0, bytes);
  std::vector<CollectiveCall> calls;
  for (int m = 0; m < size; ++m) {
    calls.push_back(
        DeviceRig::AllReduceCall(DType::kF32, bytes / 4, rig.Allocate(m, bytes), result));
  }
  const DeviceAddress from = rig.Allocate(0, bytes);
  const auto time = [&](int repeats, const auto& enqueue) {
    std::vector<double> samples;
    for (int round = 0; round < 7; ++round) {
      const double start = Micros();
      for (int i = 0; i < repeats; ++i) enqueue();
      for (int m = 0; m < size; ++m) {
        if (!rig.Synchronize(m).ok()) std::exit(1);
      }
      if (round > 0) samples.push_back((Micros() - start) / repeats);
    }
    return SpreadOf(samples).median;
  };
  const auto reduce = [&](DType dtype) {
    for (CollectiveCall& call : calls) {
      call.dtype = dtype;
      call.count = bytes / DTypeBytes(dtype);
    }
    return time(10, [&] {
      for (int m = 0; m < size; ++m) {
        if (!members[static_cast<size_t>(m)]
                 ->Enqueue(calls[static_cast<size_t>(m)], rig.stream(m))
                 .ok())
          std::exit(1);
      }
    });
  };
  const double copy =
      2 * static_cast<double>(bytes) / time(10, [&] { rig.stream(0)->Copy(result, from, bytes); });
  const double moved = (size + 1) * static_cast<double>(bytes);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64, DType::kI8}) {
    const double rate = moved / reduce(dtype);
    Row("all_reduce of " + std::to_string(bytes / kMiB) + " MiB of " +
            std::string(DTypeName(dtype)) + ", " + std::to_string(size) + " devices",
        Text("%.0f GB/s, %.3f of a copy's", rate / 1e3, rate / copy));
  }
}

void Copies(int64_t bytes) {
  DeviceRig rig(Open(1));
  std::vector<char> host(static_cast<size_t>(bytes), 1);
  const DeviceAddress memory = rig.Allocate(0, bytes);
  for (const bool up : {true, false}) {
    std::vector<double> samples;
    for (int round = 0; round < 5; ++round) {
      const double start = Micros();
      if (up) {
        rig.stream(0)->CopyFromHost(memory, host.data(), bytes);
      } else {
        rig.stream(0)->CopyToHost(host.data(), memory, bytes);
      }
      if (!rig.Synchronize(0).ok()) std::exit(1);
      samples.push_back(Micros() - start);
    }
    Row(std::string(up ? "to" : "from") + " the GPU, " + std::to_string(bytes >> 10) +
            " KiB that are not pinned",
        Text("%.1f GB/s, %.0f us", static_cast<double>(bytes) / SpreadOf(samples).median / 1e3,
             SpreadOf(samples).median));
  }
}

void BackendSuite() {
  std::printf("| what | measured |\n|---|---|\n");
  SmallKernels();
  for (const int size : {1, 2, 4, 8}) SmallCollectives(size);
  for (const int size : {2, 4, 8}) {
    LargeCollectives(size, 64 * kMiB);
    LargeCollectives(size, 256 * kMiB);
  }
  for (const int64_t bytes : {int64_t{4096}, kMiB / 16, kMiB, 256 * kMiB}) Copies(bytes);
}

int Main(const std::vector<absl::string_view>& arguments) {
  if (arguments.empty()) {
    BackendSuite();
    return 0;
  }
  bool ops = false, list = false;
  OpsSuiteOptions options;
  for (absl::string_view argument : arguments) {
    if (argument == "--ops") {
      ops = true;
    } else if (argument == "--list") {
      list = true;
    } else if (argument == "--smoke") {
      options.smoke = true;
    } else if (absl::ConsumePrefix(&argument, "--out=")) {
      options.out = std::string(argument);
    } else if (!absl::ConsumePrefix(&argument, "--limit=") ||
               !absl::SimpleAtod(argument, &options.limit_seconds)) {
      std::fprintf(stderr, "gpu_bench: what is %s?\n", std::string(argument).c_str());
      return 2;
    }
  }
  if (ops == list) {
    std::fprintf(stderr, "gpu_bench: there is --ops, with what belongs to it, or --list\n");
    return 2;
  }
  if (list) {
    ListOpsSuite();
  } else {
    RunOpsSuite(options);
  }
  return 0;
}

}  // namespace
}  // namespace chorus

int main(int argc, char** argv) {
  return chorus::Main(std::vector<absl::string_view>(argv + 1, argv + argc));
}
