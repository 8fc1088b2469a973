// The loop that every helper measures with, so that all contenders are measured alike.
#ifndef CHORUS_BENCHMARKS_TIMED_LOOP_H_
#define CHORUS_BENCHMARKS_TIMED_LOOP_H_

#include "benchmarks/helper.h"

namespace chorus {
namespace bench {

// Calls `step()`, which returns an absl::Status, task.warm_up + task.iterations times; each of the
// latter is a sample. The first error ends the loop and is the outcome's.
template <typename Step>
Outcome TimedLoop(const Task& task, const Step& step) {
  Outcome outcome;
  for (int64_t i = 0; i < task.warm_up; ++i) {
    outcome.status = step();
    if (!outcome.status.ok()) return outcome;
  }
  outcome.samples.reserve(static_cast<size_t>(task.iterations));
  const int64_t cpu_before = CpuNanos();
  outcome.start_ns = NowNanos();
  int64_t before = outcome.start_ns;
  for (int64_t i = 0; i < task.iterations; ++i) {
    outcome.status = step();
    if (!outcome.status.ok()) return outcome;
    const int64_t now = NowNanos();
    outcome.samples.push_back(static_cast<double>(now - before));
    before = now;
  }
  outcome.end_ns = before;
  outcome.cpu_ns = CpuNanos() - cpu_before;
  return outcome;
}

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_TIMED_LOOP_H_
