// Makes the conformance suite's kernels for the `cuda` backend.
//
// Threads: a pure function. Ownership: as CudaKernelFactory says. Errors: INTERNAL for other ops.
#ifndef CHORUS_CORE_BACKEND_CUDA_TESTING_TEST_KERNEL_FACTORY_H_
#define CHORUS_CORE_BACKEND_CUDA_TESTING_TEST_KERNEL_FACTORY_H_

#include <memory>

#include "core/ops/cuda_kernel.h"

namespace chorus {

// What MakeTestKernel makes for the host; the GPU must have test_kernel_image().
absl::StatusOr<std::unique_ptr<CudaKernel>> MakeCudaTestKernel(
    const CudaGpu& gpu, const NodeView& node, absl::Span<const TensorType> outputs);

KernelImage TestKernelImage();

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_CUDA_TESTING_TEST_KERNEL_FACTORY_H_
