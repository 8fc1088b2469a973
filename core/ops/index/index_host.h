// one_hot, take, scatter_add, their forms along an axis, arg_max and arg_min on host memory. A unit
// is a slice of the result for what only moves, a number of columns for scatter_add, and what one
// index of all dimensions but the axis selects for arg_max.
//
// Threads: any. Ownership: a static table. Errors: INVALID_ARGUMENT kBadType for an index out of
// range; arg_max and arg_min never fail. What else kernels promise is said in
// core/ops/host_kernel.h.
#ifndef CHORUS_CORE_OPS_INDEX_INDEX_HOST_H_
#define CHORUS_CORE_OPS_INDEX_INDEX_HOST_H_

#include "absl/types/span.h"
#include "core/ops/host_kernel.h"

namespace chorus {

absl::Span<const HostKernelEntry> IndexHostKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_INDEX_INDEX_HOST_H_
