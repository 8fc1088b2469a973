// Pooling on host memory. A unit is a row of the result's plane.
//
// Plain loops, for oneDNN's have neither f64 nor an index that stands for a NaN.
//
// Threads: any. Ownership: a static table. Errors: no operand makes the kernels fail. What else
// kernels promise is said in core/ops/host_kernel.h.
#ifndef CHORUS_CORE_OPS_POOL_POOL_HOST_H_
#define CHORUS_CORE_OPS_POOL_POOL_HOST_H_

#include "absl/types/span.h"
#include "core/ops/host_kernel.h"

namespace chorus {

absl::Span<const HostKernelEntry> PoolHostKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_POOL_POOL_HOST_H_
