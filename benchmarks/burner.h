// A process that keeps processors busy, and speaks to nobody.
#ifndef CHORUS_BENCHMARKS_BURNER_H_
#define CHORUS_BENCHMARKS_BURNER_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "benchmarks/process.h"

namespace chorus {
namespace bench {

// A thread for each of `busy`, which is busy for that part of each 20 ms, 0 to 1.
absl::StatusOr<Process> StartBurner(const std::vector<double>& busy);

int RunBurnerHelper(const std::vector<std::string>& busy);

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_BURNER_H_
