// The host kernels of this build. Linked by what executes graphs, never by clients.
//
// Threads: any. Ownership: a kernel is the caller's, and refers to nothing that it was made of.
// Errors: said at MakeHostKernel().
#ifndef CHORUS_CORE_OPS_HOST_KERNELS_H_
#define CHORUS_CORE_OPS_HOST_KERNELS_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/ops/host_kernel.h"
#include "core/ops/op.h"

namespace chorus {

// The kernel of a local node that passed InferTypes, whose output types are `outputs`. INTERNAL for
// an op without a kernel; collectives have none, their bytes move in a backend's communicator.
HostKernelOrError MakeHostKernel(const NodeView& node, absl::Span<const TensorType> outputs);

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_HOST_KERNELS_H_
