// all_to_all, with lists of pieces and with the pieces in one tensor (all_to_all_single): its own
// gradient. W is the group's size; the pieces of one collective are alike but for their rows,
// dimension 0.
//
// all_to_all(x_0 ... x_{W-1}): input k goes to member k; W outputs, output k comes from member k.
//   `counts` are the rows that come from each member; without counts all pieces are of one type,
//   which may be 0-dim.
// all_to_all_single(x): the same of the pieces that follow one another in x and in the output.
//   `counts` are the rows sent to each member, then the rows that come from each; without counts
//   the pieces are equal parts. What a member sends to itself is what comes from itself, so those
//   two counts are equal.
// VJP, the loss being the sum over ranks: the gradient of what went to member k is member k's
//   gradient of what came from here, an all_to_all with the counts swapped. Outputs that a rank
//   does not use count as zeros. Second order: its own gradient again.
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError); counts at run time that are wrong end the run
// on every member.
#ifndef CHORUS_CORE_OPS_ALL_TO_ALL_ALL_TO_ALL_H_
#define CHORUS_CORE_OPS_ALL_TO_ALL_ALL_TO_ALL_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> AllToAllOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_ALL_TO_ALL_ALL_TO_ALL_H_
