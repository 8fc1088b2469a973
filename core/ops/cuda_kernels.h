// The kernels for GPUs of this build. Linked by what executes graphs, never by clients.
//
// Threads: any. Ownership: a kernel is the caller's, and refers to nothing that it was made of; the
// images are part of the program. Errors: said at MakeCudaKernel().
#ifndef CHORUS_CORE_OPS_CUDA_KERNELS_H_
#define CHORUS_CORE_OPS_CUDA_KERNELS_H_

#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/cuda/gpu.h"
#include "core/ops/cuda_kernel.h"

namespace chorus {

// The kernel of a local node that passed InferTypes, whose output types are `outputs`. INTERNAL for
// an op without a kernel; collectives have none. The GPU must have CudaKernelImages().
CudaKernelOrError MakeCudaKernel(const CudaGpu& gpu, const NodeView& node,
                                 absl::Span<const TensorType> outputs);

bool HasCudaKernel(absl::string_view op);

// Empty ones where the build had no CUDA toolkit.
std::vector<KernelImage> CudaKernelImages();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_CUDA_KERNELS_H_
