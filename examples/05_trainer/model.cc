#include "examples/05_trainer/model.h"

#include <cmath>
#include <random>
#include <utility>

#include "chorus/functional/math.h"
#include "chorus/functional/nn.h"
#include "core/base/error.h"

namespace trainer {
namespace {

using chorus::DType;
using chorus::Tensor;
using Tensors = std::vector<Tensor>;

// Logits [batch, classes] of images [batch, pixels] of bytes.
Tensor Forward(const Tensors& parameters, const Tensor& images) {
  const Tensor x = chorus::Cast(images, DType::kF32) * (1.0 / 255);
  const Tensor hidden = chorus::Relu(chorus::MatMul(x, parameters[0]) + parameters[1]);
  return chorus::MatMul(hidden, parameters[2]) + parameters[3];
}

// Inputs: the state; images, labels; learning rate, 1 / images of all ranks. Results: the new
// state; the loss.
Tensors StepFunction(const chorus::World& world, float momentum, const Tensors& in) {
  // Differentiation begins at this step's parameters, not at what they were computed from.
  Tensors parameters;
  for (size_t i = 0; i < kParameters; ++i) parameters.push_back(in[i].Detach().RequireGrad());
  const Tensor& images = in[2 * kParameters];
  const Tensor& labels = in[2 * kParameters + 1];
  const Tensor& learning_rate = in[2 * kParameters + 2];
  const Tensor& share = in[2 * kParameters + 3];
  // What is differentiated is the sum of all ranks' losses, so each counts its images only.
  const Tensor loss =
      chorus::Sum(chorus::CrossEntropy(Forward(parameters, images), labels)) * share;
  const absl::StatusOr<Tensors> gradients = chorus::Grad({loss}, parameters);
  if (!gradients.ok()) return {chorus::FromError(world, gradients.status())};
  Tensors next(2 * kParameters);
  for (size_t i = 0; i < kParameters; ++i) {
    // Every rank has the same sum, so every rank does the same update: a node does it once.
    const Tensor velocity =
        in[kParameters + i] * momentum + chorus::AllReduce((*gradients)[i], world);
    next[i] = in[i] - velocity * learning_rate;
    next[kParameters + i] = velocity;
  }
  next.push_back(chorus::AllReduce(loss.Detach(), world));
  return next;
}

// Inputs: parameters; images, labels. Result: how many are right, on all ranks.
Tensors CountFunction(const chorus::World& world, const Tensors& in) {
  const chorus::NoGrad no_grad;
  const Tensor classes = chorus::ArgMax(Forward(in, in[kParameters]));
  const Tensor right = chorus::Equal(classes, chorus::Cast(in[kParameters + 1], DType::kI64));
  return {chorus::AllReduce(chorus::Sum(chorus::Cast(right, DType::kI64)), world)};
}

// The state is replaced; the images behind it, and their labels, may be fewer in a last batch.
chorus::CompileOptions StepOptions(int64_t max_batch) {
  constexpr int kState = 2 * static_cast<int>(kParameters);
  chorus::CompileOptions options;
  for (int i = 0; i < kState; ++i) options.donate.push_back(i);
  options.varying = {kState, kState + 1};
  options.max_size = max_batch;
  return options;
}

chorus::CompileOptions CountOptions(int64_t max_batch) {
  chorus::CompileOptions options;
  options.varying = {static_cast<int>(kParameters), static_cast<int>(kParameters) + 1};
  options.max_size = max_batch;
  return options;
}

// Images and labels of a batch, as tensors on the daemon.
void AddBatch(const chorus::World& world, const Batch& batch, int64_t pixels, Tensors* inputs) {
  inputs->push_back(chorus::FromHost(world, batch.images, {batch.size, pixels}));
  inputs->push_back(chorus::FromHost(world, batch.labels, {batch.size}));
}

}  // namespace

absl::StatusOr<State> InitialState(const chorus::World& world, const ModelShape& shape,
                                   uint64_t seed) {
  const chorus::NoGrad no_grad;
  const chorus::Shape shapes[kParameters] = {
      {shape.pixels, shape.hidden}, {shape.hidden}, {shape.hidden, shape.classes}, {shape.classes}};
  std::mt19937_64 random(seed);
  State state;
  for (const chorus::Shape& dims : shapes) {
    int64_t size = 1;
    for (const int64_t d : dims) size *= d;
    std::vector<float> values(static_cast<size_t>(size), 0.0f);
    if (dims.size() == 2) {
      // He et al. 2015: the variance of what relu lets through stays 1.
      const double bound = std::sqrt(6.0 / static_cast<double>(dims[0]));
      for (float& value : values) {
        const double unit = static_cast<double>(random() >> 11) * 0x1p-53;
        value = static_cast<float>((2 * unit - 1) * bound);
      }
    }
    state.push_back(chorus::Broadcast(chorus::FromHost(world, values, dims), 0, world));
  }
  for (const chorus::Shape& dims : shapes) {
    state.push_back(chorus::Broadcast(chorus::Zeros(world, DType::kF32, dims), 0, world));
  }
  for (const Tensor& tensor : state) CHORUS_RETURN_IF_ERROR(tensor.Wait());
  return state;
}

Trainer::Trainer(const chorus::World& world, const ModelShape& shape, float momentum,
                 int64_t max_batch)
    : world_(world),
      shape_(shape),
      step_(chorus::Compile(
          [world, momentum](const Tensors& in) { return StepFunction(world, momentum, in); },
          StepOptions(max_batch))),
      count_(chorus::Compile([world](const Tensors& in) { return CountFunction(world, in); },
                             CountOptions(max_batch))) {}

absl::StatusOr<Tensor> Trainer::Step(const Batch& batch, int64_t global_size, float learning_rate,
                                     State* state) {
  Tensors inputs = *state;
  AddBatch(world_, batch, shape_.pixels, &inputs);
  inputs.push_back(chorus::Scalar<float>(world_, learning_rate));
  inputs.push_back(chorus::Scalar<float>(world_, 1.0f / static_cast<float>(global_size)));
  CHORUS_ASSIGN_OR_RETURN(Tensors results, step_.Run(inputs));
  const Tensor loss = results.back();
  results.pop_back();
  *state = std::move(results);
  return loss;
}

absl::StatusOr<Tensor> Trainer::CountRight(const Batch& batch, const State& state) {
  Tensors inputs(state.begin(), state.begin() + kParameters);
  AddBatch(world_, batch, shape_.pixels, &inputs);
  CHORUS_ASSIGN_OR_RETURN(Tensors results, count_.Run(inputs));
  return results[0];
}

}  // namespace trainer
