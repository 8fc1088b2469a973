// Comparisons, logic, selection and conversion.
//
// Shapes are those of elementwise ops: one shape, or 0-dim and then standing for all elements.
// Elements of bool are true where their byte is not 0, and are written as 0 or 1.
//
//   op                         forward                         dtypes
//   eq ne lt le gt ge (a, b)   a == b ... as bool              two of one dtype, any
//   logical_and, _or, _xor (a, b), logical_not(a)              bool
//   where(c, a, b)             c ? a : b, element by element   c bool, a and b of one dtype, any
//   cast(x)                    x in another dtype              any to any, attribute dtype
//
// Comparisons: with NaN all but ne are false; -0 equals +0; false < true.
// where selects and does not compute: what is not a number in the branch not taken stays there, in
//   the gradients too. VJP: where(c, g, 0) for a, where(c, 0, g) for b; linear, so the second order
//   is of the same form.
// cast rounds once, to the nearest value, ties to the even one; to integers it truncates, beyond
//   their range it gives the nearest of them, and 0 for NaN; between integers it wraps; to bool it
//   is x != 0 (true for NaN); from bool it gives 0 or 1. VJP between floating dtypes: g cast back;
//   else none.
// The others have no gradient.
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError).
#ifndef CHORUS_CORE_OPS_COMPARE_COMPARE_H_
#define CHORUS_CORE_OPS_COMPARE_COMPARE_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> CompareOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_COMPARE_COMPARE_H_
