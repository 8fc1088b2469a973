// all_gather and reduce_scatter, with lists of pieces and with the pieces in one tensor
// (all_gather_into_tensor, reduce_scatter_tensor): each is the other's gradient. W is the group's
// size; the pieces of one collective are alike but for their rows, dimension 0.
//
// all_gather(x): W outputs; output j is member j's x. `counts` are the rows of each member's x;
//   without counts every member's x has one type, which may be 0-dim.
// all_gather_into_tensor(x): one output, the members' x one after the other along dimension 0.
//   VJP of both, the loss being the sum over ranks: rank r's input gradient is the sum over ranks
//   of the gradients of x_r, a reduce_scatter(_tensor) SUM. Outputs that a rank does not use count
//   as zeros.
// reduce_scatter(x_0 ... x_{W-1}): one output; member r's is the reduction of all members' x_r, in
//   the tree over all ranks of the group (core/ops/all_reduce/all_reduce.h), the same for every r.
//   Input r of every member has one type.
// reduce_scatter_tensor(x): the same of the pieces that follow one another in x: `counts` rows for
//   each member, or equal parts.
//   Reductions and extra outputs as for all_reduce (core/ops/all_reduce/all_reduce.h).
//   VJP, with g_j the gradient that member j has:
//     SUM         g_j for piece j, an all_gather(_into_tensor)
//     AVG         the same, scaled by 1 / W
//     PREMUL_SUM  the same, scaled by this member's factor
//     MIN, MAX    the same, shared among holders
//     PRODUCT     member j has every member's factor of its result: it sends each the product of
//                 the others and g_j, an all_to_all
// Second order: through the same rules.
// Counts of the forms in one tensor may come at run time (NumRuntimeSends in
// core/ops/collective_operands.h). Gradients are then the same, by these counts.
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError); counts at run time that are wrong end the run
// on every member.
#ifndef CHORUS_CORE_OPS_ALL_GATHER_ALL_GATHER_H_
#define CHORUS_CORE_OPS_ALL_GATHER_ALL_GATHER_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> AllGatherOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_ALL_GATHER_ALL_GATHER_H_
