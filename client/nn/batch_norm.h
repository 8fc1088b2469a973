// Batch normalisation (Ioffe and Szegedy 2015).
//
// Threads: chorus/nn/module.h. Ownership: a layer owns its variables. Errors: in the results; sizes
//   that make no sense in a constructor come with Init and with every call.
#ifndef CHORUS_CLIENT_NN_BATCH_NORM_H_
#define CHORUS_CLIENT_NN_BATCH_NORM_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "chorus/nn/module.h"
#include "chorus/session.h"

namespace chorus {
namespace nn {

class ReplicaScope;

struct BatchNormOptions {
  double epsilon = 1e-5;
  // How much of a batch comes into the running statistics; none: they are the mean over all
  // batches.
  std::optional<double> momentum = 0.1;
  bool affine = true;  // with weight and bias

  // Whose batches are one in training, and have one mean and one variance: torch's SyncBatchNorm.
  // The ranks of a group, which all call it then (chorus/collectives.h); this rank is one of them.
  std::optional<Group> ranks;
  // The replicas of a DataParallel that calls it. With `ranks`: those of all of them, on as many
  // devices each, of which the first one is the rank's.
  bool replicas = false;
};

// [n, channels] or [n, channels, ...]: (x - mean) / sqrt(variance + epsilon) of each channel, times
// weight, plus bias. In training with the statistics of the batch, where the variance is that of
// all its values; two values of a channel at least, but in a function whose batch varies
// (CompileOptions::varying), where one has the variance 0. Each call then replaces the buffers
// running_mean and running_var, which begin with 0 and 1, by
//   (1 - momentum) running + momentum batch,
// with the batch's unbiased variance, and counts in num_batches_tracked; not one whose result has
// failed when it returns. Else with the running ones. What a StateScope has for the buffers, a
// compiled step's inputs say, is replaced there. Half types are computed in f32, and rounded once.
//
// A batch that several have in common is every value's, however many rows each one has, none
// included; where there is one value in all, the variance is 0, and where there is none the buffers
// stay as they are. It takes one AllGather of 2 channels + 1 numbers, and each call on one of them
// must come with one on the others, also where it is refused: they are told. All get the same bits.
// Gradients are those of the whole batch, to any order, of the sum of the losses (chorus/chorus.h):
// one ReduceScatter, for which a loss of each rank, or of a result that DataParallel has gathered,
// asks.
class BatchNorm : public Module {
 public:
  explicit BatchNorm(int64_t channels, const BatchNormOptions& options = BatchNormOptions());
  Tensor Forward(const Tensor& x) override;
  std::string description() const override;
  // BatchNormOptions::ranks, from now on.
  void ShareBatch(const Group& ranks) {
    options_.ranks = ranks;
    NoteChange();
  }
  // Undefined unless it is affine.
  const Variable& weight() const { return weight_; }
  const Variable& bias() const { return bias_; }
  const Variable& running_mean() const { return running_mean_; }
  const Variable& running_var() const { return running_var_; }
  const Variable& num_batches_tracked() const { return num_batches_tracked_; }

 private:
  // Of a batch, a number for each channel. Where `has_rows` says no, it changes nothing; undefined:
  // it has.
  void Track(const Tensor& mean, const Tensor& unbiased_variance,
             const Tensor& has_rows = Tensor());
  // Those of which it is one; null: it is the only one that has the batch, or they have nothing in
  // common.
  ReplicaScope* replicas() const;
  bool shares() const;
  int ReplicaIndex(const ReplicaScope& scope) const;
  // The rows of all ranks and replicas that share a batch, from this one's.
  Tensor GatherRows(const Tensor& row) const;
  // The mean, the variance and the unbiased variance of their values, and whether there are any.
  struct Statistics {
    Tensor mean;
    Tensor variance;
    Tensor unbiased;
    Tensor has_rows;
  };
  Statistics OfAll(const Tensor& x) const;
  // `refused`, of which the ranks that wait have been told: in the place of the rank's AllGather.
  Tensor Tell(const Tensor& refused) const;

  const int64_t channels_;
  BatchNormOptions options_;
  Variable weight_;
  Variable bias_;
  Variable running_mean_;
  Variable running_var_;
  Variable num_batches_tracked_;
};

// Every BatchNorm of the tree: its ShareBatch. (torch's convert_sync_batchnorm.) Of a clone those
// of its original, which shares from now on as its other clones do: they have one code.
void ShareBatches(Module* module, const Group& ranks);

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_BATCH_NORM_H_
