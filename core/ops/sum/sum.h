// Reductions over axes: sum, mean, prod, max, min; and what their gradients are made of: expand,
// which repeats along axes, and spread, which divides by how often.
//
// Reductions have the attributes axes (ascending, within x's dimensions; absent or empty: all of
// them) and keep_dims (0 or 1, 0 if absent). The reduced dimensions vanish, or become 1 with
// keep_dims. The order of operations depends on the shape alone. Half types are computed in f32 and
// rounded once; integers wrap. expand and spread have the attribute dims, the result's shape: x's
// dimensions are aligned with the last ones of it; each equals its counterpart or is 1, then it is
// repeated; missing ones are repeated too.
//
//   op         forward                 dtypes    of nothing  VJP for g, shaped as with keep_dims
//   sum(x)     the sum                 numbers   0           g expanded to x's shape
//   mean(x)    the sum / how many      floating  NaN         g spread to x's shape
//   prod(x)    the product             numbers   1           g times the product of the others
//   max(x)     the largest, NaN wins   numbers   refused     g shared by the holders, see below
//   min(x)     the smallest, NaN wins  numbers   refused     the same
//   expand(x)  x repeated              all       -           g summed over what was repeated
//   spread(x)  x repeated / how often  floating  -           the mean of g over what was repeated
//
// mean, spread: how many is known when the graph is specialised, so a mean over a batch of any size
//   is the same graph.
// prod: its gradient never divides, so zeros are nothing special: it multiplies in a tree of halves
//   and differentiates that; of n elements some 8 log2 n ops.
// max, min: the gradient is split evenly over the elements that hold the result (equal it, or are
//   NaN where it is), like that of an all_reduce MAX; it selects (see holds and share in
//   core/ops/reduction). Of +0 and -0 the result is one or the other, by the shape.
// Second order: all are made of each other and of ops with gradients of their own.
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError).
#ifndef CHORUS_CORE_OPS_SUM_SUM_H_
#define CHORUS_CORE_OPS_SUM_SUM_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> SumOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SUM_SUM_H_
