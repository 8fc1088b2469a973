// Ops that move or rename elements and compute nothing: copy, reshape, transpose.
//
// copy(x): x on the node's device slot, from whatever slot it is on (the same one: an identity).
//   The only local op whose input may lie on another device. VJP: g copied back to x's device.
// reshape(x): attribute dims, as many elements as x, row-major order. VJP: g reshaped back.
// transpose(x): attribute perm; dimension i of the result is dimension perm[i] of x.
//   VJP: g transposed by the inverse permutation.
// Second order: all are linear and their VJPs are made of themselves.
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError).
#ifndef CHORUS_CORE_OPS_SHAPE_SHAPE_H_
#define CHORUS_CORE_OPS_SHAPE_SHAPE_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> ShapeOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SHAPE_SHAPE_H_
