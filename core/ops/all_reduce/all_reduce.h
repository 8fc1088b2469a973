// all_reduce(x): the reduction of all members' inputs, on every member.
//
// Shapes: every member's x has one type; the result has it too. Reduced in rank order, so the bits
// are the same on every member and from run to run; integers wrap, half types are accumulated in
// f32 and rounded once. bool: SUM = MAX = or, PRODUCT = MIN = and. W is the group's size, G the sum
// of the output gradients of all members (the loss is the sum over ranks of each rank's loss, so a
// loss that every rank computes alike counts once for each rank).
//
//   reduction       result                       VJP, rank r's input gradient
//   SUM             sum of x_r                   G
//   AVG             sum of x_r / W               G / W
//   PREMUL_SUM      sum of f_r x_r               f_r G
//   PRODUCT         product of x_r               G times the product of the others: never y / x_r
//   MIN, MAX        least, greatest; NaN if any  G / (number of holders) where x_r holds the result
//                   member has NaN               (equals it, or is NaN where it is), else 0
//   BAND BOR BXOR   bit by bit                   none: integers and bool only
//
// PREMUL_SUM has one more input, the last: this member's factor, 0-dim, f64 for f64 and else f32.
// It is a number, which has no gradient. AVG, PREMUL_SUM: floating point only. With wants_grad,
// MIN, MAX and PRODUCT have extra outputs (Extras in core/ops/op.h), so that backward is
// collectives that are linear in the gradients: an all_reduce (AVG for AVG, else SUM); for PRODUCT
// also a reduce_scatter SUM of what each member has for the others' factors, at second order. The
// gradients are summed before they are multiplied: with an infinite factor a sum of products would
// be NaN. Second order: through the same rules; the shares of MIN and MAX are constants there, the
// factors of PRODUCT are not.
#ifndef CHORUS_CORE_OPS_ALL_REDUCE_ALL_REDUCE_H_
#define CHORUS_CORE_OPS_ALL_REDUCE_ALL_REDUCE_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> AllReduceOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_ALL_REDUCE_ALL_REDUCE_H_
