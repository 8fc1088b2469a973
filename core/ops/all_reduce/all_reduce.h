// all_reduce(x): the reduction of all members' inputs, on every member. SUM in this build.
//
// Shapes: every member's x has one type; the result has it too. Summed in rank order, so the bits
// are the same on every member and from run to run; integers wrap. VJP, the loss being the sum over
// ranks of each rank's loss: rank r's input gradient is sum_q g_q, an all_reduce SUM of the output
// gradients. A loss that every rank computes alike counts once for each rank. Second order: its own
// gradient again.
#ifndef CHORUS_CORE_OPS_ALL_REDUCE_ALL_REDUCE_H_
#define CHORUS_CORE_OPS_ALL_REDUCE_ALL_REDUCE_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> AllReduceOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_ALL_REDUCE_ALL_REDUCE_H_
