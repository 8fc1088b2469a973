// What layers that normalise have in common: moments of x, and x normalised by them, by the ops of
// core/ops/norm.
//
// Threads: chorus/nn/module.h. Ownership: results are handles. Errors: in the results.
#ifndef CHORUS_CLIENT_NN_NORMALIZE_H_
#define CHORUS_CLIENT_NN_NORMALIZE_H_

#include <cstdint>
#include <vector>

#include "chorus/tensor.h"

namespace chorus {
namespace nn {

struct Norm {
  // [begin, end): the dimensions whose every index has moments of its own, weight and bias.
  std::vector<int64_t> rows;
  std::vector<int64_t> weights;
  double epsilon = 0;
  bool center = true;  // false: the mean is taken as 0
};

// [2, rows]: the mean and the variance of each row of x, which is of a ComputeType.
Tensor Moments(const Tensor& x, const Norm& norm);
// (x - mean) / sqrt(variance + epsilon), times weight, plus bias, where they are defined. `moments`
// are Moments(x, norm): gradients of x are through them too.
Tensor Normalize(const Tensor& x, const Tensor& moments, const Norm& norm, const Tensor& weight,
                 const Tensor& bias);
// Both, of x of any floating type and in its type; beside a half type weight and bias may be of
// f32.
Tensor NormalizeRows(const Tensor& x, const Norm& norm, const Tensor& weight = Tensor(),
                     const Tensor& bias = Tensor());

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_NORMALIZE_H_
