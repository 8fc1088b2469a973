// softmax and log_softmax along one axis, of floating-point tensors, and what their gradients are
// made of, softmax_grad, center and center_grad. Attribute axis. Half types are computed in f32 and
// rounded once. Sums of f32 and half types are as core/ops/long_sums.h says; on a GPU they are of
// parts, which are put together in f32.
//
// softmax(x): y_i = exp(x_i) / sum_j exp(x_j). VJP: softmax_grad(y, g).
// log_softmax(x): y_i = x_i - log sum_j exp(x_j). VJP: center_grad(softmax(x), g), of half types
//   all of it in f32.
// Both are computed from x - max x, so that no finite x overflows. Where x is -inf, softmax is 0
// and log_softmax -inf, but a row (what shares all other indices) that has a NaN or +inf, or
// nothing but -inf, is NaN throughout.
//
// center(w, x): sum_j w_j (x_i - x_j), how far x_i is above the mean weighted by w. VJP for h:
//   -center(h, x) for w, center_grad(w, h) for x. center(softmax(x), g) is g - sum_j g_j y_j.
// center_grad(w, g): sum_j (g_i w_j - w_i g_j), its adjoint; of softmax(x) it is
//   g - softmax(x) sum_j g_j. VJP for h: -center(g, h) for w, center(w, h) for g.
// softmax_grad(y, g): y center(y, g), of a y whose sum is 1. VJP for h, with d = center(y, h):
//   d center(y, g) - center(d y, g) for y, softmax_grad(y, h) for g.
// Where one weight is nearly all (a class that is all but certain), 1 - y_i is not to be had from
// y_i: it is the sum of the other weights. So they leave out what stands against itself: center
// takes x relative to the x of the largest weight, center_grad has sums without the largest weight,
// and the VJP of softmax_grad takes h relative to its mean.
// Second order: VJPs are made of these, softmax, mul, sub and neg: any order.
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError).
#ifndef CHORUS_CORE_OPS_SOFTMAX_SOFTMAX_H_
#define CHORUS_CORE_OPS_SOFTMAX_SOFTMAX_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> SoftmaxOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SOFTMAX_SOFTMAX_H_
