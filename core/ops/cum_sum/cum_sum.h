// cum_sum: sums of the elements up to each one, along one axis.
//
// cum_sum(x): y_i = x_0 + ... + x_i, added up in this order; with reverse 1
//   y_i = x_(n-1) + ... + x_i, in this order. Attributes axis, reverse (0 or 1; absent: 0).
//   Numbers; half types add up in f32, of which each element is rounded once, integers wrap.
//   VJP: cum_sum(g) with the other `reverse`, its adjoint.
//   Second order: it is linear, and its VJP is made of itself: any order.
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError).
#ifndef CHORUS_CORE_OPS_CUM_SUM_CUM_SUM_H_
#define CHORUS_CORE_OPS_CUM_SUM_CUM_SUM_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> CumSumOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_CUM_SUM_CUM_SUM_H_
