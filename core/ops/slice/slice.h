// Parts of tensors along one axis: slice, its adjoint pad, and concat; and rows of which a number
// counts that is known only when they run: pack_rows and its adjoint unpack_rows.
//
// slice(x): attributes axis, begin, end; elements begin <= i < end of that axis. VJP: pad.
// pad(x): attributes axis, before, after; that many zeros around x along that axis. VJP: slice.
// concat(x_0, x_1, ...): attribute axis; equal in dtype and all other dimensions. VJP: a slice
// each.
// pack_rows(x, count): x has `parts` parts of equal rows (dimension 0), of each of which the first
// `count` (i64[1]) rows count: those, one part after the other, and zeros behind them. VJP of x:
// unpack_rows.
// unpack_rows(x, count): the inverse, with zeros behind the rows of each part. VJP of x: pack_rows.
// A count that is negative or larger than a part is INVALID_ARGUMENT from the run.
// Second order: all are linear and their VJPs are made of each other.
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError), and from the run for a count as said above.
#ifndef CHORUS_CORE_OPS_SLICE_SLICE_H_
#define CHORUS_CORE_OPS_SLICE_SLICE_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> SliceOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SLICE_SLICE_H_
