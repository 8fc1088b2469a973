// What a row of a benchmark's table is made of: percentiles within a round, medians over rounds.
//
// All times are nanoseconds as doubles. Threads: pure functions.
#ifndef CHORUS_BENCHMARKS_STATS_H_
#define CHORUS_BENCHMARKS_STATS_H_

#include <cstdint>
#include <vector>

namespace chorus {
namespace bench {

// Nearest rank: the smallest sample that at least `fraction` (0..1] of all samples do not exceed.
// A value that was measured, never one between two. `samples` is reordered; not empty.
double Percentile(std::vector<double>* samples, double fraction);

struct RoundStats {
  int64_t count = 0;
  double min = 0;
  double p50 = 0;
  double p99 = 0;
  double max = 0;
};
// Of a round's samples; all zero for none.
RoundStats StatsOf(std::vector<double> samples);

// A contender's rounds together. A round that something else disturbed moves the spread, not the
// medians.
struct Summary {
  double p50 = 0;        // median of the rounds' medians
  double p99 = 0;        // median of the rounds' 99th percentiles
  double p50_least = 0;  // the spread: smallest and largest median of a round
  double p50_most = 0;
  std::vector<RoundStats> rounds;
};
Summary Summarize(std::vector<RoundStats> rounds);

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_STATS_H_
