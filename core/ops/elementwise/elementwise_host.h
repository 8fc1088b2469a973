// Elementwise ops on host memory. A unit is an element. In place is allowed.
//
// Plain loops, which the compiler vectorises where it can. exp, log, tanh and the like call the C
// library once for each element, which is right to the last bits and at the edges. What libraries
// of vector functions would gain, and why they are not used (ns an element; f32, one thread, 16384
// elements; one run on a busy machine with AVX-512, so only the ratios count):
//              C library   Eigen 3.4 (SSE2)   oneDNN 2.6
//   exp          3.5            2.2             0.3        Eigen: exp(-inf) is not 0; oneDNN:
//                                                          exp(NaN) is infinite, exp(-87) is 0
//   log          3.5            2.1             1.1        oneDNN: one digit is right near 1
//   sigmoid      4.3            0.8             0.4        Eigen: 9,000 ulp off at -8.7; oneDNN:
//                                                          0 from -87 on
//   tanh        11.1            1.0             0.5        Eigen: 5 ulp; oneDNN is right
// A partition's bits would need them in blocks: 0.75 ns for oneDNN's exp in blocks of 1024.
//
// Threads: any. Ownership: a static table. Errors: INVALID_ARGUMENT kBadType where div has an
// integer divisor of 0; the others never fail. What else kernels promise is said in
// core/ops/host_kernel.h.
#ifndef CHORUS_CORE_OPS_ELEMENTWISE_ELEMENTWISE_HOST_H_
#define CHORUS_CORE_OPS_ELEMENTWISE_ELEMENTWISE_HOST_H_

#include "absl/types/span.h"
#include "core/ops/host_kernel.h"

namespace chorus {

absl::Span<const HostKernelEntry> ElementwiseHostKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_ELEMENTWISE_ELEMENTWISE_HOST_H_
