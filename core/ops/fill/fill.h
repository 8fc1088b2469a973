// fill(): a tensor of one value.
//
// Attributes dims, dtype (its name) and value: a double for floating-point dtypes, which half types
// get by way of f32, else an integer that the dtype holds; 0 or 1 for bool. No inputs, so no
// gradient.
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError).
#ifndef CHORUS_CORE_OPS_FILL_FILL_H_
#define CHORUS_CORE_OPS_FILL_FILL_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> FillOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_FILL_FILL_H_
