// What the memory traffic of a reduction takes: every input read once, one output written, or one
// for each input; by as many threads as there are cores, in one process, with no hand-off in it.
// The memory is a memfd's, like the daemon's.
#ifndef CHORUS_BENCHMARKS_MEMORY_FLOOR_H_
#define CHORUS_BENCHMARKS_MEMORY_FLOOR_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "benchmarks/helper.h"
#include "benchmarks/interleave.h"

namespace chorus {
namespace bench {

class MemoryFloor {
 public:
  static absl::StatusOr<std::unique_ptr<MemoryFloor>> Start(const ScratchDirectory& scratch);
  // A contender that reads `inputs` times `bytes` and writes `outputs` (1 or `inputs`) times as
  // many. Its settings: threads x kernels, the best of which counts. Lives no longer than this.
  Contender AsContender(int inputs, int outputs, int64_t bytes) const;
  // Gives the memory back to the system.
  absl::Status Forget();

 private:
  std::unique_ptr<HelperGroup> helper_;
};

int RunMemoryFloorHelper(const std::string& control_path);

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_MEMORY_FLOOR_H_
