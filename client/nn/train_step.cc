#include "chorus/nn/train_step.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "chorus/autograd.h"
#include "chorus/collectives.h"
#include "chorus/functional/math.h"
#include "chorus/math.h"
#include "chorus/nn/layers.h"
#include "client/internal/access.h"
#include "client/internal/errors.h"
#include "client/internal/tape.h"
#include "client/internal/tensor_data.h"
#include "client/nn/compute_type.h"
#include "client/nn/refused.h"
#include "client/nn/trained.h"
#include "core/base/error.h"

namespace chorus {
namespace nn {
namespace {

constexpr int kScalerState = 4;   // tensors of LossScaler::State, and Optimizer::PendingSkips
constexpr size_t kMaxModes = 16;  // lists of modes whose graphs are kept at a time

const internal::TensorDataPtr& DataOf(const Tensor& tensor) {
  return internal::ImplOf(tensor)->data;
}

}  // namespace

TrainStep::TrainStep(Module* module, Optimizer* optimizer, Loss loss, const Options& options)
    : module_(module),
      optimizer_(optimizer),
      loss_(std::move(loss)),
      options_(options),
      variables_(module->variables()) {
  const std::vector<Variable>& parameters = optimizer->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto it = std::find(variables_.begin(), variables_.end(), parameters[i]);
    if (it == variables_.end()) {
      refused_ = BadType(absl::StrCat("the optimizer's parameter ", i, " is none of the module's"));
      return;
    }
    trained_.push_back(static_cast<size_t>(it - variables_.begin()));
    size_t rate = 0;
    while (rate < first_of_.size() &&
           optimizer->rate_of(first_of_[rate]) != optimizer->rate_of(i)) {
      ++rate;
    }
    if (rate == first_of_.size()) first_of_.push_back(i);
    rate_of_.push_back(rate);
  }
  if (!parameters.empty()) {
    numbers_ = options.scaler != nullptr ? 2 : optimizer->NumbersOf(0, 0).size();
  }

  const int state = static_cast<int>(variables_.size());
  const int num_states = static_cast<int>(parameters.size()) * optimizer->slots();
  for (const size_t variable : trained_) compile_.donate.push_back(static_cast<int>(variable));
  for (int i = 0; i < num_states; ++i) compile_.donate.push_back(state + i);
  const int first = state + num_states + static_cast<int>(first_of_.size() * numbers_) + 1 +
                    (options.scaler != nullptr ? kScalerState : 0);
  for (const CompileOptions::Varying& varying : options.varying) {
    compile_.varying.emplace_back(first + varying.input, varying.dim);
  }
  compile_.max_size = options.max_size;
}

int TrainStep::traces() const {
  int traces = forgotten_traces_;
  for (const auto& of_modes : compiled_) traces += of_modes.second.traces();
  return traces;
}

void TrainStep::AppendModes(Module* module, std::vector<int64_t>* modes) {
  modes->push_back(module->training());
  modes->push_back(module->revision_);
  // Of a clone what its original has become.
  if (module->code() != module) modes->push_back(module->code()->revision_);
  for (const Module::Child& child : module->children()) AppendModes(child.module.get(), modes);
}

const Compiled& TrainStep::CompiledInModes() {
  std::vector<int64_t> modes;
  AppendModes(module_, &modes);
  if (compiled_.size() == kMaxModes && compiled_.count(modes) == 0) {
    forgotten_traces_ = traces();
    compiled_.clear();
  }
  const auto at = compiled_.try_emplace(modes);
  Compiled& compiled = at.first->second;
  if (at.second) {
    compiled = Compile([this](const std::vector<Tensor>& in) { return Trace(in); }, compile_);
  }
  return compiled;
}

absl::Status TrainStep::Check() const {
  CHORUS_RETURN_IF_ERROR(refused_);
  for (size_t i = 0; i < trained_.size(); ++i) {
    CHORUS_RETURN_IF_ERROR(CheckIsTrained(optimizer_->parameters()[i], i));
  }
  return module_->device().status();
}

absl::Status TrainStep::Share(const absl::Status& check, CallSite site) const {
  const NoGrad no_grad;
  absl::Status refused = check;
  std::vector<Tensor> values;
  for (const Variable& variable : variables_) {
    const Tensor value = refused.ok() ? variable().Detach() : FailedIn(*options_.ranks, refused);
    values.push_back(Broadcast(value, 0, *options_.ranks, site));
    // As it was recorded: so the next one does not end another epoch.
    if (!refused.ok()) refused = values.back().status();
  }
  CHORUS_RETURN_IF_ERROR(refused);
  for (const Tensor& value : values) CHORUS_RETURN_IF_ERROR(value.Wait());
  for (size_t i = 0; i < values.size(); ++i) variables_[i].Set(values[i]);
  return absl::OkStatus();
}

void TrainStep::TakeBackCounts() {
  if (!last_loss_.defined()) return;
  if (internal::ImplOf(variables_[trained_[0]]()) == last_value_.lock()) return;
  // Who puts variables back has heard of the failure: others need not wait for the step here.
  const absl::Status status = std::exchange(last_loss_, Tensor()).Wait(std::chrono::seconds(0));
  if (status.ok() || internal::IsTimeout(status)) return;
  if (std::exchange(counts_last_, false)) --steps_;
  optimizer_->TakeBackAdvance();
}

absl::StatusOr<std::vector<Tensor>> TrainStep::Inputs() {
  CHORUS_ASSIGN_OR_RETURN(const DeviceRef device, module_->device());
  std::vector<Tensor> in;
  for (const Variable& variable : variables_) in.push_back(variable().Detach());
  CHORUS_ASSIGN_OR_RETURN(const std::vector<std::vector<Tensor>> state, optimizer_->Slots());
  for (const std::vector<Tensor>& slots : state) in.insert(in.end(), slots.begin(), slots.end());
  // Without a scaler the numbers are the host's.
  if (options_.scaler == nullptr) CHORUS_RETURN_IF_ERROR(optimizer_->SettleSkips());
  for (size_t i = 0; i < trained_.size(); ++i) {
    if (!optimizer_->HaveEqualSteps(i, first_of_[rate_of_[i]])) {
      return MakeError(Reason::kWrongState,
                       "parameters of one learning rate have had different numbers of steps");
    }
  }
  for (const size_t first : first_of_) {
    const int64_t steps = optimizer_->steps(first);
    const std::vector<double> numbers =
        options_.scaler == nullptr
            ? optimizer_->NumbersOf(first, steps)
            : std::vector<double>{optimizer_->RateAt(first, steps),
                                  static_cast<double>(steps + 1 - optimizer_->skipped(first))};
    for (const double number : numbers) in.push_back(Scalar<double>(device, number));
  }
  in.push_back(Scalar<int64_t>(device, steps_));
  if (options_.scaler != nullptr) {
    const LossScaler::State& scaling = options_.scaler->StateOn(device);
    in.insert(in.end(),
              {scaling.scale, scaling.streak, scaling.skipped, optimizer_->PendingSkips(device)});
  }
  return in;
}

absl::StatusOr<Tensor> TrainStep::operator()(const std::vector<Tensor>& inputs, CallSite site) {
  const absl::Status check = Check();
  const CallSiteScope lines(site);
  if (options_.ranks.has_value() && !shared_) {
    CHORUS_RETURN_IF_ERROR(Share(check, site));
    shared_ = true;
  }
  TakeBackCounts();
  absl::StatusOr<std::vector<Tensor>> own_inputs =
      check.ok() ? Inputs() : absl::StatusOr<std::vector<Tensor>>(check);
  // A run of an input that has failed is refused, which counts, and tells the other ranks.
  if (!own_inputs.ok()) {
    const DeviceRef device = options_.ranks.has_value() ? DeviceOf(*options_.ranks) : DeviceRef();
    own_inputs = std::vector<Tensor>{FromError(device, own_inputs.status())};
  }
  std::vector<Tensor> in = *std::move(own_inputs);
  in.insert(in.end(), inputs.begin(), inputs.end());
  CHORUS_ASSIGN_OR_RETURN(const std::vector<Tensor> out, CompiledInModes().Run(in, site));
  ++steps_;
  size_t next = 1;
  for (const Variable& variable : variables_) {
    const Tensor& value = out[next++];
    // What the step gives back as it is keeps its handle.
    if (DataOf(value) != DataOf(variable())) variable.Set(value);
  }
  const auto slots = static_cast<ptrdiff_t>(optimizer_->slots());
  std::vector<std::vector<Tensor>> state;
  for (size_t i = 0; i < trained_.size(); ++i) {
    const auto begin = out.begin() + static_cast<ptrdiff_t>(next);
    state.emplace_back(begin, begin + slots);
    next += static_cast<size_t>(slots);
  }
  Tensor pending_skips;
  if (options_.scaler != nullptr) {
    options_.scaler->SetState({out[next], out[next + 1], out[next + 2]});
    pending_skips = out[next + 3];
  }
  optimizer_->Advance(std::move(state), pending_skips);
  if (trained_.empty()) return out[0];
  counts_last_ = true;
  last_loss_ = out[0];
  last_value_ = internal::ImplOf(variables_[trained_[0]]());
  return out[0];
}

std::vector<Tensor> TrainStep::Trace(const std::vector<Tensor>& in) const {
  const auto fail = [&in](const absl::Status& status) {
    return std::vector<Tensor>{FromError(in[0].device(), status)};
  };
  size_t next = variables_.size();
  std::vector<Tensor> values;
  for (size_t i = 0; i < variables_.size(); ++i) values.push_back(in[i].Detach());
  std::vector<Tensor> leaves;
  for (const size_t variable : trained_) leaves.push_back(values[variable].RequireGrad());
  const auto slots = static_cast<size_t>(optimizer_->slots());
  std::vector<std::vector<Tensor>> state;
  for (size_t i = 0; i < trained_.size(); ++i, next += slots) {
    const auto begin = in.begin() + static_cast<ptrdiff_t>(next);
    state.emplace_back(begin, begin + static_cast<ptrdiff_t>(slots));
  }
  const size_t first_number = next;
  next += first_of_.size() * numbers_;
  const Tensor& step = in[next++];
  LossScaler::State scaling;
  Tensor pending_skips;
  if (options_.scaler != nullptr) {
    scaling = {in[next], in[next + 1], in[next + 2]};
    pending_skips = in[next + 3];
    next += kScalerState;
  }

  if (options_.compute != DType::kUnspecified) {
    for (size_t i = 0; i < variables_.size(); ++i) {
      if (variables_[i].is_parameter()) values[i] = Cast(values[i], options_.compute);
    }
  }
  const StateScope scope(*module_, values);
  const RandomScope random(options_.seed, step);
  Tensor loss = loss_(std::vector<Tensor>(in.begin() + static_cast<ptrdiff_t>(next), in.end()));
  if (!loss.status().ok()) return fail(loss.status());
  if (loss.num_elements() != 1) {
    return fail(BadType(
        absl::StrCat("a training step's loss: expected one number, got ", loss.num_elements())));
  }
  const Tensor scaled =
      options_.scaler == nullptr ? loss : loss * Cast(scaling.scale, loss.dtype());
  absl::StatusOr<std::vector<Tensor>> gradients = Grad({scaled}, leaves);
  if (!gradients.ok()) return fail(gradients.status());

  const NoGrad no_grad;
  loss = loss.Detach();
  if (options_.ranks.has_value()) {
    // In the module's order: an optimizer may have another one on each rank.
    std::vector<size_t> order(gradients->size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(),
              [this](size_t a, size_t b) { return trained_[a] < trained_[b]; });
    for (const size_t i : order) {
      (*gradients)[i] = AllReduce((*gradients)[i], *options_.ranks, Reduction::kAvg);
    }
    loss = AllReduce(loss, *options_.ranks, Reduction::kAvg);
  }
  Tensor finite;
  if (options_.scaler != nullptr) {
    for (size_t i = 0; i < gradients->size(); ++i) {
      if ((*gradients)[i].dtype() != DType::kF16) continue;
      return fail(
          BadType(absl::StrCat("loss scaling: expected master weights of f32 or f64 "
                               "(Options::compute), got f16 of parameter ",
                               i)));
    }
    finite = LossScaler::Unscale(&*gradients, scaling.scale);
  }
  if (options_.on_gradients != nullptr) options_.on_gradients(&*gradients);
  std::vector<std::vector<Tensor>> by_rate;
  for (size_t rate = 0; rate < first_of_.size(); ++rate) {
    const auto begin = in.begin() + static_cast<ptrdiff_t>(first_number + rate * numbers_);
    by_rate.emplace_back(begin, begin + static_cast<ptrdiff_t>(numbers_));
    if (options_.scaler == nullptr) continue;
    std::vector<Tensor>& of_rate = by_rate.back();
    of_rate = optimizer_->NumbersOf(of_rate[0], of_rate[1] - Cast(pending_skips, DType::kF64));
  }
  std::vector<Tensor> changed = scope.tensors();
  for (size_t i = 0; i < variables_.size(); ++i) {
    if (!variables_[i].is_parameter()) continue;
    // It is what it was, and not its copy of another dtype.
    changed[i] =
        DataOf(changed[i]) == DataOf(values[i]) ? in[i] : AsType(changed[i], in[i].dtype());
  }
  for (size_t i = 0; i < trained_.size(); ++i) {
    if (DataOf(changed[trained_[i]]) == DataOf(in[trained_[i]])) continue;
    return fail(MakeError(Reason::kWrongState,
                          absl::StrCat(module_->named_variables()[trained_[i]].name,
                                       " was Set by the loss of a training step, and the optimizer "
                                       "has another value for it")));
  }
  for (size_t i = 0; i < trained_.size(); ++i) {
    const Tensor& value = in[trained_[i]];
    const std::vector<Tensor>& f64_numbers = by_rate[rate_of_[i]];
    const std::vector<Operand> of_rate(f64_numbers.begin(), f64_numbers.end());
    const std::vector<Tensor> before = state[i];
    changed[trained_[i]] = optimizer_->Next(i, value, (*gradients)[i], of_rate, &state[i]);
    if (!finite.defined()) continue;
    changed[trained_[i]] = Where(finite, changed[trained_[i]], value);
    for (size_t slot = 0; slot < slots; ++slot) {
      state[i][slot] = Where(finite, state[i][slot], before[slot]);
    }
  }
  std::vector<Tensor> out = {loss};
  out.insert(out.end(), changed.begin(), changed.end());
  for (const std::vector<Tensor>& row : state) out.insert(out.end(), row.begin(), row.end());
  if (options_.scaler != nullptr) {
    const LossScaler::State then = options_.scaler->Next(scaling, finite);
    out.insert(out.end(), {then.scale, then.streak, then.skipped,
                           pending_skips + Cast(LogicalNot(finite), DType::kI64)});
  }
  return out;
}

}  // namespace nn
}  // namespace chorus
