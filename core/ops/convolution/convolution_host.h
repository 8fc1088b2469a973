// convolution and its gradients on host memory.
//
// f32 goes through oneDNN's convolutions, one thread a call, in the layouts that these choose:
// operands are reordered block by block. A unit is a slice of the result's channels, or of the
// groups, of a block of samples; of the gradient of weights it is a slice of all samples. The
// blocks, and with them the bits, depend on the sizes alone. f64, which oneDNN does not have, and
// whatever else it refuses goes through plain loops.
//
// Threads: any. Ownership: a static table. Errors: no operand makes the kernels fail; what oneDNN
// refuses as they run, for want of memory say, executors take for a bug (INTERNAL). Each call of
// oneDNN allocates some hundred bytes for its own books. What else kernels promise is said in
// core/ops/host_kernel.h.
#ifndef CHORUS_CORE_OPS_CONVOLUTION_CONVOLUTION_HOST_H_
#define CHORUS_CORE_OPS_CONVOLUTION_CONVOLUTION_HOST_H_

#include "absl/types/span.h"
#include "core/ops/host_kernel.h"

namespace chorus {

absl::Span<const HostKernelEntry> ConvolutionHostKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_CONVOLUTION_CONVOLUTION_HOST_H_
