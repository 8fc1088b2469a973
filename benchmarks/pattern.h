// The numbers that the ranks reduce, and what must come out.
//
// They depend on rank and index, so a swapped chunk or a missing rank shows; they are small whole
// numbers, so sums are exact; they repeat with a prime period, so checking 256 MiB takes no longer
// than reading them.
#ifndef CHORUS_BENCHMARKS_PATTERN_H_
#define CHORUS_BENCHMARKS_PATTERN_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"

namespace chorus {
namespace bench {

// The element at `i` of a rank's operand.
float PatternValue(int rank, int64_t i);
void FillPattern(int rank, float* to, int64_t count);
// DATA_LOSS naming the first element that is not the rank's, or not the sum or the mean of all
// `ranks` ranks'.
absl::Status CheckPattern(int rank, const float* values, int64_t count);
absl::Status CheckPatternSum(int ranks, const float* values, int64_t count);
absl::Status CheckPatternMean(int ranks, const float* values, int64_t count);
// Or the sum of those `ranks`.
absl::Status CheckPatternSumOf(const std::vector<int>& ranks, const float* values, int64_t count);

// Reads every byte and returns something that depends on all of them.
uint64_t ReadAll(const void* data, int64_t bytes);

// `rounds` dependent steps of arithmetic in registers; depends on all of them.
uint64_t Compute(int64_t rounds);
// How many rounds take `nanos` of processor time on this machine, now.
int64_t ComputeRoundsFor(int64_t nanos);

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_PATTERN_H_
