// Gradients of functions of tensors against finite differences, for tests.
//
// Threads: one. Ownership: none is kept. Errors: as failures of the test.
#ifndef CHORUS_CLIENT_TESTING_GRADIENTS_H_
#define CHORUS_CLIENT_TESTING_GRADIENTS_H_

#include <functional>
#include <vector>

#include "chorus/chorus.h"

namespace chorus {
namespace testing {

// `function` of f64 tensors; each of its results is weighted by numbers of its own and added up,
// and the gradients for all inputs, and those of these again, are compared with central
// differences.
void ExpectGradients(const std::function<Tensor(const std::vector<Tensor>&)>& function,
                     const std::vector<Tensor>& inputs);

}  // namespace testing
}  // namespace chorus

#endif  // CHORUS_CLIENT_TESTING_GRADIENTS_H_
