// slice, pad, concat, pack_rows and unpack_rows on host memory. A unit is a row of the result: what
// one index of the dimensions before the axis selects; of the last two, what one of dimension 0
// does.
//
// Threads: any. Ownership: a static table. Errors: INVALID_ARGUMENT kBadType for a count out of
// range of pack_rows and unpack_rows; the others never fail. What else kernels promise is said in
// core/ops/host_kernel.h.
#ifndef CHORUS_CORE_OPS_SLICE_SLICE_HOST_H_
#define CHORUS_CORE_OPS_SLICE_SLICE_HOST_H_

#include "absl/types/span.h"
#include "core/ops/host_kernel.h"

namespace chorus {

absl::Span<const HostKernelEntry> SliceHostKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SLICE_SLICE_HOST_H_
