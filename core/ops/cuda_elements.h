// Kernels for GPUs that go element by element, made of what device_elements.h says a thread does.
//
// Threads: any. Ownership: plain values, and kernels that are the caller's. Errors: INTERNAL
// kInternal where there is no kernel of that name. What else kernels promise is said in
// core/ops/cuda_kernel.h.
#ifndef CHORUS_CORE_OPS_CUDA_ELEMENTS_H_
#define CHORUS_CORE_OPS_CUDA_ELEMENTS_H_

#include <cstdint>
#include <string>

#include "absl/types/span.h"
#include "core/ops/cuda_kernel.h"
#include "core/ops/device_elements.h"

namespace chorus {

// All but the addresses.
cuda::ElementsArgs ElementsOf(const NodeView& node, const TensorType& output);
void SetAddresses(const KernelCall& call, cuda::ElementsArgs* args);

// A kernel that is one launch of `name`, an EachElement of the node's inputs.
CudaKernelOrError MakeElements(const CudaGpu& gpu, const NodeView& node,
                               absl::Span<const TensorType> outputs, const std::string& name);
// The same where that kernel takes the two inputs the other way round.
CudaKernelOrError MakeSwappedElements(const CudaGpu& gpu, const NodeView& node,
                                      absl::Span<const TensorType> outputs,
                                      const std::string& name);

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_CUDA_ELEMENTS_H_
