#include "benchmarks/stats.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace chorus {
namespace bench {

double Percentile(std::vector<double>* samples, double fraction) {
  const double rank = std::ceil(fraction * static_cast<double>(samples->size()));
  const size_t index = rank < 1 ? 0 : std::min(static_cast<size_t>(rank), samples->size()) - 1;
  std::nth_element(samples->begin(), samples->begin() + index, samples->end());
  return (*samples)[index];
}

RoundStats StatsOf(std::vector<double> samples) {
  RoundStats stats;
  if (samples.empty()) return stats;
  stats.count = static_cast<int64_t>(samples.size());
  const auto ends = std::minmax_element(samples.begin(), samples.end());
  stats.min = *ends.first;
  stats.max = *ends.second;
  stats.p50 = Percentile(&samples, 0.5);
  stats.p99 = Percentile(&samples, 0.99);
  return stats;
}

Summary Summarize(std::vector<RoundStats> rounds) {
  Summary summary;
  summary.rounds = std::move(rounds);
  if (summary.rounds.empty()) return summary;
  std::vector<double> p50s;
  std::vector<double> p99s;
  for (const RoundStats& round : summary.rounds) {
    p50s.push_back(round.p50);
    p99s.push_back(round.p99);
  }
  const auto ends = std::minmax_element(p50s.begin(), p50s.end());
  summary.p50_least = *ends.first;
  summary.p50_most = *ends.second;
  summary.p50 = Percentile(&p50s, 0.5);
  summary.p99 = Percentile(&p99s, 0.5);
  return summary;
}

}  // namespace bench
}  // namespace chorus
