// Random numbers on host memory. A unit is a block of Philox: four elements, or two of eight bytes.
//
// Threads: any. Ownership: a static table. Errors: these kernels never fail. What else kernels
// promise is said in core/ops/host_kernel.h.
#ifndef CHORUS_CORE_OPS_RANDOM_RANDOM_HOST_H_
#define CHORUS_CORE_OPS_RANDOM_RANDOM_HOST_H_

#include "absl/types/span.h"
#include "core/ops/host_kernel.h"

namespace chorus {

absl::Span<const HostKernelEntry> RandomHostKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_RANDOM_RANDOM_HOST_H_
