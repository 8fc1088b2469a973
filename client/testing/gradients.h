// Gradients of functions of tensors against finite differences, for tests.
//
// Threads: one. Ownership: none is kept. Errors: as failures of the test.
// Gradients of functions of the SDK, checked against finite differences.
//
// Threads: one. Ownership: copies. Errors: fail the test.
#ifndef CHORUS_CLIENT_TESTING_GRADIENTS_H_
#define CHORUS_CLIENT_TESTING_GRADIENTS_H_

#include <functional>
#include <vector>

#include "chorus/chorus.h"
#include <string>
#include <utility>
#include <vector>

#include "chorus/chorus.h"
#include "client/testing/values.h"
#include "gtest/gtest.h"

namespace chorus {
namespace testing {

// `function` of f64 tensors; each of its results is weighted by numbers of its own and added up,
// and the gradients for all inputs, and those of these again, are compared with central
// differences.
void ExpectGradients(const std::function<Tensor(const std::vector<Tensor>&)>& function,
                     const std::vector<Tensor>& inputs);
struct Point {
  std::vector<double> values;
  Shape shape;
};

// Numbers that depend on the index and are not all alike.
inline Tensor Weights(const Tensor& like, double first) {
  std::vector<double> weights(static_cast<size_t>(like.num_elements()));
  for (size_t i = 0; i < weights.size(); ++i)
    weights[i] = first + 0.25 * static_cast<double>(i % 7);
  return FromHost<double>(like.device(), weights, like.shape());
}

// f(x), a weighted sum of it, that one's gradients; a weighted sum of these, and its gradients.
inline std::vector<Tensor> ToSecondOrder(const std::function<Tensor(const std::vector<Tensor>&)>& f,
                                         const std::vector<Tensor>& x) {
  BackwardOptions create;
  create.create_graph = true;
  const Tensor y = f(x);
  if (!y.status().ok()) return {y};
  const Tensor loss = Sum(y * Weights(y, 0.5));
  const absl::StatusOr<std::vector<Tensor>> first = Grad({loss}, x, create);
  if (!first.ok()) return {FromError(y.device(), first.status())};
  Tensor again = Zeros(y.device(), DType::kF64, {});
  for (size_t i = 0; i < x.size(); ++i) again += Sum((*first)[i] * Weights(x[i], -0.75));
  std::vector<Tensor> all = {y, loss};
  for (const Tensor& g : *first) all.push_back(g);
  all.push_back(again);
  absl::StatusOr<std::vector<Tensor>> second = std::vector<Tensor>();
  if (again.requires_grad()) {
    second = Grad({again}, x);
    if (!second.ok()) return {FromError(y.device(), second.status())};
  } else {
    for (const Tensor& each : x) second->push_back(Zeros(y.device(), DType::kF64, each.shape()));
  }
  for (const Tensor& h : *second) all.push_back(h);
  return all;
}

// f of f64 tensors at `points`: its gradients of both orders are what central differences give, and
// a compiled function gives what the eager one does. Where f has no derivative there is none to
// compare: points are not near such places.
inline void CheckGradients(const DeviceRef& device, const std::vector<Point>& points,
                           const std::function<Tensor(const std::vector<Tensor>&)>& f) {
  const auto leaves = [&](const std::vector<Point>& at) {
    std::vector<Tensor> x;
    for (const Point& point : at) {
      x.push_back(FromHost<double>(device, point.values, point.shape).RequireGrad());
    }
    return x;
  };
  const size_t inputs = points.size();
  const std::vector<Tensor> x = leaves(points);
  const std::vector<Tensor> eager = ToSecondOrder(f, x);
  ASSERT_EQ(eager.size(), 2 * inputs + 3) << eager[0];
  const absl::StatusOr<std::vector<Tensor>> compiled =
      Compile([&f](const std::vector<Tensor>& in) { return ToSecondOrder(f, in); }).Run(x);
  ASSERT_TRUE(compiled.ok()) << compiled.status();
  ASSERT_EQ(compiled->size(), eager.size());
  for (size_t i = 0; i < eager.size(); ++i) {
    EXPECT_EQ((*compiled)[i].shape(), eager[i].shape()) << "result " << i;
    EXPECT_EQ(Values<double>((*compiled)[i]), Values<double>(eager[i])) << "result " << i;
  }
  constexpr double kStep = 1e-4;
  constexpr double kTolerance = 1e-5;
  for (size_t i = 0; i < inputs; ++i) {
    ASSERT_EQ(eager[2 + i].shape(), points[i].shape);
    const std::vector<double> first = Values<double>(eager[2 + i]);
    const std::vector<double> second = Values<double>(eager[3 + inputs + i]);
    for (size_t k = 0; k < points[i].values.size(); ++k) {
      std::vector<double> loss;
      std::vector<double> again;
      for (const double step : {kStep, -kStep}) {
        std::vector<Point> moved = points;
        moved[i].values[k] += step;
        const std::vector<Tensor> there = ToSecondOrder(f, leaves(moved));
        loss.push_back(Values<double>(there[1]).at(0));
        again.push_back(Values<double>(there[2 + inputs]).at(0));
      }
      EXPECT_NEAR(first[k], (loss[0] - loss[1]) / (2 * kStep), kTolerance)
          << "input " << i << ", element " << k << ", first order";
      EXPECT_NEAR(second[k], (again[0] - again[1]) / (2 * kStep), kTolerance)
          << "input " << i << ", element " << k << ", second order";
    }
  }
}

}  // namespace testing
}  // namespace chorus

#endif  // CHORUS_CLIENT_TESTING_GRADIENTS_H_
