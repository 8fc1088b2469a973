// cross_entropy and cross_entropy_grad on host memory. A unit is a row of scores.
//
// Threads, memory, failure: core/ops/host_kernel.h.
#ifndef CHORUS_CORE_OPS_CROSS_ENTROPY_CROSS_ENTROPY_HOST_H_
#define CHORUS_CORE_OPS_CROSS_ENTROPY_CROSS_ENTROPY_HOST_H_

#include "absl/types/span.h"
#include "core/ops/host_kernel.h"

namespace chorus {

absl::Span<const HostKernelEntry> CrossEntropyHostKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_CROSS_ENTROPY_CROSS_ENTROPY_HOST_H_
