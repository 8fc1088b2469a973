// A local op's computation on host memory.
//
// A kernel is made once for a node, when a graph is registered: attributes and types are read then,
// and running it allocates nothing: what it needs beside its operands it says (workspace_bytes),
// and gets. Its work is a number of independent units; a runtime may run any partition of them, in
// any order, on any threads: the result's bits do not depend on the partition.
//
// Threads: Run is const and thread-compatible with itself on disjoint ranges.
// Ownership: buffers are the caller's; a kernel keeps copies of what it was made of.
// Memory: buffers are row-major, of exactly the types the kernel was made for, aligned to 64 bytes
// or at least to their element; zero-sized buffers may be null. Outputs do not overlap inputs,
// except that an elementwise op (OpDef::elementwise) may have its output in the place of an input
// of the same type. Inputs are daemon memory: nobody writes to them meanwhile.
// Errors: only kernels of ops that say so fail for what inputs hold (MayFail of core/ops/op.h):
// INVALID_ARGUMENT kBadType. Where a kernel of another op fails, that is a bug.
//
// What each *_host.h gives is a table of constants: any thread may read it, nobody owns it, nothing
// fails; for the kernels that are made from it all of this holds.
#ifndef CHORUS_CORE_OPS_HOST_KERNEL_H_
#define CHORUS_CORE_OPS_HOST_KERNEL_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

// What a kernel works on.
struct HostBuffers {
  absl::Span<const void* const> inputs;
  absl::Span<void* const> outputs;
  // As many bytes as the kernel wants, aligned to 64 and unlike all other buffers; whatever they
  // hold. Between two runs anybody may write there. Units that run at a time have it in common: a
  // kernel gives each its own part.
  absl::Span<char> workspace;
};

// What it costs to find an element by so many loops around it, as HostKernel::cost_per_unit counts:
// two divisions each.
constexpr int64_t CostOfLoops(size_t loops) { return 64 * static_cast<int64_t>(loops); }

class HostKernel {
 public:
  virtual ~HostKernel() = default;

  // How many units there are; 0: nothing to do.
  int64_t units() const { return units_; }
  // Roughly how many bytes or multiply-adds one unit costs: how a runtime chooses where to split.
  int64_t cost_per_unit() const { return cost_per_unit_; }
  // Scratch for all units, known from attributes and types. It is reserved with each run's memory,
  // so kernels that want much for a unit have few units.
  int64_t workspace_bytes() const { return workspace_bytes_; }

  // Computes units [begin, end). An error means that the inputs' values are not acceptable.
  virtual absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const = 0;
  absl::Status RunAll(const HostBuffers& buffers) const {
    return units_ == 0 ? absl::OkStatus() : Run(buffers, 0, units_);
  }

 protected:
  HostKernel(int64_t units, int64_t cost_per_unit, int64_t workspace_bytes = 0)
      : units_(units), cost_per_unit_(cost_per_unit), workspace_bytes_(workspace_bytes) {}

 private:
  const int64_t units_;
  const int64_t cost_per_unit_;
  const int64_t workspace_bytes_;
};

// What an op's folder offers the list in host_kernels.cc. `node` passed InferTypes and `outputs`
// are what it gave; both are only read during the call.
using HostKernelOrError = absl::StatusOr<std::unique_ptr<HostKernel>>;
using HostKernelFactory = HostKernelOrError (*)(const NodeView& node,
                                                absl::Span<const TensorType> outputs);
struct HostKernelEntry {
  absl::string_view op;
  HostKernelFactory make = nullptr;
};

// INTERNAL: what a factory answers for types that its op's rule admits and it has no kernel for.
absl::Status NoHostKernel(const NodeView& node, absl::Span<const TensorType> outputs);

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_HOST_KERNEL_H_
