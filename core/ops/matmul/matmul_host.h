// matmul on host memory, by Eigen. A unit is a block of rows of the result.
#ifndef CHORUS_CORE_OPS_MATMUL_MATMUL_HOST_H_
#define CHORUS_CORE_OPS_MATMUL_MATMUL_HOST_H_

#include "absl/types/span.h"
#include "core/ops/host_kernel.h"

namespace chorus {

absl::Span<const HostKernelEntry> MatmulHostKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_MATMUL_MATMUL_HOST_H_
