// Indices of a node for kernels of GPUs, and what is said of one that is out of range.
//
// Threads: pure functions. Ownership: what they return is the caller's. Errors: none.
#ifndef CHORUS_CORE_OPS_CUDA_INDICES_H_
#define CHORUS_CORE_OPS_CUDA_INDICES_H_

#include <cstdint>

#include "core/ops/cuda_kernel.h"
#include "core/ops/device_indices.h"
#include "core/ops/op.h"

namespace chorus {

// As HostIndices (core/ops/host_indices.h), but for the memory, which is a call's.
cuda::DeviceIndices IndicesOf(const NodeView& node, int input, int64_t limit);

// For a kernel that tells of an element of these.
LaunchedKernel::Failing OutOfRangeOf(const NodeView& node, int input, int64_t limit);

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_CUDA_INDICES_H_
