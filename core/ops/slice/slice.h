// Parts of tensors along one axis: slice, its adjoint pad, and concat.
//
// slice(x): attributes axis, begin, end; elements begin <= i < end of that axis. VJP: pad.
// pad(x): attributes axis, before, after; that many zeros around x along that axis. VJP: slice.
// concat(x_0, x_1, ...): attribute axis; equal in dtype and all other dimensions. VJP: a slice
// each. Second order: all are linear and their VJPs are made of each other.
#ifndef CHORUS_CORE_OPS_SLICE_SLICE_H_
#define CHORUS_CORE_OPS_SLICE_SLICE_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> SliceOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SLICE_SLICE_H_
