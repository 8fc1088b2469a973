// Normalisation on host memory. A unit is a row, or a block of rows where their elements stand side
// by side; of normalize_weight_grad a weight, or a block of such.
//
// Plain loops: sums of an f32 row are of at most 4,096 elements in f32, then in f64, in an order
// that depends on the shape alone. (docs/performance.md has oneDNN's beside them.)
//
// Threads: any. Ownership: a static table. Errors: no operand makes the kernels fail. What else
// kernels promise is said in core/ops/host_kernel.h.
#ifndef CHORUS_CORE_OPS_NORM_NORM_HOST_H_
#define CHORUS_CORE_OPS_NORM_NORM_HOST_H_

#include "absl/types/span.h"
#include "core/ops/host_kernel.h"

namespace chorus {

absl::Span<const HostKernelEntry> NormHostKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_NORM_NORM_HOST_H_
