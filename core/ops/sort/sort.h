// arg_sort: in which order elements along one axis stand when they are sorted. To sort is to take
// them in it: take_along(x, arg_sort(x)), which has the gradient, of any order; the indices have
// none.
//
// arg_sort(x) -> i64, x's dims with `k` along `axis` (absent: all of them): the index along the
//   axis of the smallest element, of the next one and so on, k of them. With descending 1 of the
//   largest, of the next one and so on. Any dtype; false < true. Of equals, +0 and -0 among them,
//   the first index comes first, whatever the direction. NaN is above all else: last of all, or
//   with descending first.
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError).
#ifndef CHORUS_CORE_OPS_SORT_SORT_H_
#define CHORUS_CORE_OPS_SORT_SORT_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> SortOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SORT_SORT_H_
