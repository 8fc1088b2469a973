// Measures several contenders in turns, so that whatever else the machine does meets all of them.
//
// A contender is ours, a floor or a peer. Each may have several settings (Open MPI yields or does
// not); a trial finds the best one, which is measured. Then the contenders alternate, a round each,
// in an order that turns from round to round; all their rounds lie within the same minute.
#ifndef CHORUS_BENCHMARKS_INTERLEAVE_H_
#define CHORUS_BENCHMARKS_INTERLEAVE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "benchmarks/stats.h"

namespace chorus {
namespace bench {

enum class Role {
  kOurs,
  kFloor,  // what the hardware or the kernel takes for the same hand-off or the same bytes
  kPeer,
  kPart,  // a figure to read beside them; nothing is compared with it
};

struct Setting {
  std::string name;  // empty where there is nothing to set
  // Runs that many iterations after a warm-up of its own, checks the results, returns the samples
  // in nanoseconds. An error ends the benchmark.
  std::function<absl::StatusOr<std::vector<double>>(int64_t iterations)> run;
};

struct Contender {
  std::string name;
  Role role = Role::kOurs;
  std::vector<Setting> settings;  // at least one
};

struct InterleaveOptions {
  int rounds = 5;
  // Iterations of a round: as many as fit, within these limits.
  double round_ns = 100e6;
  int64_t least_iterations = 3;
  int64_t most_iterations = 20000;
};

struct Measured {
  std::string name;
  Role role = Role::kOurs;
  std::string setting;                                // the best one
  std::vector<std::pair<std::string, double>> tried;  // each setting's median in the trial, if > 1
  int64_t iterations = 0;                             // of a round
  Summary summary;
};

// In the order of `contenders`.
absl::StatusOr<std::vector<Measured>> MeasureInterleaved(const std::vector<Contender>& contenders,
                                                         const InterleaveOptions& options);

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_INTERLEAVE_H_
