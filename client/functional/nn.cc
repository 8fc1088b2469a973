#include "chorus/functional/nn.h"

#include <string>

#include "client/internal/local.h"
#include "client/internal/record.h"

namespace chorus {
namespace {

using internal::Along;
using internal::ApplyLocal;
using internal::IsUsable;
using internal::Spec;

Attributes KeepDims(bool keep_dims) {
  return keep_dims ? Attributes{{"keep_dims", int64_t{1}}} : Attributes{};
}

}  // namespace

Tensor Softmax(const Tensor& x, int64_t axis, CallSite site) {
  return Along("softmax", {x}, axis, {}, site);
}
Tensor LogSoftmax(const Tensor& x, int64_t axis, CallSite site) {
  return Along("log_softmax", {x}, axis, {}, site);
}

Tensor CrossEntropy(const Tensor& logits, const Tensor& labels, CallSite site) {
  return ApplyLocal(Spec("cross_entropy", site), {logits, labels});
}
Tensor CrossEntropy(const Tensor& logits, const Tensor& labels, int64_t ignored, CallSite site) {
  return ApplyLocal(Spec("cross_entropy", site, {{"ignore_index", ignored}}), {logits, labels});
}

Tensor OneHot(const Tensor& indices, int64_t depth, DType dtype, CallSite site) {
  const absl::string_view name = DTypeName(dtype);
  return ApplyLocal(
      Spec("one_hot", site, {{"depth", depth}, {"dtype", std::string(name.data(), name.size())}}),
      {indices});
}

Tensor Take(const Tensor& x, const Tensor& indices, int64_t axis, CallSite site) {
  return Along("take", {x, indices}, axis, {}, site);
}

Tensor ScatterAdd(const Tensor& updates, const Tensor& indices, int64_t size, int64_t axis,
                  CallSite site) {
  int64_t axis_index = axis;
  if (axis < 0 && IsUsable(updates) && IsUsable(indices)) {
    axis_index += static_cast<int64_t>(updates.shape().size()) + 1 -
                  static_cast<int64_t>(indices.shape().size());
  }
  return ApplyLocal(Spec("scatter_add", site, {{"axis", axis_index}, {"size", size}}),
                    {updates, indices});
}

Tensor TakeAlong(const Tensor& x, const Tensor& indices, int64_t axis, CallSite site) {
  return Along("take_along", {x, indices}, axis, {}, site);
}
Tensor ScatterAddAlong(const Tensor& updates, const Tensor& indices, int64_t size, int64_t axis,
                       CallSite site) {
  return Along("scatter_add_along", {updates, indices}, axis, {{"size", size}}, site);
}

Tensor ArgMax(const Tensor& x, int64_t axis, bool keep_dims, CallSite site) {
  return Along("arg_max", {x}, axis, KeepDims(keep_dims), site);
}
Tensor ArgMin(const Tensor& x, int64_t axis, bool keep_dims, CallSite site) {
  return Along("arg_min", {x}, axis, KeepDims(keep_dims), site);
}

}  // namespace chorus
