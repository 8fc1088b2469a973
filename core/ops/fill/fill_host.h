// fill on host memory. A unit is an element.
//
// Threads: any. Ownership: a static table. Errors: the kernel never fails. What else kernels
// promise is said in core/ops/host_kernel.h.
#ifndef CHORUS_CORE_OPS_FILL_FILL_HOST_H_
#define CHORUS_CORE_OPS_FILL_FILL_HOST_H_

#include "absl/types/span.h"
#include "core/ops/host_kernel.h"

namespace chorus {

absl::Span<const HostKernelEntry> FillHostKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_FILL_FILL_HOST_H_
