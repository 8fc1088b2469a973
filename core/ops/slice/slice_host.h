// slice, pad and concat on host memory. A unit is a row of the result: what one index of the
// dimensions before the axis selects.
//
// Threads, memory, failure: core/ops/host_kernel.h.
#ifndef CHORUS_CORE_OPS_SLICE_SLICE_HOST_H_
#define CHORUS_CORE_OPS_SLICE_SLICE_HOST_H_

#include "absl/types/span.h"
#include "core/ops/host_kernel.h"

namespace chorus {

absl::Span<const HostKernelEntry> SliceHostKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SLICE_SLICE_HOST_H_
