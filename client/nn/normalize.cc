#include "client/nn/normalize.h"

#include <vector>

#include "chorus/functional/op.h"
#include "chorus/math.h"
#include "client/internal/local.h"
#include "client/nn/compute_type.h"

namespace chorus {
namespace nn {

using internal::IsUsable;

namespace {

std::vector<OpAttribute> MomentsAttributes(const Norm& norm) {
  return {{"center", int64_t{norm.center}}, {"rows", norm.rows}};
}

// Numbers of each index of the dimensions that have weights; `weight` where it is defined.
Tensor WeightsOf(const Tensor& x, const Norm& norm, const Tensor& weight, double otherwise) {
  if (weight.defined()) return weight;
  const auto first = x.shape().begin();
  return Full(x.device(), x.dtype(), Shape(first + norm.weights[0], first + norm.weights[1]),
              otherwise);
}

}  // namespace

Tensor Moments(const Tensor& x, const Norm& norm) {
  return Op("moments", {x}, MomentsAttributes(norm));
}

Tensor Normalize(const Tensor& x, const Tensor& moments, const Norm& norm, const Tensor& weight,
                 const Tensor& bias) {
  if (!IsUsable(x)) return x * 1;
  if (!IsUsable(moments)) return moments;  // the dimensions may be none of x's
  std::vector<OpAttribute> attributes = MomentsAttributes(norm);
  attributes.push_back({"epsilon", norm.epsilon});
  attributes.push_back({"weights", norm.weights});
  return Op("normalize", {x, moments, WeightsOf(x, norm, weight, 1), WeightsOf(x, norm, bias, 0)},
            attributes);
}

Tensor NormalizeRows(const Tensor& x, const Norm& norm, const Tensor& weight, const Tensor& bias) {
  if (!IsUsable(x)) return x * 1;
  const DType dtype = ComputeType(x.dtype());
  if (dtype == x.dtype()) return Normalize(x, Moments(x, norm), norm, weight, bias);
  const auto wide = [dtype](const Tensor& t) { return t.defined() ? AsType(t, dtype) : t; };
  const Tensor values = wide(x);
  return AsType(Normalize(values, Moments(values, norm), norm, wide(weight), wide(bias)),
                x.dtype());
}

}  // namespace nn
}  // namespace chorus
