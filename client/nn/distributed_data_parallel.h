// A module that ranks train together, a process each, as torch.nn.parallel has it: every rank calls
// it with rows of its own, and every rank's parameters get the mean of all ranks' gradients.
//
//   CHORUS_ASSIGN_OR_RETURN(auto model, chorus::nn::DistributedDataParallel::Create(block, world));
//   Tensor loss = chorus::nn::CrossEntropyLoss((*model)(images), labels);
//   CHORUS_RETURN_IF_ERROR(chorus::Backward(loss));
//   CHORUS_RETURN_IF_ERROR(optimizer.Step());
//
// **What is minimised is the mean of the ranks' losses**, as PyTorch has it, while the gradient of
// a tensor that ranks do not share is that of their sum (chorus.h). That is one rule: a parameter
// gets the mean over ranks of what Backward gives on each, so a module may have collectives of its
// own (SyncBatchNorm), and gradients of gradients are right too.
//
// A call hands the module its parameters through gates. Whatever reads a parameter past them, in
// what is differentiated together with a result of the call (a penalty, a decoder that is tied to
// the embedding), counts as if it read it in the module. What Backward differentiates without any
// result of a call gives each rank's own gradient: make it part of the loss.
//
// Where a parameter is cast (CastParameters, TrainStep::Options::compute) the gate stands before
// the cast, which the call makes again: the mean is of the master's gradients, in its type. One
// that is computed otherwise has its gate behind that, and what stands in grad() of the tensors
// that it was computed from goes into no mean (NoSync).
//
// When Backward, or Grad, has come to the first use of all parameters of a *bucket*, their mean
// over ranks is asked for, while other gradients are still to be computed. Buckets are calls and
// nothing else: no gradient is copied into one, and no bit depends on their sizes. In a compiled
// function all of it is part of the graph.
//
// As Backward adds to grad(), it takes the mean of what each rank has there with it. What an
// earlier mean has left is the same on all, and so in the mean what it was, but for rounding.
//
// Every rank calls it as often, and asks for gradients as often, a compiled step for those of the
// same parameters. One that does not is told of by name (chorus.h: kMismatch, or a late rank); Join
// is for ranks that have fewer inputs. A Backward or Grad that is refused makes some of its
// buckets' calls or none, so its rank is out of line until its next World::Step (chorus.h): begin
// each turn with one. After a World::Reform, Create it anew: survivors go on with the variables of
// the first of them.
//
// Threads: as chorus/nn/module.h; all calls for one Group must be ordered by the caller.
// Ownership: the module is a part of it, "module"; what the tape has of a call refers to it, so it
//   outlives Backward.
// Errors: returned, or in the tensor that is; with the line of the call. INVALID_ARGUMENT kBadType:
//   a module on another device than the group's member. FAILED_PRECONDITION kWrongState: one
//   without parameters yet, or parameters without a gradient (below), named. INVALID_ARGUMENT
//   kMismatch: modules that differ, by rank and parameter. Of a parameter that has failed: its own,
//   named.
#ifndef CHORUS_CLIENT_NN_DISTRIBUTED_DATA_PARALLEL_H_
#define CHORUS_CLIENT_NN_DISTRIBUTED_DATA_PARALLEL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "chorus/call_site.h"
#include "chorus/nn/module.h"
#include "chorus/nn/optim.h"
#include "chorus/session.h"
#include "chorus/tensor.h"

namespace chorus {
namespace nn {

// What becomes of a bucket's gradients: as many, of their types, every rank's the same. `gradients`
// are this rank's, a Backward's with what is in grad() already, also what an earlier mean has left;
// zeros where it has none. Of a parameter that a compiled step does not train a tensor of no
// elements, [0]. Each rank calls the same collectives.
using GradientHook = std::function<absl::StatusOr<std::vector<Tensor>>(
    const std::vector<Tensor>& gradients, const Group& group)>;
// Their mean, sent in bf16: half the bytes of f32, 8 bits of each gradient.
GradientHook MeanInBf16();
// Nothing: each rank goes on by its own, until AverageParameters (local SGD).
GradientHook KeepLocal();

// Every rank's parameters become their mean over ranks; waits for that. Where it fails they stay.
absl::Status AverageParameters(const Module& module, const Group& group,
                               CallSite site = CallSite::Here());

struct DistributedDataParallelOptions {
  // A bucket is full with so many bytes of gradients; the first one, of the parameters that are
  // used last, with fewer.
  int64_t bucket_bytes = int64_t{25} << 20;
  int64_t first_bucket_bytes = int64_t{1} << 20;
  // A loss may leave parameters out, others at each step and on each rank. Those that it depends on
  // nowhere keep the gradient that they have; on a rank that has not used it a parameter counts
  // with zeros. Ranks tell each other, and each Backward waits for that before it goes on. (Not in
  // a compiled function, where no parameter keeps what it has: its gradient is zeros.) Else a
  // parameter without gradient is an error.
  bool find_unused_parameters = false;
  // The same parameters are left out at every step: ranks tell each other at the first one alone.
  // Another one left out later is an error. In place of find_unused_parameters.
  bool static_graph = false;
  // Buffers are those of rank 0, before each call while gradients are on. Where that fails rank 0
  // keeps its own, and the others have them at the next call. What has failed in the module itself,
  // statistics of a batch that has, is to be Set anew on rank 0 (from a copy).
  bool broadcast_buffers = true;
  GradientHook hook;  // none: the mean
};

class DistributedDataParallel : public Module {
 public:
  // Compares the ranks' modules and gives all of them the variables of rank 0; waits for that.
  static absl::StatusOr<std::shared_ptr<DistributedDataParallel>> Create(
      std::shared_ptr<Module> module, const Group& group,
      const DistributedDataParallelOptions& options = {}, CallSite site = CallSite::Here());
  ~DistributedDataParallel() override;

  // The module's. Under NoGrad, or while all parameters that Create found unfrozen are frozen,
  // nothing else: no other rank need call.
  absl::StatusOr<parallel::Nest> Call(const parallel::Nest::Items& inputs,
                                      const parallel::Nest::Fields& keywords) override;
  Tensor Forward(const Tensor& x) override;
  std::string description() const override;

  Module& module() const { return *module_; }
  // The names of each bucket's parameters. From the second call on in the order in which rank 0 has
  // asked for gradients at the first, if it has; both calls wait to hear of it. Where one fails
  // before the order has come, the next asks for it again; where it has come to some ranks alone
  // every call is kMismatch (Create it anew). In a compiled function they stay as Create has made
  // them.
  std::vector<std::vector<std::string>> buckets() const;

  // While one lives, calls leave gradients where they are: Backward, whenever it comes, adds them
  // up on each rank, as often as that rank likes, and the next Backward of a call without it takes
  // the mean of what is there on each rank with it. What a rank has added up counts as used there
  // (find_unused_parameters, static_graph). A Backward that returns an error leaves that for the
  // next. Not in a compiled function, whose graph is the same with and without: a call that is
  // traced while one lives is kWrongState.
  class NoSync {
   public:
    explicit NoSync(DistributedDataParallel* model);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    DistributedDataParallel* const model_;
    const bool before_;
  };

  // While one lives, ranks may have different numbers of inputs. Each call then waits to hear which
  // ranks are still there. A rank that has no more calls Finish, in which it takes part with zeros
  // in what the others call here, until all have come to it: of what is in its grad() nothing goes
  // into their means, so what an earlier mean has left counts there for less (ClearGrads between
  // two means, or add up under NoSync; a step clears). (Not in other collectives of the module, as
  // those of SyncBatchNorm.) Each call outside of NoSync is followed by one Backward; where steps
  // are counted (World::Step), one begins before each.
  class Join {
   public:
    struct Options {
      // The mean is over all ranks, also those that have finished; else over those that have not. A
      // hook divides as it does.
      bool divide_by_all_ranks = true;
      // As soon as one rank has finished, the others' next call is an error, and Finish returns:
      // FAILED_PRECONDITION kWrongState, naming those that have.
      bool stop_at_first = false;
    };
    explicit Join(DistributedDataParallel* model) : Join(model, Options()) {}
    Join(DistributedDataParallel* model, const Options& options);
    ~Join();
    Join(const Join&) = delete;
    Join& operator=(const Join&) = delete;

    // Waits for the others' last steps. Then all ranks have the variables of one that has made the
    // most, and the state of its optimizer, where one is given (on every rank). A LossScaler stays
    // each rank's own, and has counted its own steps: give all the State of one.
    absl::Status Finish(Optimizer* optimizer = nullptr, CallSite site = CallSite::Here());

   private:
    friend class DistributedDataParallel;
    // Which ranks are still there, this one as it says.
    absl::Status Exchange(bool here, CallSite site);
    int live() const;
    // From the mean over all ranks to the one that is wanted.
    double scale() const;

    DistributedDataParallel* const model_;
    const Options options_;
    std::vector<int32_t> here_;  // by rank, at the last exchange
  };

 private:
  struct Bucket;
  class Pass;
  DistributedDataParallel(std::shared_ptr<Module> module, const Group& group,
                          const DistributedDataParallelOptions& options);
  absl::Status Start(CallSite site);
  // Fills buckets in this order of parameters, by index.
  void MakeBuckets(const std::vector<size_t>& order);
  // By what rank 0 sends, which at its first call has no order yet.
  absl::Status OrderBuckets(CallSite site);
  // What ranks do together before a call.
  absl::Status BeginPass(bool here, CallSite site);
  // Gives all ranks the root's buffers.
  absl::Status ShareBuffers(int root, CallSite site);
  absl::StatusOr<std::shared_ptr<Module>> Gated(CallSite site);
  // By trained_: which parameters have gradients on some rank, of those that this one's loss uses,
  // and those of which it may have added up gradients by itself.
  absl::StatusOr<std::vector<bool>> UsedAnywhere(const std::vector<bool>& used_here,
                                                 const std::vector<bool>& added_up, CallSite site);
  // A bucket's gradients, for all ranks: the mean times `scale`, or the hook's.
  absl::StatusOr<std::vector<Tensor>> Reduce(const std::vector<Tensor>& gradients, double scale,
                                             CallSite site) const;
  // What a rank without inputs does for a Backward of the others.
  absl::Status TakePart(CallSite site);

  Module* const module_;
  const Group group_;
  const DistributedDataParallelOptions options_;
  const std::vector<NamedVariable> variables_;
  std::vector<size_t> trained_;  // of variables_: parameters that are not frozen, at Create
  std::vector<int64_t> bytes_;   // of each one's gradient
  // What buffers were at Create. Ranks that are not the root give these to a broadcast, of which
  // nobody reads them: their own may have failed by an earlier one.
  std::vector<Tensor> sound_buffers_;
  std::vector<Bucket> buckets_;  // in the order in which their gradients are asked for
  // As Create made them, for traces: ranks may make theirs before buckets_ are ordered or behind.
  std::vector<Bucket> traced_buckets_;
  // Of trained_, by the last Backward: the order of the first op that used it.
  std::vector<uint64_t> first_uses_;
  // With static_graph, once known, by trained_: used here, and anywhere.
  std::vector<bool> used_here_;
  std::vector<bool> used_anywhere_;
  bool syncs_ = true;
  bool adds_up_ = false;  // a call has been made under NoSync, whose Backward may come at any time
  bool is_called_ = false;  // outside of traces, and all ranks were there
  bool ordered_ = false;    // buckets_, as on rank 0
  Join* join_ = nullptr;
};

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_DISTRIBUTED_DATA_PARALLEL_H_
