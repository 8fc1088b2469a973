// arg_sort on host memory. A unit is a number of rows: what one index of all dimensions but the
// axis selects. A row is looked at once, beside a heap of the k best so far, and these are sorted:
// size log k steps at most, and about size + k log k where k is much smaller. They are sorted where
// the result stands if an element with its index is as wide as an index and the result's elements
// stand side by side; else in scratch for k of them in each of 64 units at most.
//
// Threads: any. Ownership: a static table. Errors: these kernels never fail. What else kernels
// promise is said in core/ops/host_kernel.h.
#ifndef CHORUS_CORE_OPS_SORT_SORT_HOST_H_
#define CHORUS_CORE_OPS_SORT_SORT_HOST_H_

#include "absl/types/span.h"
#include "core/ops/host_kernel.h"

namespace chorus {

absl::Span<const HostKernelEntry> SortHostKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SORT_SORT_HOST_H_
