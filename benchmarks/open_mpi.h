// Open MPI, the peer: ranks under mpirun on this machine, over shared memory.
//
// Its library is loaded when a rank starts, so that benchmarks build and run where it is not
// installed. Tasks of a rank:
//   any op of collective_case.h   on pieces of `bytes`; number 1: then read the rank's whole result
//   gradients                     the sums of tensors of the shapes that `text` lists; number 1
//                                 as above
//   forget                        give the memory back
//   compute                       number rounds of arithmetic, then an all_reduce of `bytes`
#ifndef CHORUS_BENCHMARKS_OPEN_MPI_H_
#define CHORUS_BENCHMARKS_OPEN_MPI_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "benchmarks/helper.h"

namespace chorus {
namespace bench {

class OpenMpi {
 public:
  // A way to run it, of which the better one counts: whether a waiting rank yields.
  struct Setting {
    std::string name;
    std::unique_ptr<HelperGroup> job;
    bool hopeless = false;  // far slower than the other one before: not tried again
  };

  // All ranks of one job, with each setting a job of its own. NOT_FOUND: it is not installed.
  static absl::StatusOr<std::unique_ptr<OpenMpi>> Start(const ScratchDirectory& scratch, int ranks);

  std::vector<Setting>& settings() { return settings_; }
  const std::string& version() const { return version_; }

 private:
  std::vector<Setting> settings_;
  std::string version_;
};

// Helper: one rank, started by mpirun.
int RunOpenMpiHelper(const std::string& control_path);

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_OPEN_MPI_H_
