// One rank's part in one run of a vector.
#ifndef CHORUS_TESTS_VECTORS_RANK_RUN_H_
#define CHORUS_TESTS_VECTORS_RANK_RUN_H_

#include "absl/status/status.h"
#include "client/chorus.h"
#include "tests/vectors/check.h"
#include "tests/vectors/vector.h"

namespace chorus {
namespace vectors {

// Calls the op, takes its gradients of first and second order as far as `pass` says, and reads all
// results. Waits for the other ranks.
absl::Status RunRank(const Vector& v, int rank, Pass pass, const Group& group,
                     const DeviceRef& device, RankResults* out);

}  // namespace vectors
}  // namespace chorus

#endif  // CHORUS_TESTS_VECTORS_RANK_RUN_H_
