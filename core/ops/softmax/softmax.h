// softmax and log_softmax along one axis, of floating-point tensors. Attribute axis.
//
// softmax(x): y_i = exp(x_i) / sum_j exp(x_j). VJP: y (g - sum_j g_j y_j).
// log_softmax(x): y_i = x_i - log sum_j exp(x_j). VJP: g - softmax(x) sum_j g_j.
// Second order: the VJPs are made of softmax, mul, sub, sum and expand.
// Both are computed from x - max x, so that no finite x overflows. Where x is -inf, softmax is 0
// and log_softmax -inf, but a row (what shares all other indices) that has a NaN or +inf, or
// nothing but -inf, is NaN throughout.
#ifndef CHORUS_CORE_OPS_SOFTMAX_SOFTMAX_H_
#define CHORUS_CORE_OPS_SOFTMAX_SOFTMAX_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> SoftmaxOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SOFTMAX_SOFTMAX_H_
