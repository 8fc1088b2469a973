// Batch normalisation (Ioffe and Szegedy 2015).
//
// Threads: chorus/nn/module.h. Ownership: a layer owns its variables. Errors: in the results; sizes
//   that make no sense in a constructor come with Init and with every call.
#ifndef CHORUS_CLIENT_NN_BATCH_NORM_H_
#define CHORUS_CLIENT_NN_BATCH_NORM_H_

#include <cstdint>
#include <optional>
#include <string>

#include "chorus/nn/module.h"

namespace chorus {
namespace nn {

struct BatchNormOptions {
  double epsilon = 1e-5;
  // How much of a batch comes into the running statistics; none: they are the mean over all
  // batches.
  std::optional<double> momentum = 0.1;
  bool affine = true;  // with weight and bias
};

// [n, channels] or [n, channels, ...]: (x - mean) / sqrt(variance + epsilon) of each channel, times
// weight, plus bias. In training with the statistics of the batch, where the variance is that of
// all its values; two values of a channel at least. Each call then replaces the buffers
// running_mean and running_var, which begin with 0 and 1, by
//   (1 - momentum) running + momentum batch,
// with the batch's unbiased variance, and counts in num_batches_tracked. Else with the running
// ones. What a StateScope has for the buffers, a compiled step's inputs say, is replaced there.
class BatchNorm : public Module {
 public:
  explicit BatchNorm(int64_t channels, const BatchNormOptions& options = BatchNormOptions());
  Tensor Forward(const Tensor& x) override;
  std::string description() const override;
  // Undefined unless it is affine.
  const Variable& weight() const { return weight_; }
  const Variable& bias() const { return bias_; }
  const Variable& running_mean() const { return running_mean_; }
  const Variable& running_var() const { return running_var_; }
  const Variable& num_batches_tracked() const { return num_batches_tracked_; }

 private:
  // Of a batch, a number for each channel.
  void Track(const Tensor& mean, const Tensor& unbiased_variance);

  const int64_t channels_;
  const BatchNormOptions options_;
  Variable weight_;
  Variable bias_;
  Variable running_mean_;
  Variable running_var_;
  Variable num_batches_tracked_;
};

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_BATCH_NORM_H_
