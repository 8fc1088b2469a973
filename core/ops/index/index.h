// Elements by index: one_hot, take, take_along, their adjoints scatter_add and scatter_add_along,
// arg_max and arg_min. Indices are of any integer dtype, from 0 on; one outside its range is
// INVALID_ARGUMENT from the run, which names its position. Indices have no gradient.
//
// one_hot(indices [...]) -> [...,depth]: 1 at the index, else 0. Attributes depth, dtype; with
//   ignore_index (absent: none) that index gives a row of zeros. No gradient.
// take(x, indices) -> x's dims with those of indices in the place of `axis`: slices of x. Any
//   dtype. VJP of x: scatter_add.
// scatter_add(updates, indices) -> the inverse shape, with `size` in the place of the indices'
//   dims, from `axis` on: zeros, to which every slice of updates is added where its index says.
//   Numbers; in the order of the indices, so that equal ones always give the same bits; half types
//   add up in f32 and are rounded once, integers wrap. VJP of updates: take.
// take_along(x, indices) -> the dims of indices, which are x's but along `axis`: element by
//   element, the index counts along the axis. Any dtype. VJP of x: scatter_add_along.
// scatter_add_along(updates, indices), dims equal -> the same with `size` along `axis`; as
//   scatter_add, element by element. VJP of updates: take_along.
//   Second order: these are linear, and their VJPs are made of each other.
// arg_max(x), arg_min(x) -> i64 without `axis` (1 there with keep_dims): the first index of the
//   largest or smallest element; the first NaN, where there is one. No gradient.
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError), and from the run for an index as said above.
#ifndef CHORUS_CORE_OPS_INDEX_INDEX_H_
#define CHORUS_CORE_OPS_INDEX_INDEX_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> IndexOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_INDEX_INDEX_H_
