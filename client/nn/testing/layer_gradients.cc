#include "client/nn/testing/layer_gradients.h"

#include <vector>

#include "client/testing/gradients.h"
#include "client/testing/values.h"
#include "gtest/gtest.h"

namespace chorus {
namespace nn {
namespace testing {

void ExpectLayerGradients(Module* layer, const Tensor& x) {
  ASSERT_TRUE(layer->Init(x.device(), 3, DType::kF64).ok());
  std::vector<Tensor> inputs = {x};
  int seed = 10;
  for (const Variable& variable : layer->parameters()) {
    inputs.push_back(chorus::testing::Numbers(x.device(), variable.shape(), ++seed));
  }
  chorus::testing::ExpectGradients(
      [layer](const std::vector<Tensor>& in) {
        std::vector<Tensor> state;
        size_t next = 1;
        for (const Variable& variable : layer->variables()) {
          state.push_back(variable.is_parameter() ? in[next++] : variable());
        }
        const StateScope scope(*layer, state);
        return (*layer)(in[0]);
      },
      inputs);
}

}  // namespace testing
}  // namespace nn
}  // namespace chorus
