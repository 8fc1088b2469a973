// What the gradients of reductions are made of beside collectives: holds, share, scale and product,
// local ops; and what the gradient rules of all_reduce, reduce and reduce_scatter have in common.
//
// All are for floating point; half types are computed in f32 (f64 in f64) and rounded once.
//
//   op                     forward                              VJP for output gradient g
//   holds(x, y)            x == y, or both NaN ? 1 : 0, in f32  none
//   share(x, holders)      holders == 0 ? 0 : x / holders       share(g, holders) for x
//   scale(x, factor)       x * factor                           scale(g, factor) for x
//   product(x_0 ... x_n)   x_0 * ... * x_n, left to right       product(the others ..., g) for x_i
//
// holds: of one type, or one of them 0-dim and then standing for all elements. -0 holds +0.
// share: holders is f32 of x's dims. It selects and does not multiply: what is not a number in x
//   stays out where there is no holder. Holders have no gradient.
// scale: factor is 0-dim, f64 for f64 and else f32. It has no gradient: it is a number.
// product: one input or more, of one type. Its gradient never divides. It is what one rank reduces,
//   so it is no tree, as reductions between ranks are (core/ops/all_reduce/all_reduce.h).
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError); what the functions on gradients return is the
// emitter's.
#ifndef CHORUS_CORE_OPS_REDUCTION_REDUCTION_H_
#define CHORUS_CORE_OPS_REDUCTION_REDUCTION_H_

#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> ReductionOps();

// The input gradients of a reducing node, from those that its pieces would have if it were a SUM
// (of halves also in f32: what comes of them is rounded then); of a PRODUCT, from the pieces' own.
absl::StatusOr<InputGradients> GradientsFromSum(GradientContext* context,
                                                absl::Span<const ValueIndex> grads);

// Of a PRODUCT, where its result is: the product of all members' factors but that of `member`, and
// `last`, of the type of `last`.
absl::StatusOr<ValueIndex> ProductOfOthers(GradientContext* context, int member, ValueIndex last);

// Of a PRODUCT that has one owner, there: the gradients of its factors, by member: the product of
// the others and the result's gradient, and what reaches the factor itself, which is an output.
absl::StatusOr<std::vector<ValueIndex>> FactorGradients(GradientContext* context);

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_REDUCTION_REDUCTION_H_
