#include "client/testing/gradients.h"

#include <cmath>

#include "client/testing/values.h"
#include "gtest/gtest.h"

namespace chorus {
namespace testing {
namespace {

constexpr double kStep = 1e-4;
constexpr double kTolerance = 2e-6;

// Other numbers for each element, none of them 0.
Tensor Weights(const Tensor& like, int order) {
  std::vector<double> weights;
  for (int64_t i = 0; i < like.num_elements(); ++i) {
    weights.push_back(0.4 + 0.3 * std::sin(1.7 * static_cast<double>(i) + order));
  }
  return FromHost(like.device(), weights, like.shape());
}

std::vector<Tensor> Leaves(const std::vector<Tensor>& inputs) {
  std::vector<Tensor> leaves;
  for (const Tensor& input : inputs) leaves.push_back(input.Detach().RequireGrad());
  return leaves;
}

double ValueAt(const TensorFunction& function, const std::vector<Tensor>& inputs) {
  const std::vector<double> value = Values<double>(function(inputs));
  return value.empty() ? 0 : value[0];
}

// Compares gradients of the number that `function` gives, and gives them as a function in turn.
void Compare(const TensorFunction& function, const std::vector<Tensor>& inputs, int order) {
  const std::vector<Tensor> leaves = Leaves(inputs);
  const auto gradients = Grad({function(leaves)}, leaves);
  ASSERT_TRUE(gradients.ok()) << "order " << order << ": " << gradients.status();
  for (size_t i = 0; i < inputs.size(); ++i) {
    const std::vector<double> got = Values<double>((*gradients)[i]);
    std::vector<double> values = Values<double>(inputs[i]);
    ASSERT_EQ(got.size(), values.size());
    for (size_t e = 0; e < values.size(); ++e) {
      const double value = values[e];
      double at[2];
      for (const int side : {0, 1}) {
        values[e] = value + (side == 0 ? -kStep : kStep);
        std::vector<Tensor> moved = inputs;
        moved[i] = FromHost(inputs[i].device(), values, inputs[i].shape());
        at[side] = ValueAt(function, Leaves(moved));
      }
      values[e] = value;
      const double expected = (at[1] - at[0]) / (2 * kStep);
      EXPECT_NEAR(got[e], expected, kTolerance * (1 + std::abs(expected)))
          << "order " << order << ", input " << i << ", element " << e;
    }
  }
}

}  // namespace

void ExpectGradients(const TensorFunction& function, const std::vector<Tensor>& inputs) {
  const TensorFunction first = [&function](const std::vector<Tensor>& xs) {
    const Tensor y = function(xs);
    return Sum(y * Weights(y, 1));
  };
  const TensorFunction second = [&first](const std::vector<Tensor>& xs) {
    BackwardOptions create;
    create.create_graph = true;
    const auto gradients = Grad({first(xs)}, xs, create);
    EXPECT_TRUE(gradients.ok()) << gradients.status();
    if (!gradients.ok()) return Tensor();
    // Gradients of what is linear have no history of their own.
    Tensor sum = Sum(xs[0] * 0);
    for (size_t i = 0; i < xs.size(); ++i) {
      sum = sum + Sum((*gradients)[i] * Weights(xs[i], 2 + static_cast<int>(i)));
    }
    return sum;
  };
  Compare(first, inputs, 1);
  Compare(second, inputs, 2);

  const auto all = [&](const std::vector<Tensor>& xs) {
    std::vector<Tensor> results = {function(xs)};
    for (const TensorFunction* order : {&first, &second}) {
      absl::StatusOr<std::vector<Tensor>> gradients = Grad({(*order)(xs)}, xs);
      if (!gradients.ok())
        return std::vector<Tensor>{FromError(xs[0].device(), gradients.status())};
      results.insert(results.end(), gradients->begin(), gradients->end());
    }
    return results;
  };
  const std::vector<Tensor> leaves = Leaves(inputs);
  const std::vector<Tensor> eager = all(leaves);
  const absl::StatusOr<std::vector<Tensor>> compiled = Compile(all).Run(leaves);
  ASSERT_TRUE(compiled.ok()) << compiled.status();
  ASSERT_EQ(compiled->size(), eager.size());
  for (size_t i = 0; i < eager.size(); ++i) {
    EXPECT_EQ((*compiled)[i].shape(), eager[i].shape()) << "compiled, result " << i;
    EXPECT_EQ(Values<double>((*compiled)[i]), Values<double>(eager[i])) << "compiled, result " << i;
  }
}

void ExpectGradients(const DeviceRef& device, const std::vector<Point>& inputs,
                     const TensorFunction& function) {
  std::vector<Tensor> tensors;
  for (const Point& point : inputs) tensors.push_back(FromHost(device, point.values, point.shape));
  ExpectGradients(function, tensors);
}

}  // namespace testing
}  // namespace chorus
