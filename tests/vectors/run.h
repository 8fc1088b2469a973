// One session's part in one run of a vector.
#ifndef CHORUS_TESTS_VECTORS_RUN_H_
#define CHORUS_TESTS_VECTORS_RUN_H_

#include <vector>

#include "absl/status/status.h"
#include "tests/vectors/calls.h"
#include "tests/vectors/check.h"
#include "tests/vectors/vector.h"

namespace chorus {
namespace vectors {

// Calls the op, takes its gradients of first and second order as far as `pass` says, and reads all
// results, of the caller's ranks, into `out`, which is by rank. Waits for the other sessions.
absl::Status RunVector(const Vector& v, Pass pass, Caller* caller, std::vector<RankResults>* out);

}  // namespace vectors
}  // namespace chorus

#endif  // CHORUS_TESTS_VECTORS_RUN_H_
