#include "benchmarks/pattern.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "benchmarks/process.h"

namespace chorus {
namespace bench {
namespace {

constexpr int64_t kPeriod = 251;
using Period = std::array<float, kPeriod>;

absl::Status CheckRepeats(const Period& expected, const float* values, int64_t count) {
  for (int64_t i = 0; i < count; i += kPeriod) {
    const int64_t length = std::min(kPeriod, count - i);
    if (std::memcmp(values + i, expected.data(), length * sizeof(float)) == 0) continue;
    for (int64_t k = 0; k < length; ++k) {
      if (values[i + k] != expected[k]) {
        return absl::DataLossError(
            absl::StrCat("element ", i + k, ": expected ", expected[k], ", got ", values[i + k]));
      }
    }
  }
  return absl::OkStatus();
}

Period PeriodOf(int rank) {
  Period period;
  for (int64_t i = 0; i < kPeriod; ++i) period[i] = PatternValue(rank, i);
  return period;
}

Period SumOf(const std::vector<int>& ranks) {
  Period sum{};
  for (const int rank : ranks) {
    const Period one = PeriodOf(rank);
    for (int64_t i = 0; i < kPeriod; ++i) sum[i] += one[i];
  }
  return sum;
}

std::vector<int> AllRanks(int ranks) {
  std::vector<int> all(static_cast<size_t>(ranks));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

}  // namespace

float PatternValue(int rank, int64_t i) {
  return static_cast<float>((i % kPeriod) * (rank + 3) % 61 + rank + 1);
}

void FillPattern(int rank, float* to, int64_t count) {
  const Period period = PeriodOf(rank);
  for (int64_t i = 0; i < count; i += kPeriod) {
    std::copy_n(period.begin(), std::min(kPeriod, count - i), to + i);
  }
}

absl::Status CheckPattern(int rank, const float* values, int64_t count) {
  return CheckRepeats(PeriodOf(rank), values, count);
}

absl::Status CheckPatternSum(int ranks, const float* values, int64_t count) {
  return CheckPatternSumOf(AllRanks(ranks), values, count);
}

absl::Status CheckPatternMean(int ranks, const float* values, int64_t count) {
  Period expected = SumOf(AllRanks(ranks));
  for (float& value : expected) value /= static_cast<float>(ranks);
  return CheckRepeats(expected, values, count);
}

absl::Status CheckPatternSumOf(const std::vector<int>& ranks, const float* values, int64_t count) {
  return CheckRepeats(SumOf(ranks), values, count);
}

uint64_t ReadAll(const void* data, int64_t bytes) {
  // Two 16 B additions a cycle are more than any memory delivers.
  typedef uint64_t Lanes __attribute__((vector_size(16)));
  const Lanes* const lanes = static_cast<const Lanes*>(data);
  Lanes sums[4] = {};
  for (int64_t i = 0; i < bytes / 64; ++i) {
    for (int k = 0; k < 4; ++k) sums[k] += lanes[i * 4 + k];
  }
  const Lanes all = sums[0] + sums[1] + sums[2] + sums[3];
  uint64_t sum = all[0] + all[1];
  const unsigned char* const rest = static_cast<const unsigned char*>(data);
  for (int64_t i = bytes / 64 * 64; i < bytes; ++i) sum = sum * 31 + rest[i];
  return sum;
}

uint64_t Compute(int64_t rounds) {
  uint64_t state = 1;
  for (int64_t i = 0; i < rounds; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    asm volatile("" : "+r"(state));  // no two rounds become one
  }
  return state;
}

int64_t ComputeRoundsFor(int64_t nanos) {
  int64_t rounds = 1000;
  while (true) {
    // The least of several: what something else interrupted took longer.
    int64_t least = INT64_MAX;
    for (int i = 0; i < 5; ++i) {
      const int64_t before = NowNanos();
      Compute(rounds);
      least = std::min(least, NowNanos() - before);
    }
    if (least >= nanos / 2) return rounds * nanos / least;
    rounds *= 2;
  }
}

}  // namespace bench
}  // namespace chorus
