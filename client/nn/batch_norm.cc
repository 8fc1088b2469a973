#include "chorus/nn/batch_norm.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "chorus/functional/math.h"
#include "chorus/nn/init.h"
#include "client/internal/local.h"

namespace chorus {
namespace nn {

using internal::IsUsable;
using internal::TypeText;

BatchNorm::BatchNorm(int64_t channels, const BatchNormOptions& options)
    : Module("BatchNorm"), channels_(channels), options_(options) {
  if (options.affine) {
    weight_ = AddParameter("weight", {channels}, init::Ones());
    bias_ = AddParameter("bias", {channels}, init::Zeros());
  }
  running_mean_ = AddBuffer("running_mean", {channels}, init::Zeros());
  running_var_ = AddBuffer("running_var", {channels}, init::Ones());
  num_batches_tracked_ = AddBuffer("num_batches_tracked", {}, init::Zeros(), DType::kI64);
}

void BatchNorm::Track(const Tensor& mean, const Tensor& unbiased_variance) {
  num_batches_tracked_.Set(num_batches_tracked_() + 1);
  const auto replace = [this](const Variable& running, const Tensor& batch) {
    const Tensor before = running();
    if (options_.momentum.has_value()) {
      running.Set(before * (1 - *options_.momentum) + batch * *options_.momentum);
      return;
    }
    const Tensor count = Cast(num_batches_tracked_(), before.dtype());
    running.Set(before * ((count - 1) / count) + batch / count);
  };
  replace(running_mean_, mean);
  replace(running_var_, unbiased_variance);
}

Tensor BatchNorm::Forward(const Tensor& x) {
  const CallSiteScope lines(site());
  if (!IsUsable(x)) return x * 1;
  if (x.shape().size() < 2 || x.shape()[1] != channels_) {
    return Refuse(x, absl::StrCat("expected [n, ", channels_, ", ...], got ", TypeText(x)));
  }
  Shape per_channel(x.shape().size() - 1, 1);
  per_channel[0] = channels_;
  Tensor centered;
  Tensor variance;
  if (training()) {
    std::vector<int64_t> others = {0};
    int64_t count = x.shape()[0];
    for (size_t d = 2; d < x.shape().size(); ++d) {
      others.push_back(static_cast<int64_t>(d));
      count *= x.shape()[d];
    }
    if (count < 2) {
      return Refuse(x, absl::StrCat("expected two values of a channel at least, in training, got ",
                                    TypeText(x)));
    }
    const Tensor mean = Mean(x, others, /*keep_dims=*/true);
    centered = x - mean;
    variance = Mean(centered * centered, others, /*keep_dims=*/true);
    const double values = static_cast<double>(count);
    Track(Reshape(mean, {channels_}), Reshape(variance, {channels_}) * (values / (values - 1)));
  } else {
    centered = x - Reshape(running_mean_(), per_channel);
    variance = Reshape(running_var_(), per_channel);
  }
  const Tensor y = centered * Rsqrt(variance + options_.epsilon);
  if (!weight_.defined()) return y;
  return y * Reshape(weight_(), per_channel) + Reshape(bias_(), per_channel);
}

std::string BatchNorm::description() const {
  return absl::StrCat(channels_, ", epsilon=", options_.epsilon, ", momentum=",
                      options_.momentum.has_value() ? absl::StrCat(*options_.momentum) : "none");
}

}  // namespace nn
}  // namespace chorus
