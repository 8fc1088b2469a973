// A local op's computation on host memory.
//
// A kernel is made once for a node, when a graph is registered: attributes and types are read then,
// and running it allocates nothing that grows with the tensors. Its work is a number of independent
// units; a runtime may run any partition of them, in any order, on any threads: the result's bits
// do not depend on the partition.
//
// Threads: Run is const and thread-compatible with itself on disjoint ranges.
// Memory: buffers are row-major, of exactly the types the kernel was made for, aligned to 64 bytes
// or at least to their element; zero-sized buffers may be null. Outputs do not overlap inputs,
// except that an elementwise op (OpDef::elementwise) may have its output in the place of an input
// of the same type. Inputs are daemon memory: nobody writes to them meanwhile.
#ifndef CHORUS_CORE_OPS_HOST_KERNEL_H_
#define CHORUS_CORE_OPS_HOST_KERNEL_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

class HostKernel {
 public:
  virtual ~HostKernel() = default;

  // How many units there are; 0: nothing to do.
  int64_t units() const { return units_; }
  // Roughly how many bytes or multiply-adds one unit costs: how a runtime chooses where to split.
  int64_t cost_per_unit() const { return cost_per_unit_; }

  // Computes units [begin, end). An error means that the inputs' values are not acceptable.
  virtual absl::Status Run(absl::Span<const void* const> inputs, absl::Span<void* const> outputs,
                           int64_t begin, int64_t end) const = 0;
  absl::Status RunAll(absl::Span<const void* const> inputs, absl::Span<void* const> outputs) const {
    return units_ == 0 ? absl::OkStatus() : Run(inputs, outputs, 0, units_);
  }

 protected:
  HostKernel(int64_t units, int64_t cost_per_unit) : units_(units), cost_per_unit_(cost_per_unit) {}

 private:
  const int64_t units_;
  const int64_t cost_per_unit_;
};

// What an op's folder offers the list in host_kernels.cc. `node` passed InferTypes and `outputs`
// are what it gave; both are only read during the call.
using HostKernelFactory = absl::StatusOr<std::unique_ptr<HostKernel>> (*)(
    const NodeView& node, absl::Span<const TensorType> outputs);
struct HostKernelEntry {
  absl::string_view op;
  HostKernelFactory make = nullptr;
};

// INTERNAL: what a factory answers for types that its op's rule admits and it has no kernel for.
absl::Status NoHostKernel(const NodeView& node, absl::Span<const TensorType> outputs);

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_HOST_KERNEL_H_
