#include "chorus/nn/batch_norm.h"

#include <functional>
#include <numeric>
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
#include "client/internal/trace.h"
#include "client/nn/compute_type.h"
#include "client/nn/normalize.h"
#include "client/nn/replicas.h"

namespace chorus {
namespace nn {

using internal::IsUsable;
using internal::TracesSizes;
using internal::TypeText;

namespace {

// How many values each channel of x has, by the device: no number of the program, for a batch may
// vary.
Tensor CountOf(const Tensor& x) {
  Tensor count = Full(x.device(), DType::kI64, {}, 1);
  for (size_t axis = 0; axis < x.shape().size(); ++axis) {
    if (axis == 1) continue;
    count = count * Sum(Full(x.device(), DType::kI64, {x.shape()[axis]}, 1));
  }
  return count;
}

// n / (n - 1) of the n values that each channel of x has. Both ways have the same bits.
Operand Unbiasing(const Tensor& x, int64_t count) {
  if (!TracesSizes()) {
    const auto n = static_cast<double>(count);
    return n / (n - 1);
  }
  const Tensor n = Cast(CountOf(x), DType::kF64);
  return Cast(n / ClampMin(n - 1, 1), x.dtype());
}

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

void BatchNorm::Track(const Tensor& mean, const Tensor& unbiased_variance, const Tensor& has_rows) {
  const auto set = [&has_rows](const Variable& variable, const Tensor& after) {
    variable.Set(has_rows.defined() ? Where(has_rows, after, variable()) : after);
  };
  set(num_batches_tracked_, num_batches_tracked_() + 1);
  const auto replace = [&](const Variable& running, const Tensor& batch) {
    set(running, InComputeType(running(), [&](const Tensor& before) {
          const Tensor value = AsType(batch, before.dtype());
          if (options_.momentum.has_value()) {
            return before * (1 - *options_.momentum) + value * *options_.momentum;
          }
          const Tensor count = Cast(num_batches_tracked_(), before.dtype());
          return before * ((count - 1) / count) + value / count;
        }));
  };
  replace(running_mean_, mean);
  replace(running_var_, unbiased_variance);
}

ReplicaScope* BatchNorm::replicas() const {
  ReplicaScope* const scope = options_.replicas ? ReplicaScope::Innermost() : nullptr;
  if (scope == nullptr) return nullptr;
  // Other ranks may have rows for more replicas, and then gather those of all devices.
  return scope->count() == 1 && !options_.ranks.has_value() ? nullptr : scope;
}

bool BatchNorm::shares() const { return options_.ranks.has_value() || replicas() != nullptr; }

int BatchNorm::ReplicaIndex(const ReplicaScope& scope) const {
  return scope.devices().IndexOf(running_mean_().device());
}

Tensor BatchNorm::GatherRows(const Tensor& row) const {
  ReplicaScope* const scope = replicas();
  if (scope == nullptr) return AllGatherIntoTensor(row, *options_.ranks);
  const parallel::DeviceGroup& devices = scope->devices();
  const int index = ReplicaIndex(*scope);
  if (index < 0) return Tell(Refuse(row, "it is on none of the devices of the DataParallel"));
  scope->NoteCall();
  // The last replica calls for the devices that have none, and keeps nothing of what they get: but
  // it is there, so that a call that differentiates the result takes part for them.
  const int first = index + 1 == scope->count() ? index + 1 : devices.size();
  const auto call = [&](const Tensor& operand, const auto& collective) {
    std::vector<Tensor> parts = {collective(operand, devices.world(index))};
    for (int d = first; d < devices.size(); ++d) {
      const Tensor theirs =
          collective(Zeros(devices.device(d), operand.dtype(), operand.shape()), devices.world(d));
      parts.push_back(CopyTo(Slice(theirs, 0, 0, 0), operand.device()));
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
                            {int64_t{options_.ranks->size()} * devices.size(), 2 * channels_ + 1})},
                     0);
  return call(all, [](const Tensor& x, const Group& group) { return Broadcast(x, 0, group); });
}

// By each one's mean, sum of squares about it, and count: no difference of large numbers (Chan,
// Golub and LeVeque 1979).
BatchNorm::Statistics BatchNorm::OfAll(const Tensor& x) const {
  std::vector<int64_t> others;
  for (size_t axis = 0; axis < x.shape().size(); ++axis) {
    if (axis != 1) others.push_back(static_cast<int64_t>(axis));
  }
  const Tensor count = Cast(CountOf(x), x.dtype());
  const Tensor own_mean = Sum(x, others, /*keep_dims=*/true) / ClampMin(count, 1);
  const Tensor centered = x - own_mean;
  const Tensor row =
      Concat({Reshape(own_mean, {1, channels_}),
              Reshape(Sum(centered * centered, others), {1, channels_}), Reshape(count, {1, 1})},
             1);
  const Tensor all = GatherRows(row);
  if (!IsUsable(all)) return {all, all, all, all};
  const std::vector<Tensor> parts = Split(all, {channels_, channels_, 1}, 1);
  const Tensor& means = parts[0];
  const Tensor counted = Sum(parts[2]);
  const Tensor total = ClampMin(counted, 1);
  const Tensor shares = parts[2] / total;
  const Tensor mean = Sum(means * shares, 0);
  const Tensor apart = means - mean;
  const Tensor squares = Sum(parts[1] + apart * apart * parts[2], 0);
  return {mean, squares / total, squares / ClampMin(total - 1, 1), Greater(counted, 0)};
}

Tensor BatchNorm::Tell(const Tensor& refused) const {
  const ReplicaScope* const scope = replicas();
  // The first replica makes the rank's call, whatever becomes of the others.
  const bool calls = scope == nullptr || ReplicaIndex(*scope) <= 0;
  return training() && options_.ranks.has_value() && calls
             ? AllGatherIntoTensor(refused, *options_.ranks)
             : refused;
}

Tensor BatchNorm::Forward(const Tensor& x) {
  const CallSiteScope lines(site());
  if (!IsUsable(x)) return Tell(x * 1);
  if (x.shape().size() < 2 || x.shape()[1] != channels_) {
    return Tell(Refuse(x, absl::StrCat("expected [n, ", channels_, ", ...], got ", TypeText(x))));
  }
  if (ReplicaScope* const scope = replicas(); scope != nullptr && scope->IsOutsideOfTrace()) {
    scope->NoteCall();
    return Tell(Refuse(x,
                       "one for all replicas, in a function that a replica compiles: compile "
                       "what calls the DataParallel (TrainStep)"));
  }
  const DType dtype = ComputeType(x.dtype());
  const Tensor values = AsType(x, dtype);
  const auto parameter = [dtype](const Variable& variable) {
    return variable.defined() ? AsType(variable(), dtype) : Tensor();
  };
  if (training() && !shares()) {
    const int64_t count = std::accumulate(x.shape().begin() + 2, x.shape().end(), x.shape()[0],
                                          std::multiplies<int64_t>());
    // A function whose batch varies is traced with one row, where it may have 3 at most.
    const bool one = TracesSizes();
    if (count < (one ? 1 : 2)) {
      return Refuse(x, absl::StrCat("expected ", one ? "a value" : "two values",
                                    " of a channel at least, in training, got ", TypeText(x)));
    }
    const Norm norm = {{1, 2}, {1, 2}, options_.epsilon};
    const Tensor moments = Moments(values, norm);
    const Tensor y =
        AsType(Normalize(values, moments, norm, parameter(weight_), parameter(bias_)), x.dtype());
    if (!IsUsable(y)) return y;
    Track(Reshape(Slice(moments, 0, 0, 1), {channels_}),
          Reshape(Slice(moments, 0, 1, 2), {channels_}) * Unbiasing(values, count));
    return y;
  }
  Tensor mean;
  Tensor variance;
  Tensor unbiased;  // in training
  Tensor has_rows;  // in training
  if (training()) {
    const Statistics all = OfAll(values);
    if (!IsUsable(all.mean)) return all.mean;
    mean = all.mean;
    variance = all.variance;
    unbiased = all.unbiased;
    has_rows = all.has_rows;
  } else {
    mean = AsType(running_mean_(), dtype);
    variance = AsType(running_var_(), dtype);
  }
  Shape per_channel(x.shape().size() - 1, 1);
  per_channel[0] = channels_;
  Tensor scale = Rsqrt(variance + options_.epsilon);
  if (weight_.defined()) scale = scale * parameter(weight_);
  Tensor y = (values - Reshape(mean, per_channel)) * Reshape(scale, per_channel);
  if (bias_.defined()) y = y + Reshape(parameter(bias_), per_channel);
  y = AsType(y, x.dtype());
  if (training() && IsUsable(y)) Track(mean, unbiased, has_rows);
  return y;
}

std::string BatchNorm::description() const {
  return absl::StrCat(
      channels_, ", epsilon=", options_.epsilon,
      ", momentum=", options_.momentum.has_value() ? absl::StrCat(*options_.momentum) : "none",
      options_.ranks.has_value() ? absl::StrCat(", ranks=", options_.ranks->size()) : "",
      options_.replicas ? ", replicas" : "");
}

void ShareBatches(Module* module, const Group& ranks) {
  auto* const norm = dynamic_cast<BatchNorm*>(module->code());
  if (norm != nullptr) norm->ShareBatch(ranks);
  for (const Module::Child& child : module->children()) ShareBatches(child.module.get(), ranks);
}

}  // namespace nn
}  // namespace chorus
