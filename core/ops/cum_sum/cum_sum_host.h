// cum_sum on host memory. A unit is a row: what one index of all dimensions but the axis selects.
//
// Threads: any. Ownership: a static table. Errors: these kernels never fail. What else kernels
// promise is said in core/ops/host_kernel.h.
#ifndef CHORUS_CORE_OPS_CUM_SUM_CUM_SUM_HOST_H_
#define CHORUS_CORE_OPS_CUM_SUM_CUM_SUM_HOST_H_

#include "absl/types/span.h"
#include "core/ops/host_kernel.h"

namespace chorus {

absl::Span<const HostKernelEntry> CumSumHostKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_CUM_SUM_CUM_SUM_HOST_H_
