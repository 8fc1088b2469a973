// barrier(): every member has come to it. No inputs, no outputs, no gradient.
//
// Threads: any; definitions are never changed. Failure: kBadType (ShapeError).
#ifndef CHORUS_CORE_OPS_BARRIER_BARRIER_H_
#define CHORUS_CORE_OPS_BARRIER_BARRIER_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> BarrierOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_BARRIER_BARRIER_H_
