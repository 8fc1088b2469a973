// A process that keeps processors busy, and speaks to nobody.
#ifndef CHORUS_BENCHMARKS_BURNER_H_
#define CHORUS_BENCHMARKS_BURNER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "benchmarks/process.h"

namespace chorus {
namespace bench {

struct Burn {
  double part = 0;        // of the time, 0 to 1
  int64_t period_ns = 0;  // in each of which the thread sleeps once
};

// A thread for each.
absl::StatusOr<Process> StartBurner(const std::vector<Burn>& burns);

// `burns` is what StartBurner() passes: "PART/PERIOD" for each.
int RunBurnerHelper(const std::vector<std::string>& burns);

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_BURNER_H_
