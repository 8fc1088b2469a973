// Elementwise ops on a GPU. A thread has elements. In place is allowed.
//
// exp, log, tanh and the like are those of CUDA's library, so their last digits differ from the
// host's; all else is computed as there. Kernels of sin and cos of f64 have a few bytes of memory
// for each thread, in which the library reduces large arguments.
//
// Threads: any. Ownership: a static table. Errors: INVALID_ARGUMENT kBadType where div has an
// integer divisor of 0; the others never fail. What else kernels promise is said in
// core/ops/cuda_kernel.h.
#ifndef CHORUS_CORE_OPS_ELEMENTWISE_ELEMENTWISE_CUDA_H_
#define CHORUS_CORE_OPS_ELEMENTWISE_ELEMENTWISE_CUDA_H_

#include "absl/types/span.h"
#include "core/ops/cuda_kernel.h"

namespace chorus {

absl::Span<const CudaKernelEntry> ElementwiseCudaKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_ELEMENTWISE_ELEMENTWISE_CUDA_H_
