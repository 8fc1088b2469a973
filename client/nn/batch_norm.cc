#include "chorus/nn/batch_norm.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "chorus/autograd.h"
#include "chorus/collectives.h"
#include "chorus/functional/math.h"
#include "chorus/functional/shape.h"
#include "chorus/math.h"
#include "chorus/nn/init.h"
#include "chorus/parallel.h"
#include "client/internal/local.h"
#include "client/nn/replicas.h"

namespace chorus {
namespace nn {

using internal::IsUsable;
using internal::TypeText;

namespace {

Tensor AsType(const Tensor& x, DType dtype) { return x.dtype() == dtype ? x : Cast(x, dtype); }

}  // namespace

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
    const Tensor seen = AsType(batch, before.dtype());
    if (options_.momentum.has_value()) {
      running.Set(before * (1 - *options_.momentum) + seen * *options_.momentum);
      return;
    }
    const Tensor count = Cast(num_batches_tracked_(), before.dtype());
    running.Set(before * ((count - 1) / count) + seen / count);
  };
  replace(running_mean_, mean);
  replace(running_var_, unbiased_variance);
}

bool BatchNorm::shares() const {
  return options_.ranks.has_value() || (options_.replicas && ReplicaScope::Innermost() != nullptr &&
                                        ReplicaScope::Innermost()->count() > 1);
}

Tensor BatchNorm::GatherRows(const Tensor& row) const {
  ReplicaScope* const scope = options_.replicas ? ReplicaScope::Innermost() : nullptr;
  if (scope == nullptr || scope->count() == 1) return AllGatherIntoTensor(row, *options_.ranks);
  const parallel::DeviceGroup& devices = scope->devices();
  const int index = devices.IndexOf(row.device());
  if (index < 0) return Refuse(row, "its input is on none of the devices of the DataParallel");
  scope->NoteCall();
  // The last replica calls for the devices that have none, and keeps nothing of what they get: but
  // it is there, so that whoever differentiates the result takes part for them.
  const int first = index + 1 == scope->count() ? index + 1 : devices.size();
  const auto call = [&](const Tensor& own, const auto& collective) {
    std::vector<Tensor> parts = {collective(own, devices.world(index))};
    for (int d = first; d < devices.size(); ++d) {
      const Tensor theirs =
          collective(Zeros(devices.device(d), own.dtype(), own.shape()), devices.world(d));
      parts.push_back(CopyTo(Slice(theirs, 0, 0, 0), own.device()));
    }
    return parts.size() == 1 ? parts[0] : Concat(parts, 0);
  };
  Tensor all =
      call(row, [](const Tensor& x, const Group& group) { return AllGatherIntoTensor(x, group); });
  if (!options_.ranks.has_value()) return all;
  // The first device has the rank's member; the others have it of that one. What they have gathered
  // takes part in the gradient, with none of its rows.
  all = index == 0
            ? AllGatherIntoTensor(all, *options_.ranks)
            : Concat({Slice(all, 0, 0, 0),
                      Zeros(row.device(), row.dtype(),
                            {int64_t{options_.ranks->size()} * devices.size(), row.shape()[1]})},
                     0);
  return call(all, [](const Tensor& x, const Group& group) { return Broadcast(x, 0, group); });
}

// By each one's mean, sum of squares about it, and count: no difference of large numbers (Chan,
// Golub and LeVeque 1979). The count is no number of the program, for a batch may vary.
BatchNorm::Statistics BatchNorm::OfAll(const Tensor& x, const std::vector<int64_t>& others) const {
  Tensor count = Full(x.device(), DType::kI64, {}, 1);
  for (const int64_t axis : others) {
    const int64_t size = x.shape()[static_cast<size_t>(axis)];
    count = count * Sum(Full(x.device(), DType::kI64, {size}, 1));
  }
  count = Cast(count, x.dtype());
  const Tensor own = Sum(x, others, /*keep_dims=*/true) / ClampMin(count, 1);
  const Tensor centered = x - own;
  const Tensor row =
      Concat({Reshape(own, {1, channels_}),
              Reshape(Sum(centered * centered, others), {1, channels_}), Reshape(count, {1, 1})},
             1);
  const Tensor all = GatherRows(row);
  if (!IsUsable(all)) return {all, all, all};
  const std::vector<Tensor> parts = Split(all, {channels_, channels_, 1}, 1);
  const Tensor& means = parts[0];
  const Tensor total = ClampMin(Sum(parts[2]), 1);
  const Tensor shares = parts[2] / total;
  const Tensor mean = Sum(means * shares, 0);
  const Tensor apart = means - mean;
  const Tensor squares = Sum(parts[1] + apart * apart * parts[2], 0);
  return {mean, squares / total, squares / ClampMin(total - 1, 1)};
}

Tensor BatchNorm::Tell(const Tensor& refused) const {
  return training() && options_.ranks.has_value() ? AllGatherIntoTensor(refused, *options_.ranks)
                                                  : refused;
}

Tensor BatchNorm::Forward(const Tensor& x) {
  const CallSiteScope lines(site());
  if (!IsUsable(x)) return Tell(x * 1);
  if (x.shape().size() < 2 || x.shape()[1] != channels_) {
    return Tell(Refuse(x, absl::StrCat("expected [n, ", channels_, ", ...], got ", TypeText(x))));
  }
  const bool is_half = x.dtype() == DType::kF16 || x.dtype() == DType::kBF16;
  const DType dtype = is_half ? DType::kF32 : x.dtype();
  const Tensor values = AsType(x, dtype);
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
    if (shares()) {
      const Statistics all = OfAll(values, others);
      if (!IsUsable(all.mean)) return all.mean;
      centered = values - Reshape(all.mean, per_channel);
      variance = Reshape(all.variance, per_channel);
      Track(all.mean, all.unbiased);
    } else {
      if (count < 2) {
        return Refuse(x,
                      absl::StrCat("expected two values of a channel at least, in training, got ",
                                   TypeText(x)));
      }
      const Tensor mean = Mean(values, others, /*keep_dims=*/true);
      centered = values - mean;
      variance = Mean(centered * centered, others, /*keep_dims=*/true);
      const double n = static_cast<double>(count);
      Track(Reshape(mean, {channels_}), Reshape(variance, {channels_}) * (n / (n - 1)));
    }
  } else {
    centered = values - Reshape(AsType(running_mean_(), dtype), per_channel);
    variance = Reshape(AsType(running_var_(), dtype), per_channel);
  }
  const Tensor y = centered * Rsqrt(variance + options_.epsilon);
  if (!weight_.defined()) return AsType(y, x.dtype());
  return AsType(y * Reshape(AsType(weight_(), dtype), per_channel) +
                    Reshape(AsType(bias_(), dtype), per_channel),
                x.dtype());
}

std::string BatchNorm::description() const {
  return absl::StrCat(
      channels_, ", epsilon=", options_.epsilon,
      ", momentum=", options_.momentum.has_value() ? absl::StrCat(*options_.momentum) : "none",
      options_.ranks.has_value() ? absl::StrCat(", ranks=", options_.ranks->size()) : "",
      options_.replicas ? ", replicas" : "");
}

void ShareBatches(Module* module, const Group& ranks) {
  auto* const norm = dynamic_cast<BatchNorm*>(module);
  if (norm != nullptr) norm->ShareBatch(ranks);
  for (const Module::Child& child : module->children()) ShareBatches(child.module.get(), ranks);
}

}  // namespace nn
}  // namespace chorus
