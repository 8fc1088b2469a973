// Comparisons, logic, where and cast on host memory. A unit is an element. In place is allowed.
//
// Threads: any. Ownership: a static table. Errors: these kernels never fail. What else kernels
// promise is said in core/ops/host_kernel.h.
#ifndef CHORUS_CORE_OPS_COMPARE_COMPARE_HOST_H_
#define CHORUS_CORE_OPS_COMPARE_COMPARE_HOST_H_

#include "absl/types/span.h"
#include "core/ops/host_kernel.h"

namespace chorus {

absl::Span<const HostKernelEntry> CompareHostKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_COMPARE_COMPARE_HOST_H_
