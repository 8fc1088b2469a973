// Attributes that several ops have, read and checked by their shape rules.
//
// Threads: pure functions. Ownership: plain values. Errors: INVALID_ARGUMENT kBadType (ShapeError).
#ifndef CHORUS_CORE_OPS_CHECKED_ATTRIBUTES_H_
#define CHORUS_CORE_OPS_CHECKED_ATTRIBUTES_H_

#include <cstddef>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/ops/op.h"

namespace chorus {

// "axis": one of input 0's dimensions.
absl::StatusOr<size_t> CheckedAxis(const NodeView& node);
// An integer that is 0 or 1; `otherwise` where it is absent.
absl::StatusOr<bool> CheckedFlag(const NodeView& node, absl::string_view name,
                                 bool otherwise = false);

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_CHECKED_ATTRIBUTES_H_
