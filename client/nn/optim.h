// Optimizers, with PyTorch's formulas: each is a rule from a parameter, its gradient and what is
// kept of them to the next ones, so that the same rule serves Step and a compiled step (TrainStep).
// Of half types all is computed in f32, and what comes of it is rounded once: parameters, state,
// averages and gradients.
//
// Where ranks have equal parameters and gradients (an AllReduce's) a node computes an update once.
//
// Threads: one at a time. Ownership: an optimizer shares the variables that it was given and keeps
//   its state beside them, on their devices. Errors: returned, or in the parameters' tensors.
//   INVALID_ARGUMENT kBadType: options that make no sense.
#ifndef CHORUS_CLIENT_NN_OPTIM_H_
#define CHORUS_CLIENT_NN_OPTIM_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "chorus/call_site.h"
#include "chorus/math.h"
#include "chorus/nn/module.h"
#include "chorus/tensor.h"

namespace chorus {
namespace nn {

// What a learning rate is multiplied by in a step, counted from 0.
using Schedule = std::function<double(int64_t step)>;
// gamma^(step / every), rounded down.
Schedule StepDecay(int64_t every, double gamma = 0.1);
// From 1 to `last` along half a cosine in `steps`, and `last` from then on.
Schedule CosineDecay(int64_t steps, double last = 0);
// Evenly up from 1 / steps to 1 in the first `steps`; then `then`, counted from its own 0.
Schedule WarmUp(int64_t steps, Schedule then = nullptr);

// Parameters with options of their own.
struct ParameterGroup {
  std::vector<Variable> parameters;
  double learning_rate = 0;  // 0: the optimizer's
  double weight_decay = -1;  // below 0: the optimizer's
};

inline std::vector<ParameterGroup> OneGroup(const std::vector<Variable>& parameters) {
  std::vector<ParameterGroup> groups(1);
  groups[0].parameters = parameters;
  return groups;
}

// The 2-norm of all gradients together, a tensor of no dimensions, on the first one's device; f32
// for half types, f64 where one of them is. Undefined ones count as none, and where there is no
// other the norm is undefined; all on one device.
Tensor GradNorm(const std::vector<Tensor>& gradients, CallSite site = CallSite::Here());
// Multiplies all by max_norm / (norm + 1e-6) where that is below 1; returns the norm before.
Tensor ClipGradNorm(std::vector<Tensor>* gradients, double max_norm,
                    CallSite site = CallSite::Here());
// Into [-limit, limit].
void ClipGradValue(std::vector<Tensor>* gradients, double limit, CallSite site = CallSite::Here());

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Replaces each parameter by the rule; one whose gradient is undefined stays, with its state.
  // With no `gradients`: by grad() of each. Replaced tensors have no grad(). Returns at once, like
  // an op; but waits behind compiled steps of which a LossScaler may have left some out
  // (SettleSkips).
  absl::Status Step(CallSite site = CallSite::Here());
  absl::Status Step(const std::vector<Tensor>& gradients, CallSite site = CallSite::Here());
  void ClearGrads() const;

  // Of all groups, in order; each once.
  const std::vector<Variable>& parameters() const { return parameters_; }
  std::vector<Tensor> gradients() const;
  // The optimizer's, for groups that have none of their own; before the schedule.
  double learning_rate() const { return learning_rate_; }
  void SetLearningRate(double rate) { learning_rate_ = rate; }
  // By the count of steps of each parameter.
  void SetSchedule(Schedule schedule) { schedule_ = std::move(schedule); }

  // --- For compiled steps and checkpoints -----------------------------------------------------
  // What is kept of each parameter besides itself: how many tensors of its type.
  virtual int slots() const = 0;
  struct ParameterState {
    std::vector<Tensor> slots;
    int64_t steps = 0;
    int64_t skipped =
        0;  // of `steps`, left out by a LossScaler: schedules count them, rules do not
  };
  // By parameter, with all slots; zeros where there has been no step. Settles skips.
  absl::StatusOr<std::vector<ParameterState>> State();
  // Settles skips first: those that are pending are of the steps before.
  void SetState(size_t parameter, ParameterState state);
  // [parameter][slot], without settling skips.
  absl::StatusOr<std::vector<std::vector<Tensor>>> Slots();
  int64_t steps(size_t parameter) const { return entries_[parameter].state.steps; }
  // Without those that are pending.
  int64_t skipped(size_t parameter) const { return entries_[parameter].state.skipped; }
  // Both have had as many steps, and as many left out.
  bool HaveEqualSteps(size_t a, size_t b) const {
    return steps(a) == steps(b) && skipped(a) == skipped(b);
  }
  // Counts a step with these gradients that is left out: nothing else changes.
  void LeaveOut(const std::vector<Tensor>& gradients);
  // What compiled steps have left out since skips were settled, of each parameter: an i64 of no
  // dimensions, which only the device may know yet.
  Tensor PendingSkips(const DeviceRef& device) const;
  // Waits for it, and counts it in skipped(). An error is that of the steps.
  absl::Status SettleSkips();
  // After a compiled step of all parameters: what is kept of each, and PendingSkips (undefined
  // where steps cannot be left out).
  void Advance(std::vector<std::vector<Tensor>> state, const Tensor& pending_skips);
  // That step has failed, and parameters are what they were before it: it does not count. Not of
  // parameters whose state has been set since, or that have had other steps.
  void TakeBackAdvance();
  // Parameters of one rate, with as many steps behind them, have equal numbers.
  double rate_of(size_t parameter) const { return entries_[parameter].learning_rate; }
  // Its learning rate, with the schedule, in the step after `steps` others.
  double RateAt(size_t parameter, int64_t steps) const;
  // The numbers that the rule takes for the parameter's step after `steps` others, of which
  // skipped() were left out.
  std::vector<double> NumbersOf(size_t parameter, int64_t steps) const;
  // The same where the device alone knows which step it is: of f64 tensors, `step` from 1.
  std::vector<Tensor> NumbersOf(const Tensor& learning_rate, const Tensor& step) const {
    return Numbers(learning_rate, step);
  }
  // The rule: nothing of this object changes. `state` is replaced. Numbers that are tensors may be
  // of any floating type: those of f64 are not rounded to the parameter's half type.
  Tensor Next(size_t parameter, const Tensor& value, const Tensor& gradient,
              const std::vector<Operand>& numbers, std::vector<Tensor>* state) const;

 protected:
  Optimizer(const std::vector<ParameterGroup>& groups, double learning_rate, double weight_decay);

  // Of which the learning rate, with the schedule, is one. `step`: from 1.
  virtual std::vector<double> Numbers(double learning_rate, int64_t step) const = 0;
  virtual std::vector<Tensor> Numbers(const Tensor& learning_rate, const Tensor& step) const = 0;
  virtual Tensor Rule(const Tensor& value, const Tensor& gradient,
                      const std::vector<Operand>& numbers, double weight_decay,
                      std::vector<Tensor>* state) const = 0;
  // For constructors: every Step gives the first one.
  void RefuseUnless(bool fits, const std::string& text);

 private:
  struct Entry {
    double learning_rate = 0;  // 0: the optimizer's
    double weight_decay = 0;
    ParameterState state;   // without slots before the first step
    bool advanced = false;  // by the last step that it counts
  };
  // Zeros, where there are none.
  std::vector<Tensor> SlotsOf(size_t parameter, const Tensor& like) const;

  double learning_rate_;
  Schedule schedule_;
  absl::Status refused_;
  std::vector<Variable> parameters_;
  std::vector<Entry> entries_;  // by parameter
  Tensor pending_skips_;        // undefined: none
  Tensor skips_before_;         // what they were before Advance
};

// b <- momentum b + g + weight_decay p;  p <- p - rate b, with Nesterov's momentum
// p - rate (g + weight_decay p + momentum b). Without momentum b is nothing that is kept.
class Sgd : public Optimizer {
 public:
  struct Options {
    double learning_rate = 0.1;
    double momentum = 0;
    bool nesterov = false;
    double weight_decay = 0;
  };
  Sgd(const std::vector<Variable>& parameters, const Options& options)
      : Sgd(OneGroup(parameters), options) {}
  Sgd(const std::vector<ParameterGroup>& groups, const Options& options);
  int slots() const override { return options_.momentum == 0 ? 0 : 1; }

 protected:
  std::vector<double> Numbers(double learning_rate, int64_t step) const override;
  std::vector<Tensor> Numbers(const Tensor& learning_rate, const Tensor& step) const override;
  Tensor Rule(const Tensor& value, const Tensor& gradient, const std::vector<Operand>& numbers,
              double weight_decay, std::vector<Tensor>* state) const override;

 private:
  const Options options_;
};

// Kingma and Ba 2015: m and v, means of g and g^2 that forget;
// p <- p - rate (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon). The weights' decay is
// part of g, or, decoupled (Loshchilov and Hutter 2019: AdamW), p <- p - rate weight_decay p first.
class Adam : public Optimizer {
 public:
  struct Options {
    double learning_rate = 1e-3;
    double beta1 = 0.9;
    double beta2 = 0.999;
    double epsilon = 1e-8;
    double weight_decay = 0;
    bool decoupled = false;
    bool amsgrad = false;  // the largest v so far (Reddi et al. 2018)
  };
  Adam(const std::vector<Variable>& parameters, const Options& options)
      : Adam(OneGroup(parameters), options) {}
  Adam(const std::vector<ParameterGroup>& groups, const Options& options);
  int slots() const override { return options_.amsgrad ? 3 : 2; }

 protected:
  std::vector<double> Numbers(double learning_rate, int64_t step) const override;
  std::vector<Tensor> Numbers(const Tensor& learning_rate, const Tensor& step) const override;
  Tensor Rule(const Tensor& value, const Tensor& gradient, const std::vector<Operand>& numbers,
              double weight_decay, std::vector<Tensor>* state) const override;

 private:
  const Options options_;
};

// Adam with decoupled decay of 0.01, unless the options say otherwise.
class AdamW : public Adam {
 public:
  struct Options : Adam::Options {
    Options() {
      weight_decay = 0.01;
      decoupled = true;
    }
  };
  AdamW(const std::vector<Variable>& parameters, const Options& options)
      : Adam(parameters, options) {}
  AdamW(const std::vector<ParameterGroup>& groups, const Options& options)
      : Adam(groups, options) {}
};

// Duchi et al. 2011: s <- s + g^2;  p <- p - rate / (1 + (t - 1) decay) g / (sqrt(s) + epsilon).
class Adagrad : public Optimizer {
 public:
  struct Options {
    double learning_rate = 0.01;
    double learning_rate_decay = 0;
    double epsilon = 1e-10;
    double weight_decay = 0;
  };
  Adagrad(const std::vector<Variable>& parameters, const Options& options)
      : Adagrad(OneGroup(parameters), options) {}
  Adagrad(const std::vector<ParameterGroup>& groups, const Options& options);
  int slots() const override { return 1; }

 protected:
  std::vector<double> Numbers(double learning_rate, int64_t step) const override;
  std::vector<Tensor> Numbers(const Tensor& learning_rate, const Tensor& step) const override;
  Tensor Rule(const Tensor& value, const Tensor& gradient, const std::vector<Operand>& numbers,
              double weight_decay, std::vector<Tensor>* state) const override;

 private:
  const Options options_;
};

// Loss scaling (Micikevicius et al. 2018), as torch's GradScaler has it: a loss is multiplied by a
// scale before it is differentiated, so that gradients in f16 do not vanish, and gradients are
// divided by it. A step in which one of them is not finite is left out, and the scale becomes
// smaller; after `interval` steps without any it becomes larger. Where gradients are an
// AllReduce's, as in a TrainStep, all ranks leave out the same steps.
//
// In a TrainStep all of it happens in the step's graph: nobody reads anything. Call by call:
//   CHORUS_RETURN_IF_ERROR(Backward(scaler.Scale(loss)));
//   CHORUS_ASSIGN_OR_RETURN(const bool stepped, scaler.Step(&optimizer));   // waits
// Of several optimizers each takes its step behind one Scale, and each step counts for the scale.
// Parameters are f32 or f64 (master weights: CastParameters); f16's own gradients would vanish when
// they are divided. The loss too, or the scale makes it overflow.
class LossScaler {
 public:
  struct Options {
    double scale = 65536;  // the first one
    double growth = 2;
    double backoff = 0.5;
    int64_t interval = 2000;
  };
  LossScaler() : LossScaler(Options()) {}
  explicit LossScaler(const Options& options) : options_(options) {}

  Tensor Scale(const Tensor& loss, CallSite site = CallSite::Here());
  // Divides the optimizer's gradients by what the last Scale took, and steps with them, if all are
  // finite; else parameters and state stay, bit for bit. Whether it has stepped. Gradients are
  // gone.
  absl::StatusOr<bool> Step(Optimizer* optimizer, CallSite site = CallSite::Here());

  // What it goes on from, of no dimensions: the scale, f32; how many steps were finite since it
  // last changed, and how many were left out, i64. For checkpoints and compiled steps.
  struct State {
    Tensor scale;
    Tensor streak;
    Tensor skipped;
  };
  // The first one where there is none yet.
  const State& StateOn(const DeviceRef& device);
  void SetState(const State& state) { state_ = state; }

  // The rules, of which nothing of this object changes. Divides; gives whether all are finite, a
  // bool of no dimensions.
  static Tensor Unscale(std::vector<Tensor>* gradients, const Tensor& scale);
  State Next(const State& state, const Tensor& finite) const;

 private:
  const Options options_;
  State state_;
  Tensor scaled_by_;  // the scale of the last Scale; undefined before
};

// A mean of weights that forgets: average <- decay average + (1 - decay) p, from the first p on.
class Ema {
 public:
  Ema(const std::vector<Variable>& parameters, double decay)
      : parameters_(parameters), decay_(decay) {}
  void Update(CallSite site = CallSite::Here());
  // By parameter; empty before the first Update.
  const std::vector<Tensor>& averages() const { return averages_; }
  // Gives the parameters the averages, and takes what they were: once more puts them back.
  void Swap();

 private:
  const std::vector<Variable> parameters_;
  const double decay_;
  std::vector<Tensor> averages_;
};

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_OPTIM_H_
