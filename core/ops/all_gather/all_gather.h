// all_gather and reduce_scatter in list form: each is the other's gradient. W is the group's size.
//
// all_gather(x): W outputs; output j is member j's x. Every member's x has one type.
//   VJP, the loss being the sum over ranks: rank r's input gradient is sum_q g_q[r], a
//   reduce_scatter SUM of the W output gradients. Outputs that a rank does not use count as zeros.
// reduce_scatter(x_0 ... x_{W-1}) (SUM in this build): one output; member r's is sum_q x_q[r], in
// rank
//   order, integers wrap. All inputs have one type.
//   VJP: every rank's gradient for input j is member j's g, an all_gather.
// Second order: each other's.
#ifndef CHORUS_CORE_OPS_ALL_GATHER_ALL_GATHER_H_
#define CHORUS_CORE_OPS_ALL_GATHER_ALL_GATHER_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> AllGatherOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_ALL_GATHER_ALL_GATHER_H_
