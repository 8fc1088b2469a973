#include "benchmarks/memory_traffic.h"

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "benchmarks/pattern.h"
#include "core/backend/reduction.h"
#include "core/base/error.h"
#include "core/base/thread_pool.h"
#include "core/base/unique_fd.h"

namespace chorus {
namespace bench {
namespace {

// Threads take chunks of this many elements in turns, so that a thread that is interrupted does not
// keep the others waiting for a whole half.
constexpr int64_t kChunk = 64 * 1024;
// Elements that stay in the first cache on their way to several outputs.
constexpr int64_t kTile = 4 * 1024;

using SumFunction = ReduceFunction;

#if defined(__x86_64__)
// Independent of core's kernels, so that a weakness of theirs does not become the floor: the number
// of inputs is a constant, and the next lines are asked for ahead of time.
template <int kInputs>
__attribute__((target("avx2"))) void SumPrefetched(const void* const* inputs, void* output,
                                                   int64_t begin, int64_t end, bool streaming) {
  constexpr int64_t kAhead = 512;  // elements
  const float* from[kInputs];
  for (int k = 0; k < kInputs; ++k) from[k] = static_cast<const float*>(inputs[k]);
  float* const to = static_cast<float*>(output);
  int64_t i = begin;
  for (; i + 32 <= end; i += 32) {
    __m256 sums[4];
    for (int v = 0; v < 4; ++v) sums[v] = _mm256_loadu_ps(from[0] + i + 8 * v);
    for (int k = 1; k < kInputs; ++k) {
      for (int v = 0; v < 4; ++v) {
        sums[v] = _mm256_add_ps(sums[v], _mm256_loadu_ps(from[k] + i + 8 * v));
      }
    }
    for (int k = 0; k < kInputs; ++k) {
      _mm_prefetch(reinterpret_cast<const char*>(from[k] + i + kAhead), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(from[k] + i + kAhead + 16), _MM_HINT_T0);
    }
    if (streaming) {
      for (int v = 0; v < 4; ++v) _mm256_stream_ps(to + i + 8 * v, sums[v]);
    } else {
      for (int v = 0; v < 4; ++v) _mm256_storeu_ps(to + i + 8 * v, sums[v]);
    }
  }
  for (; i < end; ++i) {
    float sum = from[0][i];
    for (int k = 1; k < kInputs; ++k) sum += from[k][i];
    to[i] = sum;
  }
  if (streaming) _mm_sfence();
}

void SumByPrefetch(const ReducePass& pass, int64_t begin, int64_t end, bool streaming) {
  switch (pass.num_inputs) {
    case 2:
      return SumPrefetched<2>(pass.inputs, pass.output, begin, end, streaming);
    case 4:
      return SumPrefetched<4>(pass.inputs, pass.output, begin, end, streaming);
    case 8:
      return SumPrefetched<8>(pass.inputs, pass.output, begin, end, streaming);
    default:
      return FindReduction(Reduction::kSum, DType::kF32)(pass, begin, end, streaming);
  }
}
bool CanPrefetch() { return __builtin_cpu_supports("avx2") != 0; }
#else
const SumFunction SumByPrefetch = nullptr;
bool CanPrefetch() { return false; }
#endif

void MoveRange(const Traffic& traffic, const TrafficVariant& variant, int64_t begin, int64_t end) {
  const SumFunction sum =
      variant.prefetch ? SumByPrefetch : FindReduction(Reduction::kSum, DType::kF32);
  const int count = static_cast<int>(traffic.inputs.size());
  const void* inputs[Traffic::kMostInputs];
  std::copy(traffic.inputs.begin(), traffic.inputs.end(), inputs);
  const ReductionTree tree = ReductionTree::Whole(count);
  ReducePass pass;
  pass.inputs = inputs;
  pass.num_inputs = count;
  pass.steps = tree.steps();
  if (traffic.outputs.size() == 1) {
    pass.output = traffic.outputs[0];
    sum(pass, begin, end, variant.streaming);
    return;
  }
  alignas(64) float tile[kTile];
  pass.output = tile;
  for (int64_t at = begin; at < end; at += kTile) {
    const int64_t length = std::min(kTile, end - at);
    for (int k = 0; k < count; ++k) inputs[k] = traffic.inputs[k] + at;
    sum(pass, 0, length, false);
    for (float* const output : traffic.outputs) {
      CopyBytes(output + at, tile, length * sizeof(float), variant.streaming);
    }
  }
}

int64_t WholePages(int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

}  // namespace

std::string TrafficVariant::Encode() const {
  return absl::StrCat(threads, " ", streaming ? 1 : 0, " ", prefetch ? 1 : 0);
}

TrafficVariant TrafficVariant::Decode(absl::string_view text) {
  const std::vector<std::string> words = absl::StrSplit(text, ' ');
  TrafficVariant variant;
  if (words.size() != 3 || !absl::SimpleAtoi(words[0], &variant.threads)) return TrafficVariant();
  variant.streaming = words[1] == "1";
  variant.prefetch = words[2] == "1";
  return variant;
}

absl::Status TrafficMemory::Reserve(int inputs, int outputs, int64_t bytes) {
  const int64_t total = (inputs + outputs) * WholePages(bytes);
  if (inputs != inputs_ || outputs != outputs_ || bytes != bytes_) {
    Release();
    const UniqueFd fd(memfd_create("chorus-bench", MFD_CLOEXEC));
    if (!fd.valid() || ftruncate(fd.get(), total) != 0) {
      return absl::ResourceExhaustedError(absl::StrCat("no memory of ", total, " bytes"));
    }
    void* const data = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    if (data == MAP_FAILED) {
      return absl::ResourceExhaustedError(absl::StrCat("cannot map ", total, " bytes"));
    }
    data_ = static_cast<char*>(data);
    total_ = total;
    inputs_ = inputs;
    outputs_ = outputs;
    bytes_ = bytes;
    for (int k = 0; k < inputs; ++k) FillPattern(k, Part(k), count());
  }
  for (int k = 0; k < outputs; ++k) std::memset(Part(inputs + k), 0xff, bytes);
  return absl::OkStatus();
}

void TrafficMemory::Release() {
  if (data_ != nullptr) munmap(data_, total_);
  data_ = nullptr;
  inputs_ = outputs_ = 0;
  bytes_ = 0;
}

Traffic TrafficMemory::AsTraffic() const {
  Traffic traffic;
  for (int k = 0; k < inputs_; ++k) traffic.inputs.push_back(Part(k));
  for (int k = 0; k < outputs_; ++k) traffic.outputs.push_back(Part(inputs_ + k));
  traffic.count = count();
  return traffic;
}

absl::Status TrafficMemory::CheckOutputs() const {
  for (int k = 0; k < outputs_; ++k) {
    CHORUS_RETURN_IF_ERROR(CheckPatternSum(inputs_, Part(inputs_ + k), count()));
  }
  return absl::OkStatus();
}

float* TrafficMemory::Part(int k) const {
  return reinterpret_cast<float*>(data_ + k * WholePages(bytes_));
}

std::string TrafficVariant::Name() const {
  return absl::StrCat(threads, threads == 1 ? " thread, " : " threads, ",
                      streaming ? "streaming" : "cached", prefetch ? ", prefetch" : "");
}

std::vector<TrafficVariant> AllTrafficVariants() {
  std::vector<int> thread_counts = {1};
  if (UsableCpus() > 1) thread_counts.push_back(UsableCpus());
  std::vector<TrafficVariant> variants;
  for (const int threads : thread_counts) {
    for (const bool streaming : {false, true}) {
      variants.push_back({threads, streaming, false});
      if (CanPrefetch()) variants.push_back({threads, streaming, true});
    }
  }
  return variants;
}

TrafficTeam::TrafficTeam(Traffic traffic, const TrafficVariant& variant)
    : traffic_(std::move(traffic)), outputs_(traffic_.outputs), variant_(variant) {
  for (int i = 1; i < variant.threads; ++i) threads_.emplace_back([this] { Work(); });
}

TrafficTeam::~TrafficTeam() {
  stopping_.store(true);
  turn_.fetch_add(1, std::memory_order_release);
  for (std::thread& thread : threads_) thread.join();
}

void TrafficTeam::Work() {
  uint64_t turn = 0;
  while (true) {
    while (turn_.load(std::memory_order_acquire) == turn) sched_yield();
    ++turn;
    if (stopping_.load()) return;
    MoveChunks();
    done_.fetch_add(1, std::memory_order_release);
  }
}

void TrafficTeam::Move() {
  if (traffic_.in_turn) traffic_.outputs = {outputs_[moves_++ % outputs_.size()]};
  if (threads_.empty()) {
    MoveRange(traffic_, variant_, 0, traffic_.count);
    return;
  }
  next_.store(0);
  done_.store(0);
  turn_.fetch_add(1, std::memory_order_release);
  MoveChunks();
  while (done_.load(std::memory_order_acquire) != threads_.size()) sched_yield();
}

void TrafficTeam::MoveChunks() {
  // Small sizes are split evenly all the same.
  const int64_t share = traffic_.count / (4 * variant_.threads) / 64 * 64;
  const int64_t chunk = std::max<int64_t>(64, std::min(kChunk, share));
  while (true) {
    const int64_t begin = next_.fetch_add(chunk, std::memory_order_relaxed);
    if (begin >= traffic_.count) return;
    MoveRange(traffic_, variant_, begin, std::min(begin + chunk, traffic_.count));
  }
}

}  // namespace bench
}  // namespace chorus
