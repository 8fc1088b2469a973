// cross_entropy and cross_entropy_grad on host memory. A unit is a row of scores.
//
// Threads: any. Ownership: a static table. Errors: INVALID_ARGUMENT kBadType for a label out of
// range. What else kernels promise is said in core/ops/host_kernel.h.
#ifndef CHORUS_CORE_OPS_CROSS_ENTROPY_CROSS_ENTROPY_HOST_H_
#define CHORUS_CORE_OPS_CROSS_ENTROPY_CROSS_ENTROPY_HOST_H_

#include "absl/types/span.h"
#include "core/ops/host_kernel.h"

namespace chorus {

absl::Span<const HostKernelEntry> CrossEntropyHostKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_CROSS_ENTROPY_CROSS_ENTROPY_HOST_H_
