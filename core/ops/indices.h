// Which tensors may be indices or labels, for shape rules.
//
// Threads: constants. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_OPS_INDICES_H_
#define CHORUS_CORE_OPS_INDICES_H_

#include "core/tensor/type.h"

namespace chorus {

// Integers of any width. Their values are checked when they are used (core/ops/host_indices.h).
inline constexpr DTypes kIndexDTypes = kIntegerDTypes;

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_INDICES_H_
