// broadcast from a root, and reduce to a root: each is the other's gradient.
//
// broadcast: on the root, one input x and no attributes; on the other members no input, and the
//   type that the root's x has as attributes dims and dtype. The result, everywhere, is the root's
//   x.
//   VJP, the loss being the sum over ranks: the root's input gradient is sum_r g_r, a reduce SUM to
//   the root. The others have no input, so no gradient, but take part.
// reduce: one input x on every member; the result exists on the root alone. Off the root there is
//   no output: absent, not undefined. Reductions and extra outputs as for all_reduce
//   (core/ops/all_reduce/all_reduce.h); the holders of MIN and MAX are on every member, the factors
//   of PRODUCT on the root.
//   VJP: as for all_reduce with the root's g for G, a broadcast from the root; for PRODUCT a
//   scatter of the products that the root makes. Off the root backward starts at the node itself
//   (BackwardRoot::AbsentResult), since it has no value.
// Second order: through the same rules.
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError).
#ifndef CHORUS_CORE_OPS_BROADCAST_BROADCAST_H_
#define CHORUS_CORE_OPS_BROADCAST_BROADCAST_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> BroadcastOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_BROADCAST_BROADCAST_H_
