#include "chorus/nn/optim.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "chorus/autograd.h"
#include "chorus/functional/math.h"
#include "client/internal/errors.h"
#include "client/internal/local.h"
#include "client/internal/trace.h"
#include "client/nn/compute_type.h"
#include "client/nn/trained.h"
#include "core/base/error.h"

namespace chorus {
namespace nn {

using internal::Fail;
using internal::IsUsable;
using internal::TypeText;

// --- Schedules ----------------------------------------------------------------------------------

Schedule StepDecay(int64_t every, double gamma) {
  return [every, gamma](int64_t step) {
    return std::pow(gamma, static_cast<double>(step / std::max<int64_t>(every, 1)));
  };
}

Schedule CosineDecay(int64_t steps, double last) {
  return [steps, last](int64_t step) {
    if (step >= steps) return last;
    const double part = static_cast<double>(step) / static_cast<double>(steps);
    return last + (1 - last) * (1 + std::cos(M_PI * part)) / 2;
  };
}

Schedule WarmUp(int64_t steps, Schedule then) {
  return [steps, then = std::move(then)](int64_t step) {
    if (step < steps) return static_cast<double>(step + 1) / static_cast<double>(steps);
    return then == nullptr ? 1.0 : then(step - steps);
  };
}

// --- Clipping -----------------------------------------------------------------------------------

Tensor GradNorm(const std::vector<Tensor>& gradients, CallSite site) {
  const CallSiteScope lines(site);
  const bool has_f64 = std::any_of(gradients.begin(), gradients.end(), [](const Tensor& gradient) {
    return gradient.defined() && gradient.dtype() == DType::kF64;
  });
  Tensor sum;
  for (const Tensor& gradient : gradients) {
    if (!gradient.defined()) continue;
    const Tensor wide =
        has_f64 && IsUsable(gradient) ? AsType(gradient, DType::kF64) : AsComputeType(gradient);
    const Tensor square = Sum(wide * wide);
    sum = sum.defined() ? sum + square : square;
  }
  return sum.defined() ? Sqrt(sum) : sum;
}

Tensor ClipGradNorm(std::vector<Tensor>* gradients, double max_norm, CallSite site) {
  const CallSiteScope lines(site);
  const Tensor norm = GradNorm(*gradients);
  if (!norm.defined()) return norm;
  const Tensor factor = Minimum(max_norm / (norm + 1e-6), 1);
  for (Tensor& gradient : *gradients) {
    if (!gradient.defined()) continue;
    gradient = InComputeType(gradient, [&factor](const Tensor& wide) {
      return wide * (IsUsable(wide) ? AsType(factor, wide.dtype()) : factor);
    });
  }
  return norm;
}

void ClipGradValue(std::vector<Tensor>* gradients, double limit, CallSite site) {
  const CallSiteScope lines(site);
  for (Tensor& gradient : *gradients) {
    if (gradient.defined()) gradient = Clamp(gradient, -limit, limit);
  }
}

// --- Optimizer ----------------------------------------------------------------------------------

Optimizer::Optimizer(const std::vector<ParameterGroup>& groups, double learning_rate,
                     double weight_decay)
    : learning_rate_(learning_rate) {
  RefuseUnless(learning_rate >= 0, absl::StrCat("a learning rate from 0, got ", learning_rate));
  RefuseUnless(weight_decay >= 0, absl::StrCat("a weight decay from 0, got ", weight_decay));
  refused_.Update(CheckEachOnce(groups));
  for (const ParameterGroup& group : groups) {
    RefuseUnless(group.learning_rate >= 0,
                 absl::StrCat("a group's learning rate from 0, got ", group.learning_rate));
    RefuseUnless(!std::isnan(group.weight_decay), "a group's weight decay that is a number");
    for (const Variable& parameter : group.parameters) {
      parameters_.push_back(parameter);
      entries_.emplace_back();
      entries_.back().learning_rate = group.learning_rate;
      entries_.back().weight_decay = group.weight_decay < 0 ? weight_decay : group.weight_decay;
    }
  }
}

void Optimizer::RefuseUnless(bool fits, const std::string& text) {
  if (fits || !refused_.ok()) return;
  refused_ = BadType(absl::StrCat("an optimizer expects ", text));
}

std::vector<Tensor> Optimizer::gradients() const {
  std::vector<Tensor> gradients;
  for (const Variable& parameter : parameters_) gradients.push_back(parameter.grad());
  return gradients;
}

void Optimizer::ClearGrads() const {
  for (const Variable& parameter : parameters_) parameter.ClearGrad();
}

std::vector<Tensor> Optimizer::SlotsOf(size_t parameter, const Tensor& like) const {
  const ParameterState& state = entries_[parameter].state;
  std::vector<Tensor> of_parameter = state.slots;
  of_parameter.resize(static_cast<size_t>(slots()));
  for (Tensor& slot : of_parameter) {
    // Also where they could not be made when they were asked for first.
    const bool is_none = !slot.defined() || (state.steps == 0 && !slot.status().ok());
    if (is_none) slot = Zeros(like.device(), like.dtype(), like.shape());
  }
  return of_parameter;
}

absl::StatusOr<std::vector<std::vector<Tensor>>> Optimizer::Slots() {
  CHORUS_RETURN_IF_ERROR(refused_);
  std::vector<std::vector<Tensor>> all;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Tensor value = parameters_[i]();
    if (!value.defined()) {
      return MakeError(Reason::kWrongState, "a parameter is not there yet: call Init first");
    }
    entries_[i].state.slots = SlotsOf(i, value);
    all.push_back(entries_[i].state.slots);
  }
  return all;
}

absl::StatusOr<std::vector<Optimizer::ParameterState>> Optimizer::State() {
  CHORUS_RETURN_IF_ERROR(Slots().status());
  CHORUS_RETURN_IF_ERROR(SettleSkips());
  std::vector<ParameterState> all;
  for (const Entry& entry : entries_) {
    all.push_back(entry.state);
    // Handles of their own: the next compiled step is given none that the caller has kept.
    for (Tensor& slot : all.back().slots) slot = slot.Detach();
  }
  return all;
}

void Optimizer::SetState(size_t parameter, ParameterState state) {
  // The step that fails to count has failed, and with it the state that is replaced here.
  if (!SettleSkips().ok()) pending_skips_ = Tensor();
  entries_[parameter].state = std::move(state);
  entries_[parameter].advanced = false;
}

Tensor Optimizer::PendingSkips(const DeviceRef& device) const {
  return pending_skips_.defined() ? pending_skips_ : Scalar<int64_t>(device, 0);
}

absl::Status Optimizer::SettleSkips() {
  if (!pending_skips_.defined()) return absl::OkStatus();
  CHORUS_ASSIGN_OR_RETURN(const int64_t skips, pending_skips_.Item<int64_t>());
  for (Entry& entry : entries_) entry.state.skipped += skips;
  pending_skips_ = Tensor();
  return absl::OkStatus();
}

void Optimizer::Advance(std::vector<std::vector<Tensor>> state, const Tensor& pending_skips) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    entries_[i].state.slots = std::move(state[i]);
    ++entries_[i].state.steps;
    entries_[i].advanced = true;
  }
  skips_before_ = std::exchange(pending_skips_, pending_skips);
}

void Optimizer::TakeBackAdvance() {
  bool any = false;
  for (Entry& entry : entries_) {
    if (!std::exchange(entry.advanced, false)) continue;
    --entry.state.steps;
    any = true;
  }
  // Those of the step have failed with it.
  if (any) pending_skips_ = std::exchange(skips_before_, Tensor());
}

double Optimizer::RateAt(size_t parameter, int64_t steps) const {
  const Entry& entry = entries_[parameter];
  const double rate = entry.learning_rate == 0 ? learning_rate_ : entry.learning_rate;
  return schedule_ == nullptr ? rate : rate * schedule_(steps);
}

std::vector<double> Optimizer::NumbersOf(size_t parameter, int64_t steps) const {
  return Numbers(RateAt(parameter, steps), steps + 1 - skipped(parameter));
}

Tensor Optimizer::Next(size_t parameter, const Tensor& value, const Tensor& gradient,
                       const std::vector<Operand>& numbers, std::vector<Tensor>* state) const {
  if (IsUsable(value) && IsUsable(gradient) && value.shape() != gradient.shape()) {
    return Fail(value,
                BadType(absl::StrCat("an optimizer expects a gradient of the parameter's shape, ",
                                     TypeText(value), ", got ", TypeText(gradient))),
                CallSite::Here());
  }
  const DType dtype = value.dtype();
  const DType compute = ComputeType(dtype);
  // What is of another type than the parameter stays, and is refused where it meets one.
  const auto wide = [=](const Tensor& x) { return x.dtype() == dtype ? AsType(x, compute) : x; };
  std::vector<Operand> factors;
  for (const Operand& number : numbers) {
    factors.push_back(number.is_number() ? number : AsType(number.tensor(), compute));
  }
  for (Tensor& slot : *state) slot = wide(slot);
  const Tensor next =
      Rule(wide(value), wide(gradient), factors, entries_[parameter].weight_decay, state);
  for (Tensor& slot : *state) slot = AsType(slot, dtype);
  return AsType(next, dtype);
}

void Optimizer::LeaveOut(const std::vector<Tensor>& gradients) {
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    ++entries_[i].state.steps;
    ++entries_[i].state.skipped;
    entries_[i].advanced = false;
  }
}

absl::Status Optimizer::Step(CallSite site) { return Step(gradients(), site); }

absl::Status Optimizer::Step(const std::vector<Tensor>& gradients, CallSite site) {
  CHORUS_RETURN_IF_ERROR(refused_);
  // Each call of the function would go on from the state that there was when it was traced.
  CHORUS_RETURN_IF_ERROR(internal::WithSource(
      internal::FailInTrace("Optimizer::Step", "use TrainStep, or Next with state as inputs"),
      internal::SourceOf(site)));
  if (gradients.size() != parameters_.size()) {
    return BadType(absl::StrCat("expected a gradient for each of ", parameters_.size(),
                                " parameters, got ", gradients.size()));
  }
  CHORUS_RETURN_IF_ERROR(SettleSkips());
  const CallSiteScope lines(site);
  const NoGrad no_grad;
  absl::Status status;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!gradients[i].defined() || !parameters_[i].requires_grad()) continue;
    const Tensor value = parameters_[i]();
    std::vector<Tensor> slots = SlotsOf(i, value);
    std::vector<Operand> numbers;
    for (const double number : NumbersOf(i, steps(i))) numbers.emplace_back(number);
    const Tensor next = Next(i, value, gradients[i], numbers, &slots);
    status.Update(next.status());
    // What is refused changes nothing.
    if (!next.status().ok()) continue;
    parameters_[i].Set(next);
    entries_[i].state.slots = std::move(slots);
    ++entries_[i].state.steps;
    entries_[i].advanced = false;
  }
  return status;
}

// --- Rules --------------------------------------------------------------------------------------

namespace {

// For formulas of numbers here and of tensors on a device.
double Power(double base, double exponent) { return std::pow(base, exponent); }
Tensor Power(double base, const Tensor& exponent) { return Pow(base, exponent); }
double Root(double x) { return std::sqrt(x); }
Tensor Root(const Tensor& x) { return Sqrt(x); }

// Of the learning rate over the first correction, of 1 over the root of the second, and of the
// rate.
template <typename T>
std::vector<T> AdamNumbers(const Adam::Options& options, const T& rate, const T& step) {
  return {rate / (1 - Power(options.beta1, step)), 1 / Root(1 - Power(options.beta2, step)), rate};
}

template <typename T>
std::vector<T> AdagradNumbers(const Adagrad::Options& options, const T& rate, const T& step) {
  return {rate / (1 + (step - 1) * options.learning_rate_decay)};
}

Tensor Decayed(const Tensor& gradient, const Tensor& value, double weight_decay) {
  return weight_decay == 0 ? gradient : gradient + value * weight_decay;
}

}  // namespace

Sgd::Sgd(const std::vector<ParameterGroup>& groups, const Options& options)
    : Optimizer(groups, options.learning_rate, options.weight_decay), options_(options) {
  RefuseUnless(options.momentum >= 0, absl::StrCat("a momentum from 0, got ", options.momentum));
  RefuseUnless(!options.nesterov || options.momentum > 0, "a momentum for Nesterov's, got 0");
}

std::vector<double> Sgd::Numbers(double learning_rate, int64_t) const { return {learning_rate}; }
std::vector<Tensor> Sgd::Numbers(const Tensor& learning_rate, const Tensor&) const {
  return {learning_rate};
}

Tensor Sgd::Rule(const Tensor& value, const Tensor& gradient, const std::vector<Operand>& numbers,
                 double weight_decay, std::vector<Tensor>* state) const {
  const Tensor g = Decayed(gradient, value, weight_decay);
  if (options_.momentum == 0) return value - g * numbers[0];
  Tensor& buffer = (*state)[0];
  buffer = buffer * options_.momentum + g;
  return value - (options_.nesterov ? g + buffer * options_.momentum : buffer) * numbers[0];
}

Adam::Adam(const std::vector<ParameterGroup>& groups, const Options& options)
    : Optimizer(groups, options.learning_rate, options.weight_decay), options_(options) {
  for (const double beta : {options.beta1, options.beta2}) {
    RefuseUnless(beta >= 0 && beta < 1, absl::StrCat("a beta in [0, 1), got ", beta));
  }
  RefuseUnless(options.epsilon >= 0, absl::StrCat("an epsilon from 0, got ", options.epsilon));
}

std::vector<double> Adam::Numbers(double learning_rate, int64_t step) const {
  return AdamNumbers(options_, learning_rate, static_cast<double>(step));
}
std::vector<Tensor> Adam::Numbers(const Tensor& learning_rate, const Tensor& step) const {
  return AdamNumbers(options_, learning_rate, step);
}

Tensor Adam::Rule(const Tensor& value, const Tensor& gradient, const std::vector<Operand>& numbers,
                  double weight_decay, std::vector<Tensor>* state) const {
  const bool decouples = options_.decoupled && weight_decay != 0;
  const Tensor p = decouples ? value - value * weight_decay * numbers[2] : value;
  const Tensor g = options_.decoupled ? gradient : Decayed(gradient, value, weight_decay);
  Tensor& m = (*state)[0];
  Tensor& v = (*state)[1];
  m = m * options_.beta1 + g * (1 - options_.beta1);
  v = v * options_.beta2 + g * g * (1 - options_.beta2);
  Tensor largest = v;
  if (options_.amsgrad) largest = (*state)[2] = Maximum((*state)[2], v);
  return p - m / (Sqrt(largest) * numbers[1] + options_.epsilon) * numbers[0];
}

Adagrad::Adagrad(const std::vector<ParameterGroup>& groups, const Options& options)
    : Optimizer(groups, options.learning_rate, options.weight_decay), options_(options) {
  RefuseUnless(options.learning_rate_decay >= 0,
               absl::StrCat("a decay of the rate from 0, got ", options.learning_rate_decay));
}

std::vector<double> Adagrad::Numbers(double learning_rate, int64_t step) const {
  return AdagradNumbers(options_, learning_rate, static_cast<double>(step));
}
std::vector<Tensor> Adagrad::Numbers(const Tensor& learning_rate, const Tensor& step) const {
  return AdagradNumbers(options_, learning_rate, step);
}

Tensor Adagrad::Rule(const Tensor& value, const Tensor& gradient,
                     const std::vector<Operand>& numbers, double weight_decay,
                     std::vector<Tensor>* state) const {
  const Tensor g = Decayed(gradient, value, weight_decay);
  Tensor& sum = (*state)[0];
  sum = sum + g * g;
  return value - g / (Sqrt(sum) + options_.epsilon) * numbers[0];
}

// --- LossScaler ---------------------------------------------------------------------------------

const LossScaler::State& LossScaler::StateOn(const DeviceRef& device) {
  if (!state_.scale.defined()) {
    state_ = {Scalar(device, static_cast<float>(options_.scale)), Scalar<int64_t>(device, 0),
              Scalar<int64_t>(device, 0)};
  }
  return state_;
}

Tensor LossScaler::Scale(const Tensor& loss, CallSite site) {
  const CallSiteScope lines(site);
  if (!loss.defined() || !loss.status().ok()) return loss * 1;
  scaled_by_ = StateOn(loss.device()).scale;
  return loss * Cast(scaled_by_, loss.dtype());
}

Tensor LossScaler::Unscale(std::vector<Tensor>* gradients, const Tensor& scale) {
  Tensor finite;
  for (Tensor& gradient : *gradients) {
    if (!gradient.defined()) continue;
    gradient = InComputeType(
        gradient, [&scale](const Tensor& wide) { return wide / Cast(scale, wide.dtype()); });
    if (gradient.num_elements() == 0) continue;
    const Tensor all = Max(Abs(gradient)) < std::numeric_limits<double>::infinity();
    finite = finite.defined() ? LogicalAnd(finite, all) : all;
  }
  return finite.defined() ? finite : Equal(scale, scale);
}

LossScaler::State LossScaler::Next(const State& state, const Tensor& finite) const {
  const Tensor streak = state.streak + 1;
  const Tensor grows = GreaterEqual(streak, options_.interval);
  // A scale that would not be finite stays.
  const Tensor grown = state.scale * options_.growth;
  const Tensor larger =
      Where(LogicalAnd(grows, grown < std::numeric_limits<double>::infinity()), grown, state.scale);
  return {Where(finite, larger, state.scale * options_.backoff),
          Where(LogicalAnd(finite, LogicalNot(grows)), streak, 0),
          state.skipped + Cast(LogicalNot(finite), DType::kI64)};
}

absl::StatusOr<bool> LossScaler::Step(Optimizer* optimizer, CallSite site) {
  const CallSiteScope lines(site);
  const NoGrad no_grad;
  std::vector<Tensor> gradients = optimizer->gradients();
  const auto first = std::find_if(gradients.begin(), gradients.end(),
                                  [](const Tensor& gradient) { return gradient.defined(); });
  if (first == gradients.end()) {
    return MakeError(Reason::kWrongState, "no parameter has a gradient: call Backward first");
  }
  const State before = StateOn(first->device());
  const Tensor finite = Unscale(&gradients, scaled_by_.defined() ? scaled_by_ : before.scale);
  CHORUS_ASSIGN_OR_RETURN(const bool steps, finite.Item<bool>());
  if (steps) {
    CHORUS_RETURN_IF_ERROR(optimizer->Step(gradients, site));
  } else {
    optimizer->LeaveOut(gradients);
  }
  optimizer->ClearGrads();
  state_ = Next(before, finite);
  return steps;
}

// --- Ema ----------------------------------------------------------------------------------------

void Ema::Update(CallSite site) {
  if (!internal::FailInTrace("Ema::Update", "call it behind the step").ok()) return;
  const CallSiteScope lines(site);
  const NoGrad no_grad;
  const bool first = averages_.empty();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Tensor value = parameters_[i]().Detach();
    if (first) {
      averages_.push_back(value);
    } else {
      averages_[i] = InComputeType(averages_[i], [&](const Tensor& average) {
        return average * decay_ + AsType(value, average.dtype()) * (1 - decay_);
      });
    }
  }
}

void Ema::Swap() {
  for (size_t i = 0; i < averages_.size(); ++i) {
    const Tensor value = parameters_[i]().Detach();
    parameters_[i].Set(averages_[i]);
    averages_[i] = value;
  }
}

}  // namespace nn
}  // namespace chorus
