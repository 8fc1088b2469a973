// The type in which formulas are computed: half types in f32 and rounded once, as PyTorch does. A
// number beside a half tensor would be rounded to its type first (bf16 has 0.9 as 0.8984), and so
// would all that comes between.
//
// Threads: chorus/nn/module.h. Ownership: results are handles. Errors: in the results.
#ifndef CHORUS_CLIENT_NN_COMPUTE_TYPE_H_
#define CHORUS_CLIENT_NN_COMPUTE_TYPE_H_

#include "chorus/functional/math.h"
#include "chorus/tensor.h"

namespace chorus {
namespace nn {

inline DType ComputeType(DType dtype) {
  return dtype == DType::kF16 || dtype == DType::kBF16 ? DType::kF32 : dtype;
}

inline Tensor AsType(const Tensor& x, DType dtype) {
  return x.dtype() == dtype ? x : Cast(x, dtype);
}
inline Tensor AsComputeType(const Tensor& x) { return AsType(x, ComputeType(x.dtype())); }

// function(x), in x's type.
template <typename Function>
Tensor InComputeType(const Tensor& x, const Function& function) {
  return AsType(function(AsComputeType(x)), x.dtype());
}

// function(x, y) of two of one type, in that type.
template <typename Function>
Tensor InComputeType(const Tensor& x, const Tensor& y, const Function& function) {
  if (x.dtype() != y.dtype()) return function(x, y);  // where they meet they are refused
  return AsType(function(AsComputeType(x), AsComputeType(y)), x.dtype());
}

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_COMPUTE_TYPE_H_
