// sum over axes, and expand, which repeats along axes: each is the other's gradient.
//
// sum(x): attribute axes (ascending, within x's dimensions; absent or empty: all of them) and
//   keep_dims (0 or 1, 0 if absent). The summed dimensions vanish, or become 1 with keep_dims. A
//   sum of nothing is 0; integers wrap. The order of additions depends on the shape alone. VJP: g,
//   shaped as with keep_dims, expanded to x's shape.
// expand(x): attribute dims, the result's shape. x's dimensions are aligned with the last ones of
// the
//   result; each equals its counterpart or is 1, then it is repeated; missing ones are repeated
//   too. VJP: g summed over what was repeated.
// Second order: both are linear and made of each other (and reshape).
#ifndef CHORUS_CORE_OPS_SUM_SUM_H_
#define CHORUS_CORE_OPS_SUM_SUM_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> SumOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SUM_SUM_H_
