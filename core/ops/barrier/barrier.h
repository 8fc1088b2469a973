// barrier(): every member has come to it. No inputs, no outputs, no gradient.
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError).
#ifndef CHORUS_CORE_OPS_BARRIER_BARRIER_H_
#define CHORUS_CORE_OPS_BARRIER_BARRIER_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> BarrierOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_BARRIER_BARRIER_H_
