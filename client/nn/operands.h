// What layers ask of their operands.
//
// Threads: any; pure functions. Ownership: none. Errors: none; TypeText is for usable tensors.
#ifndef CHORUS_CLIENT_NN_OPERANDS_H_
#define CHORUS_CLIENT_NN_OPERANDS_H_

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "chorus/tensor.h"

namespace chorus {
namespace nn {

// "f32[2,3]".
inline std::string TypeText(const Tensor& x) {
  return absl::StrCat(std::string(DTypeName(x.dtype())), "[", absl::StrJoin(x.shape(), ","), "]");
}

inline int64_t Rank(const Tensor& x) { return static_cast<int64_t>(x.shape().size()); }

// A failed or absent operand is not: ops carry its error on.
inline bool Usable(const Tensor& x) { return x.defined() && x.status().ok() && !x.absent(); }

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_OPERANDS_H_
