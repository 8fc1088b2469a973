// gather to a root and scatter from a root, with lists of pieces and with the pieces in one tensor
// (gather_into_tensor, scatter_tensor): each is the other's gradient. W is the group's size; the
// pieces of one collective are alike but for their rows, dimension 0.
//
// gather(x): on the root W outputs; output j is member j's x. The others have none: absent, not
//   undefined. `counts` are the rows of each member's x; the root needs them where they differ, the
//   others may leave them out.
// gather_into_tensor(x): on the root one output, the members' x one after the other.
//   VJP, the loss being the sum over ranks: rank r's input gradient is the root's gradient of x_r,
//   a scatter(_tensor) from the root. Off the root backward starts at the node itself
//   (BackwardRoot::AbsentResult), since it has no value.
// scatter(x_0 ... x_{W-1}) on the root, no inputs on the others, which have the type of what comes
//   to them as attributes dims and dtype. Member r gets x_r.
// scatter_tensor(x) on the root: the same of the pieces that follow one another in x: `counts` rows
//   for each member, or equal parts. The others give no counts.
//   VJP: the root's gradient of x_r is member r's g, a gather(_into_tensor). The others have no
//   input, so no gradient, but take part.
// Second order: each other's.
// Counts of the forms in one tensor may come at run time (NumRuntimeSends in
// core/ops/collective_operands.h).
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError); counts at run time that are wrong end the run
// on every member.
#ifndef CHORUS_CORE_OPS_GATHER_GATHER_H_
#define CHORUS_CORE_OPS_GATHER_GATHER_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> GatherOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_GATHER_GATHER_H_
