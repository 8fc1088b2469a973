// The public vectors as a test, a case for each op.
#ifndef CHORUS_TESTS_VECTORS_PUBLIC_VECTORS_H_
#define CHORUS_TESTS_VECTORS_PUBLIC_VECTORS_H_

#include "tests/vectors/runner.h"

namespace chorus {
namespace vectors {

// Runs the cases, for a main which has initialised GoogleTest; what main returns. The vectors are
// those of tests/vectors/public under the working directory.
int RunPublicVectors(const RunnerOptions& options);

}  // namespace vectors
}  // namespace chorus

#endif  // CHORUS_TESTS_VECTORS_PUBLIC_VECTORS_H_
