// copy, reshape and transpose on host memory. A unit is an element. copy may work in place, which
// does nothing.
//
// Threads: any. Ownership: a static table. Errors: these kernels never fail. What else kernels
// promise is said in core/ops/host_kernel.h.
#ifndef CHORUS_CORE_OPS_SHAPE_SHAPE_HOST_H_
#define CHORUS_CORE_OPS_SHAPE_SHAPE_HOST_H_

#include "absl/types/span.h"
#include "core/ops/host_kernel.h"

namespace chorus {

absl::Span<const HostKernelEntry> ShapeHostKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SHAPE_SHAPE_HOST_H_
