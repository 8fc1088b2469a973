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
// differences. A compiled function gives what the eager one does, bit for bit. Where there is no
// derivative there is none to compare: inputs are not near such points.
using TensorFunction = std::function<Tensor(const std::vector<Tensor>&)>;
void ExpectGradients(const TensorFunction& function, const std::vector<Tensor>& inputs);

// The same at inputs that are told by their elements.
struct Point {
  std::vector<double> values;
  Shape shape;
};
void ExpectGradients(const DeviceRef& device, const std::vector<Point>& inputs,
                     const TensorFunction& function);

}  // namespace testing
}  // namespace chorus

#endif  // CHORUS_CLIENT_TESTING_GRADIENTS_H_
