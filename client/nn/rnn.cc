#include "chorus/nn/rnn.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "chorus/functional/math.h"
#include "chorus/functional/op.h"
#include "chorus/functional/shape.h"
#include "chorus/math.h"
#include "chorus/nn/init.h"
#include "chorus/nn/layers.h"
#include "client/internal/local.h"
#include "core/base/error.h"

namespace chorus {
namespace nn {
namespace {

using internal::IsUsable;
using internal::TypeText;
using parallel::Nest;

// x W^T + b of matrices.
Tensor Project(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const Tensor y = Op("matmul", {x, weight}, {{"transpose_b", int64_t{1}}});
  return bias.defined() ? y + bias : y;
}

}  // namespace

Recurrent::Recurrent(std::string kind, int64_t gates, bool has_cell, int64_t in, int64_t hidden,
                     const RnnOptions& options)
    : Module(std::move(kind)),
      gates_(gates),
      has_cell_(has_cell),
      in_(in),
      hidden_(hidden),
      options_(options) {
  if (in < 1 || hidden < 1 || options.layers < 1) {
    RefuseAll(absl::StrCat("expected sizes and layers from 1, got in=", in, ", hidden=", hidden,
                           ", layers=", options.layers));
    return;
  }
  if (!(options.dropout >= 0 && options.dropout <= 1)) {
    RefuseAll(absl::StrCat("expected a probability, got ", options.dropout));
  }
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    const int64_t width = layer == 0 ? in : hidden * static_cast<int64_t>(directions());
    for (size_t d = 0; d < directions(); ++d) {
      const std::string suffix = absl::StrCat("_l", layer, d == 0 ? "" : "_reverse");
      const auto add = [&](const std::string& name, const Shape& shape) {
        return AddParameter(name + suffix, shape, init::FanInUniform(hidden));
      };
      Direction part;
      part.weight_ih = add("weight_ih", {gates * hidden, width});
      part.weight_hh = add("weight_hh", {gates * hidden, hidden});
      if (options.bias) {
        part.bias_ih = add("bias_ih", {gates * hidden});
        part.bias_hh = add("bias_hh", {gates * hidden});
      }
      parts_.push_back(part);
    }
  }
}

std::vector<Tensor> Recurrent::Unroll(const Tensor& x, const Direction& direction, bool backwards,
                                      State* state) const {
  const int64_t steps = x.shape()[0];
  const int64_t batch = x.shape()[1];
  const Tensor projected = Reshape(Project(Reshape(x, {steps * batch, x.shape()[2]}),
                                           direction.weight_ih(), direction.bias_ih()),
                                   {steps, batch, gates_ * hidden_});
  const Tensor weight = direction.weight_hh();
  const Tensor bias = direction.bias_hh();
  std::vector<Tensor> inputs = Split(projected, 1);
  inputs.resize(static_cast<size_t>(steps), inputs[0]);  // of one that has failed there is one
  std::vector<Tensor> outputs(static_cast<size_t>(steps));
  for (int64_t i = 0; i < steps; ++i) {
    const int64_t step = backwards ? steps - 1 - i : i;
    const Tensor at = Reshape(inputs[static_cast<size_t>(step)], {batch, gates_ * hidden_});
    *state = Step(at, *state, weight, bias);
    outputs[static_cast<size_t>(step)] = state->hidden;
  }
  return outputs;
}

RnnResult Recurrent::Run(const Tensor& x, const Tensor& hidden, const Tensor& cell) {
  const auto fail = [](const Tensor& error) { return RnnResult{error, error, error}; };
  if (!IsUsable(x)) return fail(x * 1);
  if (x.shape().size() != 3 || x.shape()[2] != in_ || x.shape()[options_.batch_first ? 1 : 0] < 1) {
    return fail(Refuse(
        x, absl::StrCat("expected [", options_.batch_first ? "batch, steps, " : "steps, batch, ",
                        in_, "] with a step at least, got ", TypeText(x))));
  }
  Tensor y = options_.batch_first ? Transpose(x, {1, 0, 2}) : x;
  if (!IsUsable(y)) return fail(y);
  const int64_t batch = y.shape()[1];
  const Shape states = {static_cast<int64_t>(parts_.size()), batch, hidden_};
  if (cell.defined() && !has_cell_) return fail(Refuse(x, "has no cell, got one"));
  for (const Tensor* state : {&hidden, &cell}) {
    if (!state->defined()) continue;
    if (!IsUsable(*state)) return fail(*state * 1);
    if (state->shape() != states || state->dtype() != x.dtype()) {
      return fail(Refuse(x, absl::StrCat("expected a state [", states[0], ", ", batch, ", ",
                                         hidden_, "] of x's dtype, got ", TypeText(*state))));
    }
  }
  const auto first = [&](const Tensor& all, size_t part) {
    if (!all.defined()) return Zeros(x.device(), x.dtype(), {batch, hidden_});
    const auto at = static_cast<int64_t>(part);
    return Reshape(Slice(all, 0, at, at + 1), {batch, hidden_});
  };
  std::vector<Tensor> last_hidden;
  std::vector<Tensor> last_cell;
  for (size_t part = 0; part < parts_.size();) {
    if (part > 0 && training() && options_.dropout > 0) {
      const RandomScope::Numbers numbers = RandomScope::Next();
      y = DropElements(y, options_.dropout, numbers.seed, numbers.offset);
    }
    if (!IsUsable(y)) return fail(y);  // it has no shape
    std::vector<Tensor> sides;
    for (size_t d = 0; d < directions(); ++d, ++part) {
      State state = {first(hidden, part), has_cell_ ? first(cell, part) : Tensor()};
      sides.push_back(Stack(Unroll(y, parts_[part], d == 1, &state), 0));
      last_hidden.push_back(state.hidden);
      if (has_cell_) last_cell.push_back(state.cell);
    }
    y = sides.size() == 1 ? sides[0] : Concat(sides, 2);
  }
  return {options_.batch_first ? Transpose(y, {1, 0, 2}) : y, Stack(last_hidden, 0),
          has_cell_ ? Stack(last_cell, 0) : Tensor()};
}

Tensor Recurrent::Forward(const Tensor& x) {
  const CallSiteScope lines(site());
  return Run(x, Tensor(), Tensor()).output;
}

RnnResult Recurrent::operator()(const Tensor& x, const Tensor& hidden, const Tensor& cell,
                                CallSite site) {
  const CallSiteScope lines(site);
  const absl::Status status = Check(x);
  if (status.ok()) {
    RnnResult result = Run(x, hidden, cell);
    result.output = ThroughHooks(x, result.output);
    return result;
  }
  const Tensor error = x.defined() && !x.status().ok() ? x : internal::Fail(x, status, site);
  return {error, error, error};
}

absl::StatusOr<Nest> Recurrent::Call(const Nest::Items& inputs, const Nest::Fields& keywords) {
  const auto is_tensor = [](const Nest& nest) { return nest.kind() == Nest::Kind::kTensor; };
  Nest::Items state;
  if (inputs.size() == 2) state = is_tensor(inputs[1]) ? Nest::Items{inputs[1]} : inputs[1].items();
  const size_t states = has_cell_ ? 2 : 1;
  if (inputs.empty() || inputs.size() > 2 || !keywords.empty() || !is_tensor(inputs[0]) ||
      (inputs.size() == 2 && state.size() != states) ||
      !std::all_of(state.begin(), state.end(), is_tensor)) {
    return BadType(absl::StrCat(label(), ": expected a tensor, and ",
                                has_cell_ ? "a tuple of hidden and cell" : "hidden",
                                ", or the first alone"));
  }
  const RnnResult result = (*this)(inputs[0].tensor(), state.empty() ? Tensor() : state[0].tensor(),
                                   state.size() < 2 ? Tensor() : state[1].tensor(), site());
  CHORUS_RETURN_IF_ERROR(result.output.status());
  return Nest::Tuple(
      {result.output, has_cell_ ? Nest::Tuple({result.hidden, result.cell}) : Nest(result.hidden)});
}

std::string Recurrent::description() const {
  return absl::StrCat("in=", in_, ", hidden=", hidden_, ", layers=", options_.layers,
                      options_.bidirectional ? ", bidirectional" : "",
                      options_.batch_first ? ", batch first" : "");
}

// --- Steps --------------------------------------------------------------------------------------

Recurrent::State Lstm::Step(const Tensor& projected, const State& before, const Tensor& weight,
                            const Tensor& bias) const {
  const std::vector<Tensor> gates = Chunk(projected + Project(before.hidden, weight, bias), 4, 1);
  const Tensor cell = Sigmoid(gates[1]) * before.cell + Sigmoid(gates[0]) * Tanh(gates[2]);
  return {Sigmoid(gates[3]) * Tanh(cell), cell};
}

Recurrent::State Gru::Step(const Tensor& projected, const State& before, const Tensor& weight,
                           const Tensor& bias) const {
  const std::vector<Tensor> of_x = Chunk(projected, 3, 1);
  const std::vector<Tensor> of_h = Chunk(Project(before.hidden, weight, bias), 3, 1);
  const Tensor fresh = Tanh(of_x[2] + Sigmoid(of_x[0] + of_h[0]) * of_h[2]);
  return {fresh + Sigmoid(of_x[1] + of_h[1]) * (before.hidden - fresh), Tensor()};
}

}  // namespace nn
}  // namespace chorus
