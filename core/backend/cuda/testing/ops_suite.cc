#include "core/backend/cuda/testing/ops_suite.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/backend/cuda/testing/test_gpu.h"
#include "core/backend/testing/device_rig.h"
#include "core/ops/cuda_kernels.h"
#include "core/ops/op.h"
#include "core/ops/registry.h"
#include "core/ops/testing/op_rows.h"
#include "core/ops/testing/value.h"
#include "nlohmann/json.hpp"

namespace chorus {
namespace {

using testing::OpRow;
using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

// How a row is timed, here and in tools/gpu_torch.py: rounds of so many calls in a row that they
// take this long; three of them and more, until the row has had its time; less where a call alone
// takes it.
constexpr double kRoundSeconds = 0.02;
constexpr double kRowSeconds = 0.3;
constexpr size_t kLeastRounds = 3;
constexpr size_t kMostRounds = 5;
constexpr int kMostCalls = 10000;
// What one call may take for the row to have three rounds.
constexpr double kSlowSeconds = 0.5;

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "gpu_bench: %s\n", what.c_str());
  std::exit(1);
}
void Require(const absl::Status& status, const std::string& what) {
  if (!status.ok()) Die(absl::StrCat(what, ": ", status.ToString()));
}

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Json ToJson(const Attributes& attributes) {
  Json json = Json::object();
  for (const Attribute& attribute : attributes) {
    absl::visit([&](const auto& value) { json[attribute.name] = value; }, attribute.value);
  }
  return json;
}

Json ToJson(const OpRow& row) {
  Json inputs = Json::array();
  for (const OpRow::Input& input : row.inputs) {
    if (input.constant) continue;
    inputs.push_back({{"dtype", std::string(DTypeName(input.type.dtype))},
                      {"shape", input.type.sizes()},
                      {"below", input.below}});
  }
  return {{"name", row.name()},
          {"family", row.family},
          {"op", row.op},
          {"dtype", std::string(DTypeName(row.dtype()))},
          {"shape", row.shape()},
          {"inputs", inputs},
          {"attributes", ToJson(row.attributes)},
          {"bytes", row.bytes},
          {"flops", row.flops}};
}

// A row's kernels with their operands, in memory of a device.
class RowOnGpu {
 public:
  // What it prepares is done.
  RowOnGpu(DeviceRig* rig, const OpRow& row) : rig_(rig), row_(row) {
    for (const OpRow::Input& input : row.inputs) addresses_.push_back(Make(input));
    std::vector<KernelCall> preparations;
    for (const OpRow::Step& step : row.steps) {
      if (FindOp(step.op)->alias == OutputAlias::kInput) {
        addresses_.push_back(addresses_[step.operands[0]]);
        continue;
      }
      std::vector<const TensorType*> types;
      KernelCall call;
      for (const size_t operand : step.operands) {
        types.push_back(&row.TypeOf(operand));
        call.inputs.push_back(addresses_[operand]);
      }
      addresses_.push_back(Allocate(step.output.num_bytes()));
      call.outputs.push_back(addresses_.back());
      (step.prepares ? preparations : calls_)
          .push_back(Prepare(step.op, step.attributes, types, step.output, std::move(call)));
    }
    for (const KernelCall& call : preparations) rig_->stream(0)->Launch(call);
    Wait();
  }
  ~RowOnGpu() { rig_->FreeAll(); }

  // Seconds for so many calls in a row.
  double Time(int calls) {
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < calls; ++i) {
      for (const KernelCall& call : calls_) rig_->stream(0)->Launch(call);
    }
    Wait();
    return SecondsSince(start);
  }

 private:
  void Wait() { Require(rig_->Synchronize(0), row_.name()); }

  DeviceAddress Allocate(int64_t bytes) { return rig_->Allocate(0, std::max<int64_t>(bytes, 1)); }

  // A call of an op's kernel, with its workspace.
  KernelCall Prepare(const std::string& op, const Attributes& attributes,
                     const std::vector<const TensorType*>& types, const TensorType& output,
                     KernelCall call) {
    NodeView node;
    node.op = op;
    node.attributes = attributes;
    node.inputs = types;
    auto kernel = rig_->backend()->device(0)->MakeKernel(node, {output});
    Require(kernel.status(), absl::StrCat(row_.name(), ": ", op));
    call.kernel = kernel->get();
    const int64_t scratch = (*kernel)->workspace_bytes();
    if (scratch > 0) call.workspace = Allocate(scratch);
    kernels_.push_back(*std::move(kernel));
    return call;
  }

  DeviceAddress Make(const OpRow::Input& input) {
    const int64_t elements = input.type.num_elements();
    if (input.constant) {
      return Upload(testing::FromDoubles(input.type, {*input.constant}).bytes);
    }
    if (IsFloating(input.type.dtype)) return MakeNormal(input.type);
    // Below a limit that every dtype of indices here holds; little-endian.
    std::string bytes(static_cast<size_t>(input.type.num_bytes()), '\0');
    const auto width = static_cast<size_t>(DTypeBytes(input.type.dtype));
    std::uniform_int_distribution<int64_t> draw(0, input.below - 1);
    for (size_t i = 0; i < static_cast<size_t>(elements); ++i) {
      const int64_t value = draw(random_);
      std::memcpy(&bytes[i * width], &value, width);
    }
    return Upload(bytes);
  }
  DeviceAddress Upload(const std::string& bytes) {
    return rig_->Upload(0, std::vector<char>(bytes.begin(), bytes.end()));
  }
  // Drawn by the GPU: there may be a hundred million.
  DeviceAddress MakeNormal(const TensorType& type) {
    const TensorType scalar(DType::kI64, {});
    KernelCall call;
    call.inputs = {rig_->Upload(0, std::vector<int64_t>{7}),
                   rig_->Upload(0, std::vector<int64_t>{++drawn_})};
    call.outputs = {Allocate(type.num_bytes())};
    call =
        Prepare("random_normal", TypeAttributes(type), {&scalar, &scalar}, type, std::move(call));
    rig_->stream(0)->Launch(call);
    Wait();
    return call.outputs[0];
  }

  DeviceRig* const rig_;
  const OpRow& row_;
  std::mt19937_64 random_{7};
  int64_t drawn_ = 0;
  std::vector<std::unique_ptr<Kernel>> kernels_;
  std::vector<DeviceAddress> addresses_;  // of values, as steps number them
  std::vector<KernelCall> calls_;
};

struct Timing {
  double seconds = 0;  // a call's: the median of rounds
  size_t rounds = 0;
  int calls = 0;  // in each
};

Timing TimeRow(RowOnGpu* row, bool smoke) {
  const Clock::time_point start = Clock::now();
  // The driver loads a kernel when it is first launched.
  double round = row->Time(1);
  if (smoke || round > kSlowSeconds) return {round, 1, 1};
  int calls = 1;
  while ((round = row->Time(calls)) < kRoundSeconds && calls < kMostCalls) {
    const double wanted = 1.2 * calls * kRoundSeconds / std::max(round, 1e-9);
    calls = static_cast<int>(
        std::min<double>(kMostCalls, std::max<double>(2.0 * calls, std::ceil(wanted))));
  }
  std::vector<double> rounds = {round};
  while (rounds.size() < kLeastRounds ||
         (rounds.size() < kMostRounds && SecondsSince(start) < kRowSeconds)) {
    rounds.push_back(row->Time(calls));
  }
  std::sort(rounds.begin(), rounds.end());
  return {rounds[rounds.size() / 2] / calls, rounds.size(), calls};
}

std::string RateText(const OpRow& row, double seconds) {
  if (row.flops > 0) {
    return absl::StrFormat("%.2f TFLOP/s", static_cast<double>(row.flops) / seconds / 1e12);
  }
  return absl::StrFormat("%.0f GB/s", static_cast<double>(row.bytes) / seconds / 1e9);
}

}  // namespace

void RunOpsSuite(const OpsSuiteOptions& options) {
  std::ofstream out;
  if (!options.out.empty()) {
    out.open(options.out);
    if (!out) Die(absl::StrCat(options.out, " cannot be written"));
  }
  CudaBackendOptions backend;
  backend.make_kernel = &MakeCudaKernel;
  DeviceRig rig(OpenTestGpu(backend, 1));
  const Clock::time_point start = Clock::now();
  std::printf("| op | us | rate |\n|---|---|---|\n");
  for (const OpRow& row : testing::OpRows(options.smoke)) {
    Json line = ToJson(row);
    if (options.limit_seconds > 0 && SecondsSince(start) > options.limit_seconds) {
      line["us"] = nullptr;
      std::printf("| %s | left out | the limit is reached |\n", row.name().c_str());
    } else {
      RowOnGpu on_gpu(&rig, row);
      const Timing timing = TimeRow(&on_gpu, options.smoke);
      line["us"] = timing.seconds * 1e6;
      line["rounds"] = timing.rounds;
      line["calls"] = timing.calls;
      std::printf("| %s | %.2f | %s |\n", row.name().c_str(), timing.seconds * 1e6,
                  RateText(row, timing.seconds).c_str());
    }
    std::fflush(stdout);
    // Whatever comes to a later row, this one is kept.
    if (out.is_open()) out << line.dump() << std::endl;
  }
  if (out.is_open() && !out) Die(absl::StrCat(options.out, " cannot be written"));
}

void ListOpsSuite() {
  for (const OpRow& row : testing::OpRows(/*smoke=*/false)) {
    std::printf("%s\n", ToJson(row).dump().c_str());
  }
}

}  // namespace chorus
