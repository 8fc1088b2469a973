// matmul on host memory. A unit is a block of rows of one product.
//
// f32 goes through oneDNN's sgemm, which chooses instructions when it runs; f64 and i64 through
// Eigen, which is compiled for the oldest x86-64. Half types are widened tile by tile and go
// through sgemm. docs/performance.md has the figures behind this. One thread a call: oneDNN's
// OpenMP is told so on every thread that comes by.
//
// Threads: any. Ownership: a static table. Errors: no operand makes the kernel fail; what oneDNN
// refuses, for want of memory say, executors take for a bug (INTERNAL). What else kernels promise
// is said in core/ops/host_kernel.h.
#ifndef CHORUS_CORE_OPS_MATMUL_MATMUL_HOST_H_
#define CHORUS_CORE_OPS_MATMUL_MATMUL_HOST_H_

#include "absl/types/span.h"
#include "core/ops/host_kernel.h"

namespace chorus {

absl::Span<const HostKernelEntry> MatmulHostKernels();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_MATMUL_MATMUL_HOST_H_
