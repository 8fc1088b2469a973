// P9: whether a product of cuBLASLt has the same bits, whoever asks for it.
#include <sys/types.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "tools/gpu_probe/assumptions.h"
#include "tools/gpu_probe/gpu.h"
#include "tools/gpu_probe/matmul.h"
#include "tools/gpu_probe/stages.h"

namespace chorus {
namespace probe {
namespace {

using cuda::BlasType;

constexpr uint32_t kOffsetBytes = 64;
constexpr int kRepeats = 3;

// Layers of a small network, a square, something odd, and sums long enough to be cut into parts.
std::vector<MatmulShape> Shapes() {
  std::vector<MatmulShape> shapes;
  for (const BlasType type : {BlasType::kF32, BlasType::kBF16, BlasType::kF16, BlasType::kF64}) {
    shapes.push_back({type, 256, 64, 784});
    shapes.push_back({type, 1024, 1024, 1024});
    shapes.push_back({type, 264, 136, 1000});
    shapes.push_back({type, 64, 64, 16384});
  }
  return shapes;
}

uint64_t HashOf(const void* data, size_t bytes) {
  const auto* const at = static_cast<const unsigned char*>(data);
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ at[i]) * 0x100000001b3u;
  return hash;
}

// All that one product told: its bits at each offset, and which algorithms were chosen.
struct Told {
  std::set<std::string> bits;        // of every run
  std::set<std::string> algorithms;  // chosen for operands as aligned as these
  std::set<std::string> best;        // chosen for the best alignment, 256 bytes
  std::string text;
};

// One process's runs of one shape, as a line: shape, hashes, two algorithms' hashes, text.
absl::StatusOr<std::string> RunShape(Gpu* gpu, Matmul* matmul, const MatmulShape& shape,
                                     cuda::Stream stream) {
  const cuda::Api& api = gpu->api();
  const int64_t size = shape.element_bytes();
  const int64_t a_bytes = shape.m * shape.k * size;
  const int64_t b_bytes = shape.k * shape.n * size;
  const int64_t d_bytes = shape.m * shape.n * size;
  CHORUS_RETURN_IF_ERROR(matmul->Set(shape));
  CHORUS_ASSIGN_OR_RETURN(const auto algorithm, matmul->Choose(kOffsetBytes));
  CHORUS_ASSIGN_OR_RETURN(const auto best, matmul->Choose(256));
  CHORUS_ASSIGN_OR_RETURN(const Memory a, gpu->Allocate(a_bytes + kOffsetBytes));
  CHORUS_ASSIGN_OR_RETURN(const Memory b, gpu->Allocate(b_bytes + kOffsetBytes));
  CHORUS_ASSIGN_OR_RETURN(const Memory d, gpu->Allocate(d_bytes + kOffsetBytes));
  const auto a_values = PatternMatrix(shape.type, shape.m * shape.k, 91);
  const auto b_values = PatternMatrix(shape.type, shape.k * shape.n, 92);
  std::set<std::string> hashes;
  std::vector<char> result(static_cast<size_t>(d_bytes));
  for (const uint32_t offset : {uint32_t{0}, kOffsetBytes}) {
    CHORUS_CUDA(api, MemcpyHtoDAsync, a.get() + offset, a_values.data(), a_values.size(), stream);
    CHORUS_CUDA(api, MemcpyHtoDAsync, b.get() + offset, b_values.data(), b_values.size(), stream);
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      CHORUS_CUDA(api, MemsetD8Async, d.get(), 0xff, d.bytes, stream);
      CHORUS_RETURN_IF_ERROR(
          matmul->Run(algorithm, a.get() + offset, b.get() + offset, d.get() + offset, stream));
      CHORUS_CUDA(api, MemcpyDtoHAsync, result.data(), d.get() + offset, result.size(), stream);
      CHORUS_RETURN_IF_ERROR(gpu->Synchronize(stream));
      hashes.insert(absl::StrFormat("%016x", HashOf(result.data(), result.size())));
    }
  }
  const auto name = [](const cuda::BlasAlgorithm& of) {
    return absl::StrFormat("%016x", HashOf(&of, sizeof(of)));
  };
  return absl::StrCat(shape.Text(), "\t", absl::StrJoin(hashes, " "), "\t", name(algorithm), "\t",
                      name(best), "\t", matmul->Text(algorithm));
}

// Asks a helper for all shapes, and adds what it tells.
absl::Status Collect(const Helper& helper, std::map<std::string, Told>* told) {
  while (true) {
    CHORUS_ASSIGN_OR_RETURN(const std::string line, helper.channel.Receive(20));
    if (line == "end") return absl::OkStatus();
    const std::vector<std::string> parts = absl::StrSplit(line, '\t');
    if (parts.size() != 5) return absl::InternalError(line);
    Told& of = (*told)[parts[0]];
    for (const absl::string_view hash : absl::StrSplit(parts[1], ' ')) of.bits.emplace(hash);
    of.algorithms.insert(parts[2]);
    of.best.insert(parts[3]);
    of.text = parts[4];
  }
}

}  // namespace

absl::Status RunP9(StageContext* context) {
  Recorder* const recorder = context->recorder;
  std::map<std::string, Told> told;
  const auto run = [&](const std::vector<const Helper*>& helpers) {
    for (const Helper* helper : helpers) CHORUS_RETURN_IF_ERROR(helper->channel.Send("run"));
    for (const Helper* helper : helpers) CHORUS_RETURN_IF_ERROR(Collect(*helper, &told));
    return absl::OkStatus();
  };
  CHORUS_ASSIGN_OR_RETURN(const Helper first, context->Start("multiply"));
  CHORUS_ASSIGN_OR_RETURN(const Helper second, context->Start("multiply"));
  for (const Helper* helper : {&first, &second}) {
    CHORUS_ASSIGN_OR_RETURN(const std::string ready, helper->channel.Receive(25));
    if (ready.rfind("cuBLASLt", 0) != 0) return absl::UnavailableError(ready);
    if (helper == &first) recorder->Fact("library", ready);
  }
  CHORUS_RETURN_IF_ERROR(run({&first}));
  CHORUS_RETURN_IF_ERROR(run({&second}));
  CHORUS_RETURN_IF_ERROR(run({&first, &second}));
  std::string loaded = "under load of a third process, too";
  {
    CHORUS_ASSIGN_OR_RETURN(const Helper load, context->Start("load"));
    const auto text = load.channel.Receive(15);
    if (!text.ok() || *text != "loading") {
      loaded = "not under load: " + (text.ok() ? *text : std::string(text.status().message()));
    }
    CHORUS_RETURN_IF_ERROR(run({&first, &second}));
  }
  recorder->Fact("runs", absl::StrCat("two processes, alone and at once, ", loaded));
  Judge judge;
  std::set<std::string> moved;
  for (const auto& [shape, of] : told) {
    recorder->Fact(shape, absl::StrCat(of.text, "; results that differ: ", of.bits.size() - 1,
                                       "; algorithms: ", of.algorithms.size()));
    judge.AtMost("results of " + shape, static_cast<double>(of.bits.size()), 1);
    judge.AtMost("algorithms of " + shape, static_cast<double>(of.algorithms.size()), 1);
    if (of.best != of.algorithms) moved.insert(shape);
  }
  recorder->Fact("the heuristic chooses otherwise for operands at 256 bytes than at 64",
                 moved.empty() ? "nowhere" : absl::StrJoin(moved, ", "));
  if (loaded.rfind("not", 0) == 0) judge.Unknown(loaded);
  Verdict verdict = judge.verdict();
  if (verdict.decision == Decision::kHolds) {
    verdict.why = absl::StrCat("one result and one algorithm for each of ", told.size(),
                               " products: ", kRepeats,
                               " times, at offsets 0 and 64, in two processes, ", loaded);
  }
  recorder->Say("P9", verdict);
  return absl::OkStatus();
}

absl::Status Multiply(RoleContext* context) {
  CHORUS_ASSIGN_OR_RETURN(const auto gpu, Gpu::Open(context->libraries));
  CHORUS_ASSIGN_OR_RETURN(const auto matmul, Matmul::Open(gpu.get(), context->libraries));
  CHORUS_ASSIGN_OR_RETURN(const OwnedStream stream, gpu->CreateStream());
  CHORUS_RETURN_IF_ERROR(context->channel.Send(matmul->VersionText()));
  // Ends when nobody asks any more.
  while (context->channel.Receive(60).ok()) {
    for (const MatmulShape& shape : Shapes()) {
      auto line = RunShape(gpu.get(), matmul.get(), shape, stream.get());
      if (!line.ok()) {
        return absl::Status(line.status().code(),
                            absl::StrCat(shape.Text(), ": ", line.status().message()));
      }
      CHORUS_RETURN_IF_ERROR(context->channel.Send(*line));
    }
    CHORUS_RETURN_IF_ERROR(context->channel.Send("end"));
  }
  return absl::OkStatus();
}

absl::Status LoadGpu(RoleContext* context) {
  CHORUS_ASSIGN_OR_RETURN(const auto gpu, Gpu::Open(context->libraries));
  CHORUS_ASSIGN_OR_RETURN(const OwnedStream stream, gpu->CreateStream());
  const int64_t bytes = std::min<int64_t>(256 << 20, gpu->most_bytes() / 4 / 16 * 16);
  CHORUS_ASSIGN_OR_RETURN(const Memory from, gpu->Allocate(bytes));
  CHORUS_ASSIGN_OR_RETURN(const Memory to, gpu->Allocate(bytes));
  CHORUS_RETURN_IF_ERROR(gpu->FillPattern(from.get(), bytes, 9, true, stream.get()));
  CopyArgs args;
  args.from = from.as<Pack>();
  args.to = to.as<Pack>();
  args.packs = bytes / 16;
  // It is killed when it is no longer wanted.
  const double end = NowSeconds() + 40;
  bool told = false;
  while (NowSeconds() < end) {
    for (int n = 0; n < 20; ++n) {
      CHORUS_RETURN_IF_ERROR(
          gpu->Launch(gpu->kernel("copy"), args, gpu->Wave("copy"), stream.get()));
    }
    CHORUS_RETURN_IF_ERROR(gpu->Synchronize(stream.get()));
    if (!told) CHORUS_RETURN_IF_ERROR(context->channel.Send("loading"));
    told = true;
  }
  return absl::OkStatus();
}

}  // namespace probe
}  // namespace chorus
