// all_reduce(x): the reduction of all members' inputs, on every member.
//
// Shapes: every member's x has one type; the result has it too. Of reductions between ranks there
// is one order, of this op and all others: with operand r of the member of rank r,
//   T(lo, n) = operand lo where n = 1, else T(lo, p) op T(lo + p, n - p),
// p the largest power of two below n, over all ranks of the group, whatever the form, piece,
// destination or coalescing. Members that are absent from a gradient are left out: a subtree
// without a present member is nothing, a node with one such side is its other side, and the result
// of one operand is that operand, bit for bit (AVG, PREMUL_SUM and bool apart). So the bits are the
// same on every member, from run to run, and wherever the members are. Factors of PREMUL_SUM are
// applied to the operands; AVG divides T by W, whatever members are absent; integers wrap; half
// types are f32 up to T, which is rounded once; a NaN T becomes the one NaN; MIN and MAX keep the
// left one of +0 and -0. bool: SUM = MAX = or, PRODUCT = MIN = and. W is the group's size, G the
// sum of the output gradients of all members (the loss is the sum over ranks of each rank's loss,
// so a loss that every rank computes alike counts once for each rank).
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
// MIN, MAX and PRODUCT have extra outputs (Extras in core/ops/collective_operands.h), so that
// backward is collectives that are linear in the gradients: an all_reduce (AVG for AVG, else SUM);
// for PRODUCT also a reduce_scatter SUM of what each member has for the others' factors, at second
// order. The gradients are summed before they are multiplied: with an infinite factor a sum of
// products would be NaN. What one member multiplies by itself is no such tree: the others' factors
// are taken from left to right, then G (core/ops/reduction/reduction.h). Second order: through the
// same rules; the shares of MIN and MAX are constants there, the factors of PRODUCT are not.
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError).
#ifndef CHORUS_CORE_OPS_ALL_REDUCE_ALL_REDUCE_H_
#define CHORUS_CORE_OPS_ALL_REDUCE_ALL_REDUCE_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> AllReduceOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_ALL_REDUCE_ALL_REDUCE_H_
