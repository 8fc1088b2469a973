// A training step as one compiled request: forward, loss, gradients, their mean over the ranks, and
// the optimizer's update. The module's variables and the optimizer's state are named inputs and
// outputs of it: nobody counts indices.
//
//   chorus::nn::TrainStep step(&model, &optimizer, [&](const std::vector<Tensor>& in) {
//     return chorus::nn::CrossEntropyLoss(model(in[0]), in[1]);
//   });
//   CHORUS_ASSIGN_OR_RETURN(Tensor loss, step({images, labels}));
//
// Among ranks what is minimised is the mean of the ranks' losses, as DistributedDataParallel has
// it; so equal shards give what one rank gives that has them all. (What Backward and Grad
// differentiate is the sum: chorus.h.) A parameter that the loss does not depend on has gradient 0.
// Ranks train the same parameters. Their optimizers may have them in different orders; what
// `on_gradients` adds up then differs by rank in its last bits.
//
// A step that is refused on one rank counts as a compiled function's run does (chorus/compile.h),
// and the other ranks are told, whose steps fail then: go on from a copy, or by World::Step.
//
// Threads: one at a time. Ownership: the module, the optimizer and what the loss captures outlive
//   it; while a step is under way they are the step's. Errors: returned, or in the loss; a step
//   that fails at once leaves module and optimizer as they were. INVALID_ARGUMENT kBadType: a
//   parameter of the optimizer that is none of the module's, or is frozen at the time of the step.
//   FAILED_PRECONDITION kWrongState: a variable that is not there yet; parameters of one learning
//   rate that have had different numbers of steps.
#ifndef CHORUS_CLIENT_NN_TRAIN_STEP_H_
#define CHORUS_CLIENT_NN_TRAIN_STEP_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "chorus/call_site.h"
#include "chorus/compile.h"
#include "chorus/nn/module.h"
#include "chorus/nn/optim.h"
#include "chorus/session.h"
#include "chorus/tensor.h"

namespace chorus {
namespace nn {

class TrainStep {
 public:
  // One number, of the inputs of a call: this rank's loss. What it Sets of the module is kept, as
  // call by call, in the dtype that it has it in (Options::compute: an average of parameters
  // belongs in a buffer, which is not cast); it may not Set what the optimizer trains
  // (kWrongState).
  using Loss = std::function<Tensor(const std::vector<Tensor>& inputs)>;
  struct Options {
    Options() = default;
    Options(const Group& group) : ranks(group) {}  // implicit

    // The ranks that train together; none: this one alone. The first call gives all of them the
    // first one's variables, after which they are equal but for buffers, and for
    // parameters that the loss itself Sets, which stay each rank's own.
    absl::optional<Group> ranks;
    // Of the inputs: CompileOptions, with indices in what the loss gets.
    std::vector<CompileOptions::Varying> varying;
    int64_t max_size = 0;
    // Of layers that drop (RandomScope): with the number of the step as the offset, so every step
    // has numbers of its own. Ranks that are to drop differently take different ones.
    uint64_t seed = 0;
    // Mixed precision: what the loss has for parameters is their copies in this dtype, bf16 or f16.
    // The module's own are the master weights, of which the optimizer and checkpoints are; buffers
    // stay as they are. Inputs are the caller's to Cast, and so is the loss, to f32.
    DType compute = DType::kUnspecified;
    // Scales the loss, and leaves out the steps whose gradients are not finite on any rank:
    // parameters and optimizer state stay, bit for bit, and rules that count steps do not count
    // them. Buffers are what the loss has set, as in PyTorch. Schedules and `steps` count them:
    // only the device knows. How many they were is the optimizer's to keep (Optimizer::skipped), so
    // one scaler may serve several steps. It outlives this.
    LossScaler* scaler = nullptr;
    // What is done to the gradients, by parameter, before the update: clipping.
    std::function<void(std::vector<Tensor>* gradients)> on_gradients;
  };

  TrainStep(Module* module, Optimizer* optimizer, Loss loss)
      : TrainStep(module, optimizer, std::move(loss), Options()) {}
  TrainStep(Module* module, Optimizer* optimizer, Loss loss, const Options& options);
  TrainStep(const TrainStep&) = delete;
  TrainStep& operator=(const TrainStep&) = delete;

  // The mean of the ranks' losses before the update. Returns at once, like any op; parameters are
  // replaced by results that are on their way. Once a step has failed later on, what came after it
  // has its error: go on from a copy (a checkpoint).
  //
  // A copy has the optimizer's State with its counts of steps, and `steps`. Where variables alone
  // are Set to what they were before the last step, when that is known to have failed, the next
  // call takes its counts back: so they are those of a rank that was refused it at once.
  absl::StatusOr<Tensor> operator()(const std::vector<Tensor>& inputs,
                                    CallSite site = CallSite::Here());
  // How many there have been: what layers that drop draw by, besides the seed.
  int64_t steps() const { return steps_; }
  // Goes on from a checkpoint.
  void SetSteps(int64_t steps) {
    steps_ = steps;
    counts_last_ = false;
  }
  // How often the loss has been traced: once for each list of types of the inputs, and of modes
  // (Train, Eval; what hooks and ShareBatches have made of it) of the module's tree; of 16 of the
  // latter graphs are kept at a time.
  int traces() const;

 private:
  // Whether the module can be trained as it is.
  absl::Status Check() const;
  // The last step's counts, where it has failed and variables have been Set since.
  void TakeBackCounts();
  // What goes into the compiled function, but for the caller's inputs.
  absl::StatusOr<std::vector<Tensor>> Inputs();
  std::vector<Tensor> Trace(const std::vector<Tensor>& in) const;
  // Of the tree: what a trace of it depends on.
  static void AppendModes(Module* module, std::vector<int64_t>* modes);
  // The function in the modes that the module's tree has now.
  const Compiled& CompiledInModes();
  // The first rank's variables, for all; unless `check` is an error, of which the ranks are told.
  absl::Status Share(const absl::Status& check, CallSite site) const;

  Module* const module_;
  Optimizer* const optimizer_;
  const Loss loss_;
  const Options options_;
  // Of the compiled function, in this order: inputs are the variables, the optimizer's state by
  // parameter, its numbers by rate (with a scaler: the rate, and which step it is if none that is
  // pending was left out), the number of the step, the scaler's state with the optimizer's pending
  // skips, and the caller's; results the loss, the variables, and both states.
  const std::vector<Variable> variables_;
  std::vector<size_t> trained_;  // by parameter of the optimizer: its index in variables_
  std::vector<size_t> rate_of_;  // by parameter of the optimizer: those with one have equal numbers
  std::vector<size_t> first_of_;  // by rate: the first parameter of it
  size_t numbers_ = 0;            // of each rate
  absl::Status refused_;
  int64_t steps_ = 0;
  // Of the last step that counts, so far:
  bool counts_last_ = false;                        // steps_ has it
  Tensor last_loss_;                                // undefined: there is nothing to take back
  std::weak_ptr<internal::TensorImpl> last_value_;  // of the first parameter
  bool shared_ = false;                             // all ranks have the first one's variables
  CompileOptions compile_;
  // By the modes of the tree, and its revisions: a graph has those that it was traced in.
  std::map<std::vector<int64_t>, Compiled> compiled_;
  int forgotten_traces_ = 0;  // of those that were in compiled_
};

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_TRAIN_STEP_H_
