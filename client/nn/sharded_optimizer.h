// An optimizer whose state is spread over the ranks that train together (ZeRO, stage 1: Rajbhandari
// et al. 2020): each keeps, and updates, one piece of all parameters.
//
//   chorus::nn::ShardedOptimizer optimizer(model.parameters(), world, [](const auto& pieces) {
//     return std::make_unique<chorus::nn::AdamW>(pieces, chorus::nn::AdamW::Options());
//   });
//   CHORUS_RETURN_IF_ERROR(chorus::Backward(loss));   // of this rank alone
//   CHORUS_RETURN_IF_ERROR(optimizer.Step());
//
// A step is one reduce-scatter of the gradients, which are this rank's own, to their mean over
// ranks, the rule on a piece, and one all-gather of the parameters; each is one coalesced call for
// all of them. It gives the bits that
// DistributedDataParallel and the same optimizer on each rank give: rules go element by element,
// and the mean is taken in the same tree.
//
// A call that is refused on one rank has changed nothing there, and counts like any other; the
// other ranks are told (chorus.h): their parameters carry the error, and they go on from a copy. Of
// the state too: it may have gone on by that step, on those ranks alone, and then carries no error.
//
// After a World::Reform make it anew: a piece of its state went with the rank that is gone, but for
// what was gathered before (Gather).
//
// Threads: one at a time; calls for one Group must be ordered by the caller. Ownership: it shares
//   the parameters that it was given. Errors: returned, with the line of the call; or in the
//   parameters' tensors. FAILED_PRECONDITION kWrongState: its ranks were reformed; a parameter that
//   is not there yet; state for Scatter whose parameters of one group and dtype have had different
//   numbers of steps: a piece of them has one. INVALID_ARGUMENT kBadType: a parameter that is given
//   twice, or is frozen, at the time of a step; another kind of optimizer for Gather and Scatter,
//   or one of other parameters. INVALID_ARGUMENT kMismatch: ranks whose groups, dtypes or shapes
//   differ, by rank and parameter.
#ifndef CHORUS_CLIENT_NN_SHARDED_OPTIMIZER_H_
#define CHORUS_CLIENT_NN_SHARDED_OPTIMIZER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
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

class ShardedOptimizer {
 public:
  // Of the pieces, which have the options of the groups that they are of.
  using Make = std::function<std::unique_ptr<Optimizer>(const std::vector<ParameterGroup>& pieces)>;
  ShardedOptimizer(const std::vector<Variable>& parameters, const Group& ranks, Make make)
      : ShardedOptimizer(OneGroup(parameters), ranks, std::move(make)) {}
  ShardedOptimizer(const std::vector<ParameterGroup>& groups, const Group& ranks, Make make);
  ~ShardedOptimizer();

  // Replaces each parameter, by grad() of each on every rank; one that has none counts with zeros.
  // It starts from what the parameter is by then, also where that has been Set since the last step
  // (LoadCheckpoint, Ema::Swap). Every rank calls, with its parameters in the same order: the first
  // call, or Gather, compares groups, dtypes and shapes, and waits for that; which of equal shapes
  // is which the ranks alone know. The others return at once, like an op.
  absl::Status Step(CallSite site = CallSite::Here());
  void ClearGrads() const;

  // The one of this rank's pieces, for its learning rate and schedule; null before the first call.
  Optimizer* pieces() const { return optimizer_.get(); }

  // The state of all parameters to, or from, an optimizer of them all, in whatever order, of the
  // same kind: what a checkpoint has, for any number of ranks. Every rank calls; Scatter with the
  // same state. Gather is one coalesced all-gather, where there are tensors to keep; Scatter asks
  // no other rank.
  absl::Status Gather(Optimizer* whole, CallSite site = CallSite::Here());
  absl::Status Scatter(Optimizer* whole, CallSite site = CallSite::Here());

 private:
  struct Flat;
  class Pieces;
  // Takes this rank's piece anew where a parameter has been Set since.
  void TakePiece(Flat* flat) const;
  // The piece has the elements that the parameters have now.
  void NoteSources(Flat* flat) const;
  // That the pieces are those of the ranks that there are. All ranks are told alike, so nobody
  // waits.
  absl::Status CheckRanks() const;
  // Makes the pieces, once parameters are there.
  absl::Status Start(CallSite site);
  // Whether all ranks have these parameters; unless `status` is an error, of which they are told.
  absl::Status Compare(const absl::Status& status, CallSite site);
  // Where each parameter, by its index, is among those of `whole`, which is to be of the same kind.
  absl::Status FindIn(const Optimizer& whole, std::vector<size_t>* index_in_whole) const;
  // Of the pieces; or the error that `status` is.
  absl::StatusOr<std::vector<Optimizer::ParameterState>> StateAfter(
      const absl::Status& status) const;
  // All elements of `tensors`, one for each of the flat's parameters, one after the other.
  Tensor Join(const Flat& flat, const std::vector<Tensor>& tensors) const;
  // This rank's piece of that.
  Tensor OwnPiece(const Flat& flat, const Tensor& joined) const;
  // The tensors of all ranks' pieces, one after the other.
  std::vector<Tensor> Parts(const Flat& flat, const Tensor& joined) const;
  // A coalesced collective of `operands`; where *status is an error, of one that carries it. Its
  // results' errors, too, come into *status.
  using Collective = std::function<std::vector<Tensor>(const std::vector<Tensor>& operands)>;
  std::vector<Tensor> Call(const Collective& collective, std::vector<Tensor> operands,
                           absl::Status* status) const;
  // The same, of all ranks' pieces.
  std::vector<Tensor> AllGatherPieces(std::vector<Tensor> pieces, absl::Status* status) const;

  const std::vector<ParameterGroup> groups_;
  const Group ranks_;
  const Make make_;
  std::vector<Flat> flats_;
  std::unique_ptr<Pieces> pieces_;
  std::unique_ptr<Optimizer> optimizer_;
  int64_t reforms_ = 0;  // of the ranks, before the pieces were made
  bool compared_ = false;
};

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_SHARDED_OPTIMIZER_H_
