// broadcast from a root, and reduce to a root: each is the other's gradient.
//
// broadcast: on the root, one input x and no attributes; on the other members no input, and the
// type
//   that the root's x has as attributes dims and dtype. The result, everywhere, is the root's x.
//   VJP, the loss being the sum over ranks: the root's input gradient is sum_r g_r, a reduce SUM to
//   the root. The others have no input, so no gradient, but take part.
// reduce (SUM in this build): one input x on every member; the result exists on the root alone, in
//   rank order, integers wrap. Off the root there is no output: absent, not undefined.
//   VJP: every member's input gradient is the root's g, a broadcast from the root. Off the root
//   backward starts at the node itself (BackwardRoot::AbsentResult), since it has no value.
// Second order: each other's.
#ifndef CHORUS_CORE_OPS_BROADCAST_BROADCAST_H_
#define CHORUS_CORE_OPS_BROADCAST_BROADCAST_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> BroadcastOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_BROADCAST_BROADCAST_H_
