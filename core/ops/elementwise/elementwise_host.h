// Elementwise ops on host memory. A unit is an element. In place is allowed.
#ifndef CHORUS_CORE_OPS_ELEMENTWISE_ELEMENTWISE_HOST_H_
#define CHORUS_CORE_OPS_ELEMENTWISE_ELEMENTWISE_HOST_H_

#include "absl/types/span.h"
#include "core/ops/host_kernel.h"

namespace chorus {

absl::Span<const HostKernelEntry> ElementwiseHostKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_ELEMENTWISE_ELEMENTWISE_HOST_H_
