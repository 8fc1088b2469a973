// The flags of what runs vectors: --transport, --backend, --sim_seed, --daemon.
#ifndef CHORUS_TESTS_VECTORS_FLAGS_H_
#define CHORUS_TESTS_VECTORS_FLAGS_H_

#include "absl/status/statusor.h"
#include "tests/vectors/runner.h"

namespace chorus {
namespace vectors {

// INVALID_ARGUMENT: a transport that there is not.
absl::StatusOr<RunnerOptions> OptionsFromFlags();

}  // namespace vectors
}  // namespace chorus

#endif  // CHORUS_TESTS_VECTORS_FLAGS_H_
