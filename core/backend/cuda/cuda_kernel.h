// A local op as a kernel of the `cuda` backend.
//
// Threads: any number may enqueue one at a time. Ownership: a kernel must outlive the launches that
// use it (core/backend/backend.h, Kernel). Errors: said at each function.
#ifndef CHORUS_CORE_BACKEND_CUDA_CUDA_KERNEL_H_
#define CHORUS_CORE_BACKEND_CUDA_CUDA_KERNEL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/backend/backend.h"
#include "core/backend/cuda/gpu.h"

namespace chorus {

// Where a kernel tells that it failed: the least of what its threads write (cuda::StoreLeast of
// device.h), `first` plus the element of which they found it.
struct KernelFault {
  cuda::DevicePtr word = 0;
  uint64_t first = 0;
};

class CudaKernel : public Kernel {
 public:
  struct Facts {
    std::string op;
    std::string source;        // the trainer's line, or empty
    bool op_may_fail = false;  // MayFail of core/ops/op.h
    // What each operand and the workspace must have.
    std::vector<int64_t> input_bytes;
    std::vector<int64_t> output_bytes;
    int64_t workspace_bytes = 0;
  };
  explicit CudaKernel(Facts facts) : facts_(std::move(facts)) {}
  int64_t workspace_bytes() const final { return facts_.workspace_bytes; }
  const Facts& facts() const { return facts_; }

  // Whether it can tell of a failure.
  virtual bool reports() const { return false; }
  // Of what was told of that element.
  virtual absl::Status Failure(uint64_t /*element*/) const { return absl::OkStatus(); }
  // Puts it on the stream. Operands are what they should be; `fault` is of use if it reports. The
  // driver's error.
  virtual absl::Status Enqueue(const KernelCall& call, const KernelFault& fault, const CudaGpu& gpu,
                               cuda::Stream stream) const = 0;

 private:
  const Facts facts_;
};

// As Device::MakeKernel says, for one GPU.
using CudaKernelFactory = absl::StatusOr<std::unique_ptr<CudaKernel>> (*)(
    const CudaGpu& gpu, const NodeView& node, absl::Span<const TensorType> outputs);

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_CUDA_CUDA_KERNEL_H_
