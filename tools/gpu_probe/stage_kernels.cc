// P6: ordered reductions. P7: interpreted chains of element-wise ops. Both against the rate of a
// copy of as many bytes in the same run, in turns.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tools/gpu_probe/assumptions.h"
#include "tools/gpu_probe/chains.h"
#include "tools/gpu_probe/gpu.h"
#include "tools/gpu_probe/host_reference.h"
#include "tools/gpu_probe/stages.h"

namespace chorus {
namespace probe {
namespace {

constexpr int kRounds = 9;
constexpr int64_t kSampleBytes = 256 << 10;

// From this size on speed is judged: what is smaller fits into caches.
constexpr int64_t kLeastJudgedBytes = int64_t{64} << 20;

// The sizes of an operand to measure, where all that is needed is `times` as long. Too little
// memory for one is unknown speed; then a small one still shows what is computed.
std::vector<int64_t> Sizes(const Gpu& gpu, double times, Judge* judge) {
  std::vector<int64_t> sizes;
  for (const int64_t bytes : {kLeastJudgedBytes, 4 * kLeastJudgedBytes}) {
    if (times * static_cast<double>(bytes) <= static_cast<double>(gpu.most_bytes())) {
      sizes.push_back(bytes);
    } else {
      judge->Unknown(absl::StrCat(bytes >> 20, " MiB, for which there is too little memory"));
    }
  }
  if (sizes.empty()) sizes.push_back(1 << 20);
  return sizes;
}

// Something that moves bytes, and its rates so far in GB/s.
struct Contender {
  std::string name;
  double bytes = 0;  // read and written
  std::function<absl::Status()> enqueue;
  std::vector<double> rates;
};

// Rounds in turns, so that whatever slows the GPU down slows all.
absl::Status MeasureInTurns(const Gpu& gpu, cuda::Stream stream, std::vector<Contender>* all) {
  for (int round = 0; round < kRounds; ++round) {
    for (Contender& contender : *all) {
      // About a millisecond's worth of large ones.
      const int repeats = std::clamp(static_cast<int>(2e9 / contender.bytes), 1, 10);
      CHORUS_ASSIGN_OR_RETURN(const auto micros,
                              gpu.TimeMicros(stream, 1, repeats, contender.enqueue));
      contender.rates.push_back(contender.bytes / micros[0] * 1e-3);
    }
  }
  return absl::OkStatus();
}

// Copies of `bytes` read and written in all, within `memory`, whose first half is read.
std::vector<Contender> Copies(const Gpu& gpu, const Memory& from, const Memory& to, int64_t bytes,
                              cuda::Stream stream) {
  const int64_t half = bytes / 2 / 16 * 16;
  const auto by_driver = [&gpu, &from, &to, half, stream]() -> absl::Status {
    CHORUS_CUDA(gpu.api(), MemcpyDtoDAsync, to.get(), from.get(), half, stream);
    return absl::OkStatus();
  };
  const auto by_kernel = [&gpu, &from, &to, half, stream] {
    CopyArgs args;
    args.from = from.as<Pack>();
    args.to = to.as<Pack>();
    args.packs = half / 16;
    return gpu.Launch(gpu.kernel("copy"), args, gpu.Wave("copy"), stream);
  };
  return {{"copy of as many bytes, cuMemcpyDtoD", 2.0 * half, by_driver, {}},
          {"copy of as many bytes, our kernel", 2.0 * half, by_kernel, {}}};
}

// Records all rates; the better of the first two, copies, counts as the copy rate.
double TellCopyRate(std::vector<Contender>* all, const std::string& of, Recorder* recorder) {
  double best = 0;
  for (size_t n = 0; n < 2; ++n) {
    best = std::max(best, recorder->Numbers((*all)[n].name + " as " + of, (*all)[n].rates, "GB/s"));
  }
  return best;
}

// A kernel in two ways: as many blocks as the GPU has at a time, each of which does a large part,
// and eight times as many. Which is faster is not of interest here: the better one counts.
template <typename Args>
void AddWaves(const Gpu& gpu, const std::string& kernel, const std::string& what, double bytes,
              const Args& args, cuda::Stream stream, std::vector<Contender>* all) {
  for (const int waves : {1, 8}) {
    const int64_t blocks = waves * gpu.Wave(kernel);
    all->push_back({absl::StrCat(what, waves == 1 ? ", one wave" : ", eight waves"),
                    bytes,
                    [&gpu, kernel, args, blocks, stream] {
                      return gpu.Launch(gpu.kernel(kernel), args, blocks, stream);
                    },
                    {}});
  }
}

// Records both ways of a kernel, from `index` on, and the share of the copy rate of the better one.
double TellShare(std::vector<Contender>* all, size_t index, const std::string& what, double copy,
                 Recorder* recorder) {
  double best = 0;
  for (size_t n = index; n < index + 2; ++n) {
    best = std::max(best, recorder->Numbers((*all)[n].name, (*all)[n].rates, "GB/s"));
  }
  recorder->Number(what + ", of the copy rate", best / copy, "");
  return best / copy;
}

// The start, the middle and the end of a buffer.
std::vector<int64_t> SampleOffsets(int64_t bytes) {
  return {0, bytes / 2 / 16 * 16, bytes - kSampleBytes};
}

absl::StatusOr<std::vector<Pack>> Download(const Gpu& gpu, cuda::DevicePtr from, int64_t bytes,
                                           cuda::Stream stream) {
  std::vector<Pack> packs(static_cast<size_t>(bytes / 16));
  CHORUS_CUDA(gpu.api(), MemcpyDtoHAsync, packs.data(), from, bytes, stream);
  CHORUS_RETURN_IF_ERROR(gpu.Synchronize(stream));
  return packs;
}

// --- P6 ---

template <int kRanks>
absl::Status MeasureReduction(const Gpu& gpu, const Memory& inputs, const Memory& output,
                              const Memory& copied, int64_t bytes, cuda::Stream stream,
                              Judge* judge, Recorder* recorder) {
  OrderedSumArgs<kRanks> args;
  for (int r = 0; r < kRanks; ++r) args.in[r] = inputs.as<Pack>() + r * (bytes / 16);
  args.out = output.as<Pack>();
  args.packs = bytes / 16;
  const std::string kernel = absl::StrCat("ordered_sum_", kRanks);
  const std::string what = absl::StrCat("sum of ", kRanks, " x ", bytes >> 20, " MiB");
  std::vector<Contender> all = Copies(gpu, inputs, copied, (kRanks + 1) * bytes, stream);
  AddWaves(gpu, kernel, what, static_cast<double>(kRanks + 1) * static_cast<double>(bytes), args,
           stream, &all);
  CHORUS_CUDA(gpu.api(), MemsetD8Async, output.get(), 0xee, bytes, stream);
  CHORUS_RETURN_IF_ERROR(MeasureInTurns(gpu, stream, &all));
  const double copy = TellCopyRate(&all, what, recorder);
  const double share = TellShare(&all, 2, what, copy, recorder);
  if (bytes >= kLeastJudgedBytes) {
    judge->AtLeast(what, share, kLeastReduceShare, " of the copy rate");
  }

  int64_t wrong = 0;
  for (const int64_t offset : SampleOffsets(bytes)) {
    std::vector<std::vector<Pack>> samples;
    const Pack* on_host[kRanks];
    for (int r = 0; r < kRanks; ++r) {
      CHORUS_ASSIGN_OR_RETURN(
          auto sample, Download(gpu, inputs.get() + r * bytes + offset, kSampleBytes, stream));
      samples.push_back(std::move(sample));
    }
    for (int r = 0; r < kRanks; ++r) on_host[r] = samples[r].data();
    std::vector<Pack> expected(kSampleBytes / 16);
    OrderedSumOnHost(kRanks, on_host, expected.data(), kSampleBytes / 16);
    CHORUS_ASSIGN_OR_RETURN(const auto got,
                            Download(gpu, output.get() + offset, kSampleBytes, stream));
    for (size_t i = 0; i < got.size(); ++i) {
      wrong += std::memcmp(&got[i], &expected[i], sizeof(Pack)) != 0;
    }
  }
  judge->True(what + " has the host's bits", wrong == 0);
  return absl::OkStatus();
}

// --- P7 ---

// Equal bits, or both NaN: which NaN a product gives differs between processors.
bool Same(const Pack& a, const Pack& b) {
  for (int k = 0; k < 4; ++k) {
    if (std::isnan(a.f[k]) && std::isnan(b.f[k])) continue;
    if (cuda::BitsOf(a.f[k]) != cuda::BitsOf(b.f[k])) return false;
  }
  return true;
}

// Of a chain's outputs at the samples, packs that are not what the host computes.
absl::StatusOr<int64_t> WrongPacks(const Gpu& gpu, const ChainArgs& args, cuda::Stream stream) {
  int64_t wrong = 0;
  for (const int64_t offset : SampleOffsets(args.packs * 16)) {
    ChainArgs on_host = args;
    std::vector<std::vector<Pack>> samples;
    for (int k = 0; k < args.inputs; ++k) {
      CHORUS_ASSIGN_OR_RETURN(auto sample,
                              Download(gpu, reinterpret_cast<cuda::DevicePtr>(args.in[k]) + offset,
                                       kSampleBytes, stream));
      samples.push_back(std::move(sample));
    }
    for (int k = 0; k < args.inputs; ++k) on_host.in[k] = samples[k].data();
    std::vector<std::vector<Pack>> expected(args.outputs, std::vector<Pack>(kSampleBytes / 16));
    for (int k = 0; k < args.outputs; ++k) on_host.out[k] = expected[k].data();
    on_host.packs = kSampleBytes / 16;
    RunChainOnHost(on_host);
    for (int k = 0; k < args.outputs; ++k) {
      CHORUS_ASSIGN_OR_RETURN(const auto got,
                              Download(gpu, reinterpret_cast<cuda::DevicePtr>(args.out[k]) + offset,
                                       kSampleBytes, stream));
      for (size_t i = 0; i < got.size(); ++i) wrong += !Same(got[i], expected[k][i]);
    }
  }
  return wrong;
}

}  // namespace

absl::Status RunP6(StageContext* context) {
  Recorder* const recorder = context->recorder;
  CHORUS_ASSIGN_OR_RETURN(const auto gpu, Gpu::Open(context->libraries));
  CHORUS_ASSIGN_OR_RETURN(const OwnedStream stream, gpu->CreateStream());
  Judge judge;
  for (const int64_t bytes : Sizes(*gpu, 13.5, &judge)) {
    CHORUS_ASSIGN_OR_RETURN(const Memory inputs, gpu->Allocate(8 * bytes));
    CHORUS_ASSIGN_OR_RETURN(const Memory output, gpu->Allocate(bytes));
    CHORUS_ASSIGN_OR_RETURN(const Memory copied, gpu->Allocate(4 * bytes + bytes / 2));
    CHORUS_RETURN_IF_ERROR(gpu->FillPattern(inputs.get(), inputs.bytes, 6, true, stream.get()));
    CHORUS_RETURN_IF_ERROR(
        MeasureReduction<2>(*gpu, inputs, output, copied, bytes, stream.get(), &judge, recorder));
    CHORUS_RETURN_IF_ERROR(
        MeasureReduction<4>(*gpu, inputs, output, copied, bytes, stream.get(), &judge, recorder));
    CHORUS_RETURN_IF_ERROR(
        MeasureReduction<8>(*gpu, inputs, output, copied, bytes, stream.get(), &judge, recorder));
  }
  recorder->Say("P6", judge.verdict());
  return absl::OkStatus();
}

absl::Status RunP7(StageContext* context) {
  Recorder* const recorder = context->recorder;
  CHORUS_ASSIGN_OR_RETURN(const auto gpu, Gpu::Open(context->libraries));
  CHORUS_ASSIGN_OR_RETURN(const OwnedStream stream, gpu->CreateStream());
  Judge judge;
  for (const int64_t bytes : Sizes(*gpu, 8, &judge)) {
    const std::string size = absl::StrCat(" over ", bytes >> 20, " MiB");
    CHORUS_ASSIGN_OR_RETURN(const Memory inputs, gpu->Allocate(3 * bytes));
    CHORUS_ASSIGN_OR_RETURN(const Memory outputs, gpu->Allocate(2 * bytes));
    CHORUS_ASSIGN_OR_RETURN(const Memory copied, gpu->Allocate(3 * bytes));
    CHORUS_RETURN_IF_ERROR(gpu->FillPattern(inputs.get(), inputs.bytes, 7, true, stream.get()));
    const int64_t packs = bytes / 16;
    const auto bind = [&](ChainArgs* args) {
      args->packs = packs;
      for (int k = 0; k < args->inputs; ++k) args->in[k] = inputs.as<Pack>() + k * packs;
      for (int k = 0; k < args->outputs; ++k) args->out[k] = outputs.as<Pack>() + k * packs;
    };
    const auto bytes_of = [&](const ChainArgs& args) {
      return static_cast<double>(bytes) * (args.inputs + args.outputs);
    };
    std::vector<std::string> names;
    std::vector<Contender> all = Copies(*gpu, inputs, copied, 3 * bytes, stream.get());
    const std::vector<int> lengths = {2, 4, 8, 16};
    std::vector<ChainArgs> chains;
    for (const int ops : lengths) {
      chains.push_back(ArithmeticChain(ops));
      bind(&chains.back());
      names.push_back(absl::StrCat("chain of ", ops, " ops", size));
      AddWaves(*gpu, "chain", names.back(), bytes_of(chains.back()), chains.back(), stream.get(),
               &all);
    }
    ChainArgs sgd = SgdChain(kSgdDecay, kSgdMinusRate);
    bind(&sgd);
    names.push_back("SGD with momentum, interpreted" + size);
    AddWaves(*gpu, "chain", names.back(), bytes_of(sgd), sgd, stream.get(), &all);
    SgdArgs fused;
    fused.parameter = sgd.in[0];
    fused.gradient = sgd.in[1];
    fused.momentum = sgd.in[2];
    fused.new_parameter = sgd.out[0];
    fused.new_momentum = sgd.out[1];
    fused.packs = packs;
    fused.decay = kSgdDecay;
    fused.minus_rate = kSgdMinusRate;
    names.push_back("SGD with momentum, by hand" + size);
    AddWaves(*gpu, "sgd", names.back(), bytes_of(sgd), fused, stream.get(), &all);
    CHORUS_RETURN_IF_ERROR(MeasureInTurns(*gpu, stream.get(), &all));
    const double copy = TellCopyRate(&all, "a chain" + size, recorder);
    for (size_t n = 0; n < names.size(); ++n) {
      const double share = TellShare(&all, 2 + 2 * n, names[n], copy, recorder);
      const bool counts =
          bytes >= kLeastJudgedBytes && n < lengths.size() && lengths[n] <= kChainOpsThatCount;
      if (counts) judge.AtLeast(names[n], share, kLeastChainShare, " of the copy rate");
    }
    // What was measured also computes what it should; the last of all wrote by hand.
    for (const ChainArgs& chain : chains) {
      CHORUS_CUDA(gpu->api(), MemsetD8Async, outputs.get(), 0xee, outputs.bytes, stream.get());
      CHORUS_RETURN_IF_ERROR(
          gpu->Launch(gpu->kernel("chain"), chain, gpu->Wave("chain"), stream.get()));
      CHORUS_ASSIGN_OR_RETURN(const int64_t wrong, WrongPacks(*gpu, chain, stream.get()));
      judge.True("a chain" + size + " has the host's bits", wrong == 0);
    }
    CHORUS_CUDA(gpu->api(), MemsetD8Async, outputs.get(), 0xee, outputs.bytes, stream.get());
    CHORUS_RETURN_IF_ERROR(gpu->Launch(gpu->kernel("sgd"), fused, gpu->Wave("sgd"), stream.get()));
    CHORUS_ASSIGN_OR_RETURN(const int64_t wrong, WrongPacks(*gpu, sgd, stream.get()));
    judge.True("SGD by hand" + size + " has the interpreter's bits", wrong == 0);
  }
  recorder->Say("P7", judge.verdict());
  return absl::OkStatus();
}

}  // namespace probe
}  // namespace chorus
