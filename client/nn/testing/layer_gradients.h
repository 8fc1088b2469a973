// Gradients of layers against finite differences, for tests.
//
// Threads: one. Ownership: none is kept. Errors: as failures of the test.
#ifndef CHORUS_CLIENT_NN_TESTING_LAYER_GRADIENTS_H_
#define CHORUS_CLIENT_NN_TESTING_LAYER_GRADIENTS_H_

#include "chorus/chorus.h"
#include "chorus/nn/module.h"

namespace chorus {
namespace nn {
namespace testing {

// For the f64 input and all parameters, which get numbers of their own, to second order
// (client/testing/gradients.h). Buffers are as Init makes them.
void ExpectLayerGradients(Module* layer, const Tensor& x);

}  // namespace testing
}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_TESTING_LAYER_GRADIENTS_H_
