// Reductions over axes, expand and spread on host memory. A unit is an element of the result; the
// order of operations in it depends on the input's shape alone.
//
// Threads: any. Ownership: a static table. Errors: these kernels never fail. What else kernels
// promise is said in core/ops/host_kernel.h.
#ifndef CHORUS_CORE_OPS_SUM_SUM_HOST_H_
#define CHORUS_CORE_OPS_SUM_SUM_HOST_H_

#include "absl/types/span.h"
#include "core/ops/host_kernel.h"

namespace chorus {

absl::Span<const HostKernelEntry> SumHostKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SUM_SUM_HOST_H_
