// Checks gradient rules against numbers, over simulated ranks, to second order.
//
// Threads: thread-compatible; each check runs in the thread that calls it. Ownership: plain values.
// Errors: fail the test.
#ifndef CHORUS_CORE_AUTOGRAD_TESTING_GRADIENT_CHECK_H_
#define CHORUS_CORE_AUTOGRAD_TESTING_GRADIENT_CHECK_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/strings/string_view.h"
#include "core/graph/graph.h"
#include "core/ops/op.h"
#include "core/ops/testing/rank_builder.h"
#include "core/ops/testing/value.h"
#include "core/tensor/type.h"

namespace chorus {
namespace testing {

// What each rank computes: from its own `inputs` to the values that its loss depends on. Ranks may
// compute different things.
using RankBody =
    std::function<std::vector<ValueIndex>(RankBuilder& b, const std::vector<ValueIndex>& inputs)>;

// With loss L = sum over ranks of <u, outputs> for random u, and S = sum over ranks of
// <v, dL/dinputs> for random v, expects that along random directions
//   first order:  the derivative of L by the inputs, and
//   second order: the derivative of S by the inputs and by u
// equal central differences. For f64 inputs.
void CheckGradients(int32_t ranks, const std::vector<TensorType>& inputs, const RankBody& body);

// The same where `adjust` has changed the values that were drawn for one rank's inputs: to reach
// the points where a rule is easily wrong.
using Adjust = std::function<void(int32_t rank, std::vector<Value>* inputs)>;
void CheckGradients(int32_t ranks, const std::vector<TensorType>& inputs, const RankBody& body,
                    const Adjust& adjust);

// For what is linear in its inputs: the adjoint identity <A x, u> = <x, At u>, summed over ranks,
// exactly, on whole numbers; and the same of the gradient, as a linear map of u. Any floating
// dtype.
void CheckAdjoint(int32_t ranks, const std::vector<TensorType>& inputs, const RankBody& body);

// One rank of a backward pass with given values.
struct RankCase {
  std::vector<Value> inputs;
  // Of the outputs, in their order; empty: zeros.
  std::vector<Value> grads;
  // Whether it records for backward at all, and whether it takes part in it then.
  bool wants_grad = true;
  bool takes_part = true;
};
struct RankResult {
  std::vector<Value> outputs;
  std::vector<Value> gradients;  // of the inputs, zeros where none reaches; empty: takes no part
};
// Empty when something failed, which fails the test.
std::vector<RankResult> RunBackward(const std::vector<RankCase>& ranks, const RankBody& body);

// That a rank which abandons its tape entry, or never had one, counts as one whose gradients are
// zeros: for each rank in turn.
void CheckAbandoned(int32_t ranks, const std::vector<TensorType>& inputs, const RankBody& body);

// The types that a node is given, as "f32[2,3] f32[2]", or the text of the error. `group_size` and
// `collective` are for collective ops.
std::string InferText(absl::string_view op, const std::vector<TensorType>& inputs,
                      const Attributes& attributes = {}, const Collective* collective = nullptr,
                      int32_t group_size = 0);

}  // namespace testing
}  // namespace chorus

#endif  // CHORUS_CORE_AUTOGRAD_TESTING_GRADIENT_CHECK_H_
